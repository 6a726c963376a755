"""The OpenAI routes: bodies to jobs."""

from __future__ import annotations

import asyncio
import re
import secrets
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from kvrelay.common.model_card import ModelCard
from kvrelay.gateway.admission import Admission
from kvrelay.gateway.api_docs import (
    REQUEST_HEADERS,
    SECONDS,
    TIMEOUT_HEADER,
    UNAUTHORIZED,
    ChatAnswer,
    ModelList,
    TextAnswer,
    answers,
)
from kvrelay.gateway.bodies import read_body
from kvrelay.gateway.chat_template import ChatTemplate
from kvrelay.gateway.errors import InvalidRequestError, ModelNotFoundError, UnavailableError
from kvrelay.gateway.formats import ChatFormat, CompletionFormat
from kvrelay.gateway.generation import Generation
from kvrelay.gateway.http import Endpoint
from kvrelay.gateway.openai_schema import ChatBody, CompletionBody, SamplingBody
from kvrelay.gateway.params import check_token_ids, limit_tokens, sampling_params
from kvrelay.gateway.streaming import Format, Job, Responder
from kvrelay.gateway.timings import HEADER as TIMINGS_HEADER
from kvrelay.gateway.timings import RequestTimings
from kvrelay.gateway.tokenizer import Tokenizer
from kvrelay.gateway.workers import WorkerPool

_SECONDS = re.compile(SECONDS)
_LONG_TEXT = 4_000  # characters (about 1 ms) from which encoding goes to a thread, so that no stream waits for it
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions


