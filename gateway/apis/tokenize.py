"""``/tokenize``, ``/chat_tokenize`` and ``/detokenize``: text to tokens and back, for clients of TGI and of vLLM.

Both servers use the same path. A body with ``inputs`` is TGI's; one with ``prompt`` or ``messages`` is vLLM's. Answers and errors
have the shape of the server that the body was written for. A worker is needed only for chats with images.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.responses import Response

from kvrelay.gateway.apis.answer_docs import ErrorBody
from kvrelay.gateway.apis.answering import served_models
from kvrelay.gateway.apis.openai.bodies import ChatBody, Messages, checked_messages
from kvrelay.gateway.apis.openai.sampling import TokenId
from kvrelay.gateway.apis.prompts import files_of, image_texts, prompt_of, size_without_images, text_of_chat
from kvrelay.gateway.apis.tgi.answer_docs import tgi_answers
from kvrelay.gateway.chat.dialect import Chat, read_chat
from kvrelay.gateway.chat.images import Gallery
from kvrelay.gateway.errors import ApiError, InvalidRequestError
from kvrelay.gateway.http.edge import error_response
from kvrelay.gateway.http.request import ApiRequest, ApiRoute, RequestBody
from kvrelay.gateway.model import Model
from kvrelay.gateway.relay.image_texts import Patience
from kvrelay.gateway.text.sampling import check_token_ids
from kvrelay.gateway.text.tokenizer import aside, check_text


class TokenizeBody(RequestBody):
    """``POST /tokenize``: TGI's with ``inputs``, vLLM's with ``prompt`` or ``messages``."""

    inputs: str | None = None
    """A text to tokenize, as TGI asks for it."""
    model: str | None = None
    """A model, or an alias; left out, it is the default one."""
    prompt: str | None = None
    """A text to tokenize."""
    messages: Messages | None = None
    """A chat to tokenize."""
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    """Functions that the chat's template shows."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds special tokens: by default to texts, not to chats."""
    add_generation_prompt: bool | None = None
    """Whether the chat template opens the answer, as by default."""
    continue_final_message: bool | None = None
    """Whether the last message is left open."""
    chat_template_kwargs: dict[str, Any] | None = None
    """More names for the chat template."""
    return_token_strs: bool | None = None
    """Whether to tell how the vocabulary writes each token."""

    def chat(self, model: Model) -> Chat:
        """The ``messages`` as the model's prompt. Raises InvalidRequestError naming the field that is wrong."""
        gallery = Gallery()
        return read_chat(
            model.template,
            model.dialect,
            checked_messages(self.messages or (), gallery),
            tools=self.tools,
            continues=bool(self.continue_final_message),
            add_generation_prompt=self.add_generation_prompt is not False,
            variables=self.chat_template_kwargs,
            images=gallery.images,
            given={"messages": self.messages, "tools": self.tools, "chat_template_kwargs": self.chat_template_kwargs},
        )


class DetokenizeBody(RequestBody):
    """``POST /detokenize``, as vLLM's."""

    model: str | None = None
    """A model, or an alias; left out, it is the default one."""
    tokens: Annotated[list[TokenId], Field(max_length=1_000_000, fail_fast=True)]
    """Token ids to turn into text."""


class SpanToken(BaseModel):
    """A token of a text, and where it stands there, in characters."""

    id: int = Field(ge=0, description="Its id.")
    text: str = Field(description="Its text.")
    start: int = Field(ge=0, description="Where it begins, in characters.")
    stop: int = Field(ge=0, description="Where it ends.")


class ChatTokens(BaseModel):
    """Of ``/chat_tokenize``."""

    tokenize_response: list[SpanToken] = Field(description="The tokens.")
    templated_text: str = Field(description="The chat as its template writes it.")


class PromptTokens(BaseModel):
    """Of ``/tokenize``, in vLLM's form."""

    count: int = Field(ge=0, description="How many tokens there are.")
    max_model_len: int | None = Field(description="So many tokens prompt and answer may have.")
    tokens: list[int] = Field(description="Their ids.")
    token_strs: list[str] | None = Field(description="How the vocabulary writes them, if asked for.")


class Detokenized(BaseModel):
    """Of ``/detokenize``, as vLLM's."""

    prompt: str = Field(description="The text, special tokens included.")


router = APIRouter(route_class=ApiRoute, tags=["tokens"])

_CHUNK_TOKENS = 2_000  # tokens written at a time: the work runs on a thread, and streams go on in between


