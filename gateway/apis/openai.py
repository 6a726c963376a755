"""The OpenAI routes: bodies to jobs."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Path
from starlette.responses import JSONResponse, Response

from kvrelay.gateway.apis.arrival import arrival_of
from kvrelay.gateway.apis.chat_format import ChatFormat
from kvrelay.gateway.apis.completions_format import AnswerHead, CompletionFormat, Shown
from kvrelay.gateway.apis.docs import (
    REQUEST_HEADERS,
    UNAUTHORIZED,
    ChatAnswer,
    ModelList,
    ServedModel,
    TextAnswer,
    answers,
)
from kvrelay.gateway.apis.jobs import Format, Job, Responder
from kvrelay.gateway.apis.openai_schema import ChatBody, CompletionBody
from kvrelay.gateway.apis.sampling_schema import SamplingBody
from kvrelay.gateway.chat.chats import Chat, ChatReader
from kvrelay.gateway.errors import InvalidRequestError, ModelNotFoundError
from kvrelay.gateway.http.api_request import ApiRequest
from kvrelay.gateway.relay.timings import HEADER as TIMINGS_HEADER
from kvrelay.gateway.text.generation import Generation
from kvrelay.gateway.text.intake import Intake, aside
from kvrelay.gateway.text.spec import GenerationSpec

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions


class OpenAIRoutes:
    """Answers chats, completions, and who asks for the model."""

    def __init__(self, intake: Intake, chats: ChatReader, responder: Responder) -> None:
        self._intake = intake
        self._chats = chats
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
        """The model that is served."""
        return JSONResponse({"object": "list", "data": [self._model_entry()]})

    async def model(self, model: Annotated[str, Path(description="Its name.")]) -> Response:
        """One model, by its name."""
        if model != self._intake.model_name:
            raise ModelNotFoundError(
                f"model {model[:200]!r} is not served here; this deployment serves {self._intake.model_name!r}",
                param="model",
            )
        return JSONResponse(self._model_entry())

    async def chat(self, body: ChatBody, request: ApiRequest) -> Response:
        """Answer a chat."""
        self._intake.check(body.model)
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs=true", param="top_logprobs")
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        num_logprobs = (body.top_logprobs or 0) if body.logprobs else None

        def prepare() -> tuple[Chat, GenerationSpec, list[int]]:
            spec = body.spec(max_tokens=max_tokens, num_logprobs=num_logprobs, max_tokens_param=name)
            chat = self._chats.read(body.chat())
            adds_special_tokens = bool(body.add_special_tokens)
            prompt = self._intake.encode(chat.prompt, "messages", add_special_tokens=adds_special_tokens)
            return chat, chat.guided(spec), prompt

        chat, spec, prompt = await aside(prepare, len(await request.body()))
        generations = self._intake.generations(arrival_of(request), [prompt], spec, prompt_param="messages")

        written = ChatFormat(
            self._head(request),
            self._intake.tokenizer,
            _shown(body, logprobs=bool(body.logprobs)),
            num_choices=spec.num_choices,
            make_parser=None if chat.has_plain_answers else chat.parser,
            echoed=chat.echoed,
        )
        return await self._respond(request, body, spec, generations, written)

    async def completions(self, body: CompletionBody, request: ApiRequest) -> Response:
        """Continue one text, or several."""
        self._intake.check(body.model)
        max_tokens = _DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        spec = body.spec(max_tokens=max_tokens, num_logprobs=body.logprobs)
        if body.echo and body.logprobs is not None and spec.num_prompt_logprobs is None:
            spec = msgspec.structs.replace(spec, num_prompt_logprobs=body.logprobs)
        prompts = await aside(lambda: self._prompts(body), len(await request.body()))
        generations = self._intake.generations(arrival_of(request), prompts, spec, prompt_param="prompt")

        used = [one.prompt_token_ids for one in generations if one.is_first]
        written = CompletionFormat(
            self._head(request),
            self._intake.tokenizer,
            _shown(body, logprobs=body.logprobs is not None),
            num_per_prompt=spec.num_choices,
            echoed=[(self._intake.tokenizer.decode(ids), ids) for ids in used] if body.echo else [],
            prompts=used,
        )
        return await self._respond(request, body, spec, generations, written)

    def _prompts(self, body: CompletionBody) -> list[list[int]]:
        """The prompts as token ids, whichever of the four forms they came in."""
        prompts: list[list[int]] = []
        given = body.prompt
        texts_or_ids: list[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)
        adds_special_tokens = body.add_special_tokens is not False
        for item in texts_or_ids:
            if isinstance(item, str):
                prompts.append(self._intake.encode(item, "prompt", add_special_tokens=adds_special_tokens))
            else:
                self._intake.check_token_ids(item, "prompt")
                prompts.append(item)
        return prompts

    async def _respond(
        self,
        request: ApiRequest,
        body: SamplingBody,
        spec: GenerationSpec,
        generations: list[Generation],
        written: Format,
    ) -> Response:
        job = Job(
            generations,
            written,
            is_stream=bool(body.stream),
            num_per_prompt=1 if spec.beam_search is not None else max(spec.best_of, spec.num_choices),
            num_returned=spec.num_choices,
            ignored=body.ignored(),
            includes_timings=request.headers.get(TIMINGS_HEADER) == "1",
        )
        return await self._responder.respond(request, job)

    def _head(self, request: ApiRequest) -> AnswerHead:
        return AnswerHead(request.internal_id, self._intake.model_name, self._intake.system_fingerprint())

    def _model_entry(self) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "id": self._intake.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "kvrelay",
        }
        if (limits := self._intake.pool.limits) is not None:
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
