"""``/tokenize``, ``/chat_tokenize`` and ``/detokenize``: text to tokens and back, as TGI's and vLLM's clients ask for it.

TGI and vLLM have the same path for it. A body with ``inputs`` is TGI's, one with ``prompt`` or ``messages`` vLLM's; each is
answered, and refused, as the server does that it was meant for. No worker is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from fastapi import FastAPI
from starlette.responses import Response

from kvrelay.gateway.apis.answer_docs import ErrorBody
from kvrelay.gateway.apis.openai.bodies import ChatBody
from kvrelay.gateway.apis.tgi.answer_docs import tgi_answers
from kvrelay.gateway.apis.tokenize.bodies import (
    ChatTokens,
    DetokenizeBody,
    Detokenized,
    PromptTokens,
    SpanToken,
    TokenizeBody,
)
from kvrelay.gateway.errors import ApiError, InvalidRequestError
from kvrelay.gateway.http.edge import error_response
from kvrelay.gateway.http.request import ApiRequest
from kvrelay.gateway.model import Model, Models
from kvrelay.gateway.text.sampling import check_token_ids
from kvrelay.gateway.text.tokenizer import aside, check_text

_CHUNK_TOKENS = 2_000  # that are written without a pause: on a thread, streams go on in between


class TokenizeRoutes:
    """Answers who asks for tokens, or for their text."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def add_to(self, app: FastAPI) -> None:
        """Declare the routes."""
        for path, endpoint, answers in (
            ("/tokenize", self.tokenize, tgi_answers(list[SpanToken], PromptTokens, also=ErrorBody)),
            ("/chat_tokenize", self.chat_tokenize, tgi_answers(ChatTokens)),
            ("/detokenize", self.detokenize, tgi_answers(Detokenized, also=ErrorBody)),
        ):
            app.post(path, tags=["tokens"], responses=answers)(endpoint)

    async def tokenize(self, body: TokenizeBody, request: ApiRequest) -> Response:
        """The tokens of a text or a chat."""
        given = [name for name in ("inputs", "prompt", "messages") if getattr(body, name) is not None]
        if len(given) != 1:
            raise InvalidRequestError(
                f"the body has {' and '.join(given) or 'none of inputs, prompt and messages'}; it must have exactly one "
                "of inputs, prompt and messages"
            )
        size = len(await request.body())
        if body.inputs is not None:
            tgis, text, adds_special_tokens = self._models.find(None), body.inputs, body.add_special_tokens is not False
            return _json(await aside(lambda: _spans(tgis, text, "inputs", adds_special_tokens), size))
        try:
            model = self._models.find(body.model)
            return _json(await aside(lambda: _ids(model, body), size))
        except ApiError as error:
            return error_response(request.fail(error))  # in vLLM's shape, which is OpenAI's

    async def chat_tokenize(self, body: ChatBody, request: ApiRequest) -> Response:
        """A chat as text, and its tokens."""
        model = self._models.find(None)  # TGI looks at no name

        def work() -> bytes:
            text = body.chat(model).prompt
            tokens = _spans(model, text, "messages", bool(body.add_special_tokens))
            return b'{"tokenize_response":' + tokens + b',"templated_text":' + msgspec.json.encode(text) + b"}"

        return _json(await aside(work, len(await request.body())))

    async def detokenize(self, body: DetokenizeBody, request: ApiRequest) -> Response:
        """The text of tokens, special ones included."""
        model = self._models.find(body.model)
        tokenizer, limits = model.tokenizer, model.pool.limits
        check_token_ids(body.tokens, tokenizer.vocab_size if limits is None else limits.vocab_size, "tokens")

        def work() -> bytes:
            return msgspec.json.encode({"prompt": tokenizer.decode_all(body.tokens)})

        return _json(await aside(work, len(await request.body())))


def _ids(model: Model, body: TokenizeBody) -> bytes:
    """vLLM's answer."""
    if body.prompt is not None:
        text, param = body.prompt, "prompt"
        adds_special_tokens = body.add_special_tokens is not False
    else:
        text, param = body.chat(model), "messages"
        adds_special_tokens = bool(body.add_special_tokens)
    tokenizer, limits = model.tokenizer, model.pool.limits
    check_text(text, param)
    ids = tokenizer.encode(text, add_special_tokens=adds_special_tokens)
    answer = {
        "count": len(ids),
        "max_model_len": None if limits is None else limits.max_model_len,
        "tokens": ids,
        "token_strs": [tokenizer.token_name(token_id) for token_id in ids] if body.return_token_strs else None,
    }
    return msgspec.json.encode(answer)


def _spans(model: Model, text: str, param: str, adds_special_tokens: bool) -> bytes:
    """TGI's list of tokens."""
    check_text(text, param)
    spans = model.tokenizer.spans(text, add_special_tokens=adds_special_tokens)
    return b"[" + b",".join(_written(text, spans)) + b"]"


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
