"""The OpenAI routes: they turn bodies into requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
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
from kvrelay.gateway.apis.answering import chat_of, model_for, respond, sequences_of, served_models
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
    """The models that are served, then their aliases, then adapters."""
    models = served_models(request)
    return JSONResponse({"object": "list", "data": [_model_entry(name, models.shares(name)) for name in models.names]})


@router.get("/v1/models/{model:path}", responses={**answers(ServedModel), **UNAUTHORIZED})
async def model(request: Request, model: Annotated[str, Path(description="Its name.")]) -> Response:
    """One model, by its name or an alias."""
    return JSONResponse(_model_entry(model, served_models(request).shares(model)))


@router.post("/v1/chat/completions", responses=answers(ChatAnswer), openapi_extra=REQUEST_HEADERS)
async def chat(body: ChatBody, request: ApiRequest) -> Response:
    """Answer a chat."""
    model = model_for(request, body.model, body.conversation)
    model.check(request.flow(body.line_priority))
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs=true", param="top_logprobs")
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None

    def prepare() -> tuple[GenerationSpec, Chat]:
        return body.spec(max_tokens=max_tokens, num_logprobs=num_logprobs, max_tokens_param=name), body.chat(model)

    adds_special_tokens = bool(body.add_special_tokens)
    chat, sequences = await chat_of(model, request, prepare, "messages", add_special_tokens=adds_special_tokens)
    written = ChatFormat(
        _head(model, request, "chatcmpl", "chat.completion"),
        model.tokenizer,
        _shown(body, logprobs=bool(body.logprobs)),
        num_choices=body.n or 1,
        make_parser=None if chat.has_plain_answers else chat.parser,
        echoed=chat.echoed,
    )
    return await respond(request, model, sequences, written, is_stream=bool(body.stream), ignored=body.ignored())


@router.post("/v1/completions", responses=answers(TextAnswer), openapi_extra=REQUEST_HEADERS)
async def completions(body: CompletionBody, request: ApiRequest) -> Response:
    """Continue one text, or several."""
    model = model_for(request, body.model, body.conversation)
    model.check(request.flow(body.line_priority))
    max_tokens = _DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    spec = body.spec(max_tokens=max_tokens, num_logprobs=body.logprobs)
    if body.echo and body.logprobs is not None and spec.num_prompt_logprobs is None:
        spec = msgspec.structs.replace(spec, num_prompt_logprobs=body.logprobs)
    prompts = await aside(lambda: _prompts(model, body), request.num_body_bytes)
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
    """The prompts as token ids, whichever of the four forms the client used."""
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
    """The first fields of an answer. ``prefix``: of its id. ``kind``: its object type."""
    return {
        "id": f"{prefix}-{request.internal_id}",
        "object": kind,
        "created": int(time.time()),
        "model": model.name,
        "system_fingerprint": model.system_fingerprint(),
    }


def _model_entry(name: str, shares: Sequence[tuple[Model, float]]) -> dict[str, Any]:
    entry: dict[str, Any] = {"id": name, "object": "model", "created": 0, "owned_by": "kvrelay"}
    limits = [model.pool.limits.max_model_len for model, _ in shares if model.pool.limits is not None]
    if limits:
        entry["max_model_len"] = min(limits)
    if len(shares) > 1:
        total = sum(weight for _, weight in shares)
        entry["split"] = {model.name: round(weight / total, 6) for model, weight in shares}
        return entry
    [(model, _)] = shares
    if model.name != name:
        entry["root"] = model.name
    elif model.adapter is not None:
        entry["parent"] = model.base_name
    return entry


def _shown(body: SamplingBody, *, logprobs: bool) -> Shown:
    options = body.stream_options
    tells_usage = options is not None and bool(options.include_usage)
    return Shown(
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs is not None,
        token_ids=bool(body.return_token_ids),
        ids_as_tokens=bool(body.return_tokens_as_token_ids),
        usage=tells_usage,
        usage_so_far=tells_usage and options is not None and bool(options.continuous_usage_stats),
    )
