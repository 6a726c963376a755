"""The OpenAI routes: bodies to jobs."""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Path, Request
from starlette.responses import JSONResponse, Response

from kvrelay.gateway.apis.answer_docs import (
    REQUEST_HEADERS,
    UNAUTHORIZED,
    ChatAnswer,
    ModelList,
    ServedModel,
    TextAnswer,
    answers,
)
from kvrelay.gateway.apis.answering import respond, sequences_of, served_models
from kvrelay.gateway.apis.openai.bodies import ChatBody, CompletionBody
from kvrelay.gateway.apis.openai.chat_answer import ChatFormat
from kvrelay.gateway.apis.openai.completion_answer import CompletionFormat, Shown
from kvrelay.gateway.apis.openai.sampling import SamplingBody
from kvrelay.gateway.chat.dialect import Chat
from kvrelay.gateway.errors import InvalidRequestError
from kvrelay.gateway.http.request import ApiRequest, ApiRoute
from kvrelay.gateway.model import Model
from kvrelay.gateway.relay.request import GenerationSpec
from kvrelay.gateway.text.tokenizer import aside

router = APIRouter(route_class=ApiRoute, tags=["OpenAI"])

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions


@router.get("/v1/models", responses={200: {"model": ModelList}, **UNAUTHORIZED})
async def models(request: Request) -> Response:
    """The models that are served."""
    return JSONResponse({"object": "list", "data": [_model_entry(model) for model in served_models(request)]})


@router.get("/v1/models/{model:path}", responses={**answers(ServedModel), **UNAUTHORIZED})
async def model(request: Request, model: Annotated[str, Path(description="Its name.")]) -> Response:
    """One model, by its name."""
    return JSONResponse(_model_entry(served_models(request).named(model)))


@router.post("/v1/chat/completions", responses=answers(ChatAnswer), openapi_extra=REQUEST_HEADERS)
async def chat(body: ChatBody, request: ApiRequest) -> Response:
    """Answer a chat."""
    model = served_models(request).find(body.model)
    model.check()
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs=true", param="top_logprobs")
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None

    def prepare() -> tuple[Chat, GenerationSpec, list[int]]:
        spec = body.spec(max_tokens=max_tokens, num_logprobs=num_logprobs, max_tokens_param=name)
        chat = body.chat(model)
        prompt = model.encode(chat.prompt, "messages", add_special_tokens=bool(body.add_special_tokens))
        return chat, chat.guided(spec), prompt

    chat, spec, prompt = await aside(prepare, len(await request.body()))
    sequences = sequences_of(model, request, [prompt], spec, "messages")
    written = ChatFormat(
        _head(model, request, "chatcmpl", "chat.completion"),
        model.tokenizer,
        _shown(body, logprobs=bool(body.logprobs)),
        num_choices=spec.num_choices,
        make_parser=None if chat.has_plain_answers else chat.parser,
        echoed=chat.echoed,
    )
    return await respond(request, model, sequences, written, is_stream=bool(body.stream), ignored=body.ignored())


@router.post("/v1/completions", responses=answers(TextAnswer), openapi_extra=REQUEST_HEADERS)
async def completions(body: CompletionBody, request: ApiRequest) -> Response:
    """Continue one text, or several."""
    model = served_models(request).find(body.model)
    model.check()
    max_tokens = _DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    spec = body.spec(max_tokens=max_tokens, num_logprobs=body.logprobs)
    if body.echo and body.logprobs is not None and spec.num_prompt_logprobs is None:
        spec = msgspec.structs.replace(spec, num_prompt_logprobs=body.logprobs)
    prompts = await aside(lambda: _prompts(model, body), len(await request.body()))
    sequences = sequences_of(model, request, prompts, spec, "prompt")
    used = [one.prompt_token_ids for one in sequences if one.is_first]
    written = CompletionFormat(
        _head(model, request, "cmpl", "text_completion"),
        model.tokenizer,
        _shown(body, logprobs=body.logprobs is not None),
        num_per_prompt=spec.num_choices,
        echoed=[(model.tokenizer.decode(ids), ids) for ids in used] if body.echo else [],
        prompts=used,
    )
    return await respond(request, model, sequences, written, is_stream=bool(body.stream), ignored=body.ignored())


def _prompts(model: Model, body: CompletionBody) -> list[list[int]]:
    """The prompts as token ids, whichever of the four forms they came in."""
    prompts: list[list[int]] = []
    given = body.prompt
    texts_or_ids: list[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)
    adds_special_tokens = body.add_special_tokens is not False
    for item in texts_or_ids:
        if isinstance(item, str):
            prompts.append(model.encode(item, "prompt", add_special_tokens=adds_special_tokens))
        else:
            model.check_token_ids(item, "prompt")
            prompts.append(item)
    return prompts


def _head(model: Model, request: ApiRequest, prefix: str, kind: str) -> dict[str, Any]:
    """What an answer begins with: ``prefix`` of its id, ``kind`` of object."""
    return {
        "id": f"{prefix}-{request.internal_id}",
        "object": kind,
        "created": int(time.time()),
        "model": model.name,
        "system_fingerprint": model.system_fingerprint(),
    }


def _model_entry(model: Model) -> dict[str, Any]:
    entry: dict[str, Any] = {"id": model.name, "object": "model", "created": 0, "owned_by": "kvrelay"}
    if (limits := model.pool.limits) is not None:
        entry["max_model_len"] = limits.max_model_len
    return entry


def _shown(body: SamplingBody, *, logprobs: bool) -> Shown:
    return Shown(
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs is not None,
        token_ids=bool(body.return_token_ids),
        ids_as_tokens=bool(body.return_tokens_as_token_ids),
        usage=body.stream_options is not None and bool(body.stream_options.include_usage),
    )