class OpenAIRoutes:
    """Holds what the routes need; ``router`` is mounted by the app."""

    def __init__(
        self,
        model_name: str,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        pool: WorkerPool,
        admission: Admission,
        responder: Responder,
    ) -> None:
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._template = template
        self._pool = pool
        self._admission = admission
        self._responder = responder
        self.router = APIRouter(prefix="/v1", tags=["OpenAI"])
        # Only documented here: the app's edge calls ``endpoints`` itself.
        for path, answer, whole in (
            ("/chat/completions", self.chat, ChatAnswer),
            ("/completions", self.completions, TextAnswer),
        ):
            self.router.add_api_route(
                path,
                answer,
                methods=["POST"],
                response_model=None,
                responses=answers(whole),
                openapi_extra=REQUEST_HEADERS,
            )
        models: dict[int | str, dict[str, Any]] = {200: {"model": ModelList}, **UNAUTHORIZED}
        self.router.add_api_route("/models", self.models, methods=["GET"], response_model=None, responses=models)

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """What answers a POST to these paths."""

        async def chat(request: Request) -> Response:
            return await self.chat(await read_body(ChatBody, request), request)

        async def completions(request: Request) -> Response:
            return await self.completions(await read_body(CompletionBody, request), request)

        return {"/v1/chat/completions": chat, "/v1/completions": completions}

    async def models(self) -> dict[str, Any]:
        """The model that is served."""
        entry: dict[str, Any] = {"id": self._model_name, "object": "model", "created": 0, "owned_by": "kvrelay"}
        if cards := self._pool.cards():
            entry["max_model_len"] = limit_tokens(cards)
        return {"object": "list", "data": [entry]}

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """Answer a chat."""
        self._check(body)
        timeout_s = client_timeout_s(request)
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs=true", param="top_logprobs")
        text = self._template.render([message.for_template() for message in body.messages])
        prompt = await self._encode(text, "messages", add_special_tokens=False)
        max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        request_id = _internal_id(request)
        chat_format = ChatFormat(
            request_id,
            self._model_name,
            self._tokenizer,
            logprobs=bool(body.logprobs),
            token_ids=bool(body.return_token_ids),
        )
        timings = RequestTimings(request.state.received_s)
        generation = self._generation(body, request_id, prompt, max_tokens, num_logprobs, timings, timeout_s)
        return await self._respond("/v1/chat/completions", request, body, [generation], chat_format)

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        """Continue one text, or several."""
        self._check(body)
        timeout_s = client_timeout_s(request)
        max_tokens = _DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        request_id = _internal_id(request)
        generations = [
            self._generation(
                body,
                f"{request_id}-{index}" if index else request_id,
                prompt,
                max_tokens,
                body.logprobs,
                RequestTimings(request.state.received_s),
                timeout_s,
            )
            for index, prompt in enumerate(await self._prompts(body))
        ]
        completion_format = CompletionFormat(
            request_id,
            self._model_name,
            self._tokenizer,
            logprobs=body.logprobs is not None,
            token_ids=bool(body.return_token_ids),
        )
        return await self._respond("/v1/completions", request, body, generations, completion_format)

    def _check(self, body: SamplingBody) -> None:
        if body.model is not None and body.model != self._model_name:
            raise ModelNotFoundError(
                f"model {body.model[:200]!r} is not served here; this deployment serves {self._model_name!r}",
                param="model",
            )
        body.refuse_unsupported()
        self._cards()
        self._admission.check_not_full()  # before work goes into it

    def _cards(self) -> list[ModelCard]:
        """The cards of the workers that are up.

        Raises UnavailableError if none is, or if nobody is there who could serve: to wait for room then, as for a worker that
        is busy or lost, might be to wait for ever. So it may be after every await.
        """
        cards, absent = self._pool.cards(), self._pool.absent()
        if absent or not cards:
            reasons = absent or [reason.split(" (")[0] for reason in self._pool.not_ready()]
            raise UnavailableError(f"{'; '.join(reasons)}; try again later", retry_after_s=1.0)
        return cards

    async def _prompts(self, body: CompletionBody) -> list[list[int]]:
        """The prompts as token ids, whichever of the four forms they came in."""
        prompts: list[list[int]] = []
        given = body.prompt
        texts_or_ids: list[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)
        for item in texts_or_ids:
            if isinstance(item, str):
                prompts.append(await self._encode(item, "prompt", add_special_tokens=True))
            else:
                check_token_ids(item, min(card.vocab_size for card in self._cards()))
                prompts.append(item)
        return prompts

    async def _encode(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        if not text.isascii():
            _check_text(text, param)
        if len(text) < _LONG_TEXT:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            ids = await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)
        # A model cannot continue nothing; like other servers we let it continue an end of text.
        if not ids and not self._tokenizer.eos_ids:
            raise InvalidRequestError(f"{param} is empty: give at least one character", param=param)
        return ids or list(self._tokenizer.eos_ids[:1])

    def _generation(
        self,
        body: SamplingBody,
        request_id: str,
        prompt: list[int],
        max_tokens: int | None,
        num_logprobs: int | None,
        timings: RequestTimings,
        timeout_s: float | None,
    ) -> Generation:
        sampling = sampling_params(
            body,
            max_tokens=max_tokens,
            num_logprobs=num_logprobs,
            num_prompt_tokens=len(prompt),
            limit_tokens=limit_tokens(self._cards()),
            eos_ids=self._tokenizer.eos_ids,
            prompt_param="messages" if isinstance(body, ChatBody) else "prompt",
        )
        return Generation(request_id, prompt, sampling, body.stop_strings, timings, timeout_s)

    async def _respond(
        self, route: str, request: Request, body: SamplingBody, generations: list[Generation], answer: Format
    ) -> Response:
        includes_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        includes_timings = request.headers.get(TIMINGS_HEADER, "0") == "1"
        return await self._responder.respond(
            request, Job(route, generations, answer, bool(body.stream), includes_usage, includes_timings)
        )


def _internal_id(request: Request) -> str:
    """The request's id, with something of its own if it came from outside: the same may come twice at a time, workers go by ids."""
    request_id: str = request.state.request_id
    return f"{request_id}.{secrets.token_hex(4)}" if request.state.is_id_given else request_id


def client_timeout_s(request: Request) -> float | None:
    """What the client gives the request, in seconds, by its header; None without. Raises InvalidRequestError."""
    given = request.headers.get(TIMEOUT_HEADER)
    if given is None:
        return None
    if _SECONDS.fullmatch(given.strip()) is None or float(given) <= 0:
        raise InvalidRequestError(
            f"{TIMEOUT_HEADER} is {given[:80]!r}; it must be a number of seconds above 0, such as 30 or 2.5",
            param=TIMEOUT_HEADER,
        )
    return float(given)


def _check_text(text: str, param: str) -> None:
    """Raises InvalidRequestError on text that is no text: JSON escapes can spell half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{param} holds half of a surrogate pair (character {error.start}): not valid Unicode", param=param
        ) from error
