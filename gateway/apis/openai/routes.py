"""The OpenAI routes: bodies to jobs."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Path
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
from kvrelay.gateway.apis.answering import Format, Job, Responder, sequences_of
from kvrelay.gateway.apis.openai.answer_parts import AnswerHead, Shown
from kvrelay.gateway.apis.openai.bodies import ChatBody, CompletionBody
from kvrelay.gateway.apis.openai.chat_answer import ChatFormat
from kvrelay.gateway.apis.openai.completion_answer import CompletionFormat
from kvrelay.gateway.apis.openai.sampling import SamplingBody
from kvrelay.gateway.chat.chat import Chat
from kvrelay.gateway.errors import InvalidRequestError
from kvrelay.gateway.http.request import ApiRequest
from kvrelay.gateway.model import Model, Models
from kvrelay.gateway.relay.request import GenerationRequest, GenerationSpec
from kvrelay.gateway.relay.timings import HEADER as TIMINGS_HEADER
from kvrelay.gateway.text.tokenizer import aside

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions


class OpenAIRoutes:
    """Answers chats, completions, and who asks for the model."""

    def __init__(self, models: Models, responder: Responder) -> None:
        self._models = models
        self._responder = responder

    def add_to(self, app: FastAPI) -> None:
        """Declare the routes."""
        tags: list[str | Enum] = ["OpenAI"]
        for path, endpoint, whole in (
            ("/v1/chat/completions", self.chat, ChatAnswer),
            ("/v1/completions", self.completions, TextAnswer),
        ):
            app.post(path, tags=tags, responses=answers(whole), openapi_extra=REQUEST_HEADERS)(endpoint)
        models: dict[int | str, dict[str, Any]] = {200: {"model": ModelList}, **UNAUTHORIZED}
        app.get("/v1/models", tags=tags, responses=models)(self.models)
        app.get("/v1/models/{model:path}", tags=tags, responses={**answers(ServedModel), **UNAUTHORIZED})(self.model)

    async def models(self) -> Response:
        """The models that are served."""
        return JSONResponse({"object": "list", "data": [_model_entry(model) for model in self._models]})

    async def model(self, model: Annotated[str, Path(description="Its name.")]) -> Response:
        """One model, by its name."""
        return JSONResponse(_model_entry(self._models.named(model)))

    async def chat(self, body: ChatBody, request: ApiRequest) -> Response:
        """Answer a chat."""
        model = self._models.find(body.model)
        model.check()
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs=true", param="top_logprobs")
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        num_logprobs = (body.top_logprobs or 0) if body.logprobs else None

        def prepare() -> tuple[Chat, GenerationSpec, list[int]]:
            spec = body.spec(max_tokens=max_tokens, num_logprobs=num_logprobs, max_tokens_param=name)
            chat = body.chat(model)
            adds_special_tokens = bool(body.add_special_tokens)
            prompt = model.encode(chat.prompt, "messages", add_special_tokens=adds_special_tokens)
            return chat, chat.guided(spec), prompt

        chat, spec, prompt = await aside(prepare, len(await request.body()))
        sequences = sequences_of(model, request, [prompt], spec, "messages")

        written = ChatFormat(
            _head(model, request),
            model.tokenizer,
            _shown(body, logprobs=bool(body.logprobs)),
            num_choices=spec.num_choices,
            make_parser=None if chat.has_plain_answers else chat.parser,
            echoed=chat.echoed,
        )
        return await self._respond(request, body, model, sequences, written)

    async def completions(self, body: CompletionBody, request: ApiRequest) -> Response:
        """Continue one text, or several."""
        model = self._models.find(body.model)
        model.check()
        max_tokens = _DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        spec = body.spec(max_tokens=max_tokens, num_logprobs=body.logprobs)
        if body.echo and body.logprobs is not None and spec.num_prompt_logprobs is None:
            spec = msgspec.structs.replace(spec, num_prompt_logprobs=body.logprobs)
        prompts = await aside(lambda: _prompts(model, body), len(await request.body()))
        sequences = sequences_of(model, request, prompts, spec, "prompt")

        used = [one.prompt_token_ids for one in sequences if one.is_first]
        written = CompletionFormat(
            _head(model, request),
            model.tokenizer,
            _shown(body, logprobs=body.logprobs is not None),
            num_per_prompt=spec.num_choices,
            echoed=[(model.tokenizer.decode(ids), ids) for ids in used] if body.echo else [],
            prompts=used,
        )
        return await self._respond(request, body, model, sequences, written)

    async def _respond(
        self,
        request: ApiRequest,
        body: SamplingBody,
        model: Model,
        sequences: list[GenerationRequest],
        written: Format,
    ) -> Response:
        job = Job(
            model,
            sequences,
            written,
            is_stream=bool(body.stream),
            ignored=body.ignored(),
            includes_timings=request.headers.get(TIMINGS_HEADER) == "1",
        )
        return await self._responder.respond(request, job)


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


def _head(model: Model, request: ApiRequest) -> AnswerHead:
    return AnswerHead(request.internal_id, model.name, model.system_fingerprint())


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
