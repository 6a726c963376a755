"""``/tokenize``, ``/chat_tokenize`` and ``/detokenize``: text to tokens and back, as TGI's and vLLM's clients ask for it.

TGI and vLLM have the same path for it. A body with ``inputs`` is TGI's, one with ``prompt`` or ``messages`` vLLM's; each is
answered, and refused, as the server does that it was meant for. No worker is needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from kvrelay.gateway.api import reading
from kvrelay.gateway.api_request import ApiRequest, Endpoint
from kvrelay.gateway.chats import ChatReader
from kvrelay.gateway.errors import ApiError, InvalidRequestError
from kvrelay.gateway.http import error_response
from kvrelay.gateway.intake import Intake
from kvrelay.gateway.openai_schema import ChatBody, DetokenizeBody, TokenizeBody
from kvrelay.gateway.params import check_token_ids
from kvrelay.gateway.tgi.docs import (
    TOKENIZE_ERRORS,
    ChatTokens,
    Detokenized,
    PromptTokens,
    SpanToken,
    tgi_answers,
)
from kvrelay.gateway.tokenizer import Tokenizer

_CHUNK_TOKENS = 2_000  # that are written without a pause: on a thread, streams go on in between
_MANY_TOKENS = 2_000  # from which the work goes to a thread


class AnyTokenizeBody(TokenizeBody):
    """``POST /tokenize``: TGI's with ``inputs``, vLLM's with ``prompt`` or ``messages``."""

    inputs: str | None = None
    """A text to tokenize, as TGI asks for it."""


class TokenizeRoutes:
    """Holds what the routes need; ``router`` is mounted by the app."""

    def __init__(self, intake: Intake, chats: ChatReader) -> None:
        self._intake = intake
        self._chats = chats
        self.router = APIRouter(tags=["tokens"])
        # Only documented here: the app's edge calls ``endpoints`` itself.
        for path, answer, answers in (
            ("/tokenize", self.tokenize, tgi_answers(list[SpanToken], PromptTokens, also=TOKENIZE_ERRORS)),
            ("/chat_tokenize", self.chat_tokenize, tgi_answers(ChatTokens)),
            ("/detokenize", self.detokenize, tgi_answers(Detokenized, also=TOKENIZE_ERRORS)),
        ):
            self.router.add_api_route(path, answer, methods=["POST"], response_model=None, responses=answers)

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """What answers a POST to these paths."""
        return {
            "/tokenize": reading(AnyTokenizeBody, self.tokenize),
            "/chat_tokenize": reading(ChatBody, self.chat_tokenize),
            "/detokenize": reading(DetokenizeBody, self.detokenize),
        }

    async def tokenize(self, body: AnyTokenizeBody, request: ApiRequest) -> Response:
        """The tokens of a text or a chat."""
        given = [name for name in ("inputs", "prompt", "messages") if getattr(body, name) is not None]
        if len(given) != 1:
            raise InvalidRequestError(
                f"the body has {' and '.join(given) or 'none of inputs, prompt and messages'}; it must have exactly one "
                "of inputs, prompt and messages"
            )
        if body.inputs is not None:
            return await self._spans(body.inputs, "inputs", adds_special_tokens=body.add_special_tokens is not False)
        try:
            return await self._ids(body)
        except ApiError as error:
            return error_response(error)  # in vLLM's shape, which is OpenAI's

    async def chat_tokenize(self, body: ChatBody, request: ApiRequest) -> Response:
        """A chat as text, and its tokens."""
        text = self._chats.read(body.chat()).prompt
        return await self._spans(
            text,
            "messages",
            adds_special_tokens=bool(body.add_special_tokens),
            head=b'{"tokenize_response":',
            tail=b',"templated_text":' + msgspec.json.encode(text) + b"}",
        )

    async def detokenize(self, body: DetokenizeBody, request: ApiRequest) -> Response:
        """The text of tokens, special ones included."""
        self._intake.check_name(body.model)
        tokenizer = self._intake.tokenizer
        limits = self._intake.known_limits()
        check_token_ids(body.tokens, tokenizer.vocab_size if limits is None else limits.vocab_size, "tokens")

        def work() -> bytes:
            return msgspec.json.encode({"prompt": tokenizer.decode_all(body.tokens)})

        return _json(work() if len(body.tokens) < _MANY_TOKENS else await asyncio.to_thread(work))

    async def _ids(self, body: TokenizeBody) -> Response:
        self._intake.check_name(body.model)
        if body.prompt is not None:
            text, param = body.prompt, "prompt"
            adds_special_tokens = body.add_special_tokens is not False
        else:
            assert body.messages is not None
            chat = ChatBody(
                messages=body.messages,
                tools=body.tools,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                chat_template_kwargs=body.chat_template_kwargs,
            )
            text, param = self._chats.read(chat.chat()).prompt, "messages"
            adds_special_tokens = bool(body.add_special_tokens)
        tokenizer, limits = self._intake.tokenizer, self._intake.known_limits()

        def work() -> bytes:
            ids = tokenizer.encode(text, add_special_tokens=adds_special_tokens)
            answer = {
                "count": len(ids),
                "max_model_len": None if limits is None else limits.max_model_len,
                "tokens": ids,
                "token_strs": [tokenizer.token_name(token_id) for token_id in ids] if body.return_token_strs else None,
            }
            return msgspec.json.encode(answer)

        return _json(await self._intake.with_text(work, text, param))

    async def _spans(
        self, text: str, param: str, *, adds_special_tokens: bool, head: bytes = b"", tail: bytes = b""
    ) -> Response:
        """TGI's list of tokens, between ``head`` and ``tail``."""
        tokenizer = self._intake.tokenizer
        return _json(
            head + await self._intake.with_text(_span_work(tokenizer, text, adds_special_tokens), text, param) + tail
        )


def _span_work(tokenizer: Tokenizer, text: str, adds_special_tokens: bool) -> Callable[[], bytes]:
    def work() -> bytes:
        spans = tokenizer.spans(text, add_special_tokens=adds_special_tokens)
        return b"[" + b",".join(_written(text, spans)) + b"]"

    return work


def _written(text: str, spans: Sequence[tuple[int, int, int]]) -> Iterator[bytes]:
    """The items of a JSON list, many at a time: what encodes them holds the interpreter's lock."""
    for first in range(0, len(spans), _CHUNK_TOKENS):
        tokens = [
            {"id": token_id, "text": text[start:stop], "start": start, "stop": stop}
            for token_id, start, stop in spans[first : first + _CHUNK_TOKENS]
        ]
        yield msgspec.json.encode(tokens)[1:-1]


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