@router.post("/tokenize", responses=tgi_answers(list[SpanToken], PromptTokens, also=ErrorBody))
async def tokenize(body: TokenizeBody, request: ApiRequest) -> Response:
    """The tokens of a text or a chat."""
    given = [name for name in ("inputs", "prompt", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise InvalidRequestError(
            f"the body has {' and '.join(given) or 'none of inputs, prompt and messages'}; it must have exactly one "
            "of inputs, prompt and messages"
        )
    size, models = request.num_body_bytes, served_models(request)
    if body.messages is None:
        request.check_size(size)
    if (text := body.inputs) is not None:
        adds_special_tokens = body.add_special_tokens is not False
        return _json(await aside(lambda: _spans(models.find(body.model), text, "inputs", adds_special_tokens), size))
    try:
        return _json(await _ids(models.find(body.model), body, request))
    except ApiError as error:
        return error_response(request.fail(error))  # in vLLM's shape, which is OpenAI's


@router.post("/chat_tokenize", responses=tgi_answers(ChatTokens))
async def chat_tokenize(body: ChatBody, request: ApiRequest) -> Response:
    """A chat as text, and its tokens."""
    models = served_models(request)
    model = models.find(body.model if body.model in models else None)  # TGI ignores the model's name

    size = request.num_body_bytes
    chat = await aside(lambda: body.chat(model), size)
    request.check_size(size_without_images(size, chat))
    patience = Patience(request.flow(), request.timeout_s())
    told = await image_texts(model, await files_of(model, chat, request, patience), patience)

    def work() -> bytes:
        text = text_of_chat(model, chat, told)
        tokens = _spans(model, text, "messages", bool(body.add_special_tokens))
        return b'{"tokenize_response":' + tokens + b',"templated_text":' + msgspec.json.encode(text) + b"}"

    return _json(await aside(work, size))


@router.post("/detokenize", responses=tgi_answers(Detokenized, also=ErrorBody))
async def detokenize(body: DetokenizeBody, request: ApiRequest) -> Response:
    """The text of tokens, special ones included."""
    model = served_models(request).find(body.model)
    tokenizer, limits = model.tokenizer, model.pool.limits
    check_token_ids(body.tokens, tokenizer.vocab_size if limits is None else limits.vocab_size, "tokens")

    def work() -> bytes:
        return msgspec.json.encode({"prompt": tokenizer.decode_all(body.tokens)})

    return _json(await aside(work, request.num_body_bytes))


async def _ids(model: Model, body: TokenizeBody, request: ApiRequest) -> bytes:
    """vLLM's answer."""
    tokenizer, given, size = model.tokenizer, body.prompt, request.num_body_bytes
    param = "messages" if given is None else "prompt"
    adds_special_tokens = bool(body.add_special_tokens) if given is None else body.add_special_tokens is not False

    def encode(text: str) -> list[int]:
        check_text(text, param)
        return tokenizer.encode(text, add_special_tokens=adds_special_tokens)

    if given is not None:
        ids = await aside(lambda: encode(given), size)
    else:
        patience = Patience(request.flow(), request.timeout_s())
        _, _, prompt = await prompt_of(model, lambda: (body.chat(model), None), encode, size, request, patience)
        ids = prompt.token_ids

    def written() -> bytes:
        limits = model.pool.limits
        answer = {
            "count": len(ids),
            "max_model_len": None if limits is None else limits.max_model_len,
            "tokens": ids,
            "token_strs": [tokenizer.token_name(token_id) for token_id in ids] if body.return_token_strs else None,
        }
        return msgspec.json.encode(answer)

    return await aside(written, size)


def _spans(model: Model, text: str, param: str, adds_special_tokens: bool) -> bytes:
    """TGI's list of tokens."""
    check_text(text, param)
    spans = model.tokenizer.spans(text, add_special_tokens=adds_special_tokens)
    return b"[" + b",".join(_written(text, spans)) + b"]"


def _written(text: str, spans: Sequence[tuple[int, int, int]]) -> Iterator[bytes]:
    """The items of a JSON list, many at a time: the encoder holds the interpreter's lock."""
    for first in range(0, len(spans), _CHUNK_TOKENS):
        tokens = [
            {"id": token_id, "text": text[start:stop], "start": start, "stop": stop}
            for token_id, start, stop in spans[first : first + _CHUNK_TOKENS]
        ]
        yield msgspec.json.encode(tokens)[1:-1]


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
