"""``POST /v1/responses``: OpenAI's newer route, without memory: nothing is kept between requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from kvrelay.common.sampling import FinishReason
from kvrelay.gateway.apis.docs import REQUEST_HEADERS, ResponseAnswer, answers
from kvrelay.gateway.apis.jobs import Choice, Job, Responder, sequences_of
from kvrelay.gateway.apis.logprob_bodies import chat_logprobs
from kvrelay.gateway.apis.response_items import ResponseItems
from kvrelay.gateway.apis.responses_schema import ResponseBody
from kvrelay.gateway.chat.chat import Chat
from kvrelay.gateway.chat.tools.calls import OutputParser, ParsedDelta
from kvrelay.gateway.errors import ApiError
from kvrelay.gateway.http.api_request import ApiRequest
from kvrelay.gateway.model import Models
from kvrelay.gateway.relay.request import GenerationSpec
from kvrelay.gateway.text.output import TextDelta, Usage
from kvrelay.gateway.text.tokenizer import Tokenizer, aside


class ResponseFormat:
    """The answer of one request. Implements :class:`kvrelay.gateway.apis.jobs.Format`."""

    def __init__(
        self, head: dict[str, Any], tokenizer: Tokenizer, parser: OutputParser, *, shows_logprobs: bool
    ) -> None:
        """``head``: the response object's fields that are known before anything is computed."""
        self._head = head
        self._tokenizer = tokenizer
        self._parser = parser
        self._shows_logprobs = shows_logprobs
        self._items = ResponseItems()
        self._finish_reason: FinishReason | None = None
        self._num_reasoning_tokens = 0

    def opening(self) -> bytes:
        """The response begins."""
        body = {**self._head, "status": "in_progress", "output": [], "usage": None}
        begun = self._items.event("response.created", response=body)
        return begun + self._items.event("response.in_progress", response=body)

    def chunk(self, index: int, delta: TextDelta) -> bytes:
        """Events of what the text turned out to be."""
        parsed = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
            parsed += self._parser.finish()
        if parsed.reasoning and not parsed.content:
            self._num_reasoning_tokens += len(delta.tokens)
        return self._items.push(parsed, self._logprobs(parsed, delta))

    def closing(self, usage: Usage, extras: dict[str, object]) -> bytes:
        """The open item's end, and the whole response."""
        events = self._close()
        body = {**self._body(usage), **extras}
        return events + self._items.event(f"response.{body['status']}", response=body)

    def failed(self, error: ApiError) -> bytes:
        """The response as far as it came, and why not further."""
        detail = error.body()["error"]
        body = {**self._head, "status": "failed", "output": list(self._items.done), "usage": None}
        body["error"] = {"code": "server_error", "message": f"{detail['message']} ({detail['code']})"}
        return self._items.event("response.failed", response=body)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The response object."""
        for delta in choices[0].deltas:
            self.chunk(0, delta)
        self._close()
        return self._body(usage)

    def _close(self) -> bytes:
        is_cut = self._finish_reason is FinishReason.LENGTH
        return self._items.close("incomplete" if is_cut else "completed")

    def _body(self, usage: Usage) -> dict[str, Any]:
        is_cut = self._finish_reason is FinishReason.LENGTH
        return {
            **self._head,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": list(self._items.done),
            "usage": {
                "input_tokens": usage.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.num_cached_tokens},
                "output_tokens": usage.num_output_tokens,
                "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
                "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
            },
        }

    def _logprobs(self, parsed: ParsedDelta, delta: TextDelta) -> list[dict[str, Any]]:
        if not self._shows_logprobs or not parsed.content:
            return []
        entries: list[dict[str, Any]] = chat_logprobs(self._tokenizer, delta.tokens)["content"]
        return entries


class ResponsesRoutes:
    """Answers conversations."""

    def __init__(self, models: Models, responder: Responder) -> None:
        self._models = models
        self._responder = responder

    def add_to(self, app: FastAPI) -> None:
        """Declare the route."""
        documented = answers(ResponseAnswer)
        app.post("/v1/responses", tags=["OpenAI"], responses=documented, openapi_extra=REQUEST_HEADERS)(self.respond)

    async def respond(self, body: ResponseBody, request: ApiRequest) -> Response:
        """Answer a conversation."""
        model = self._models.find(body.model)
        model.check()

        def prepare() -> tuple[Chat, GenerationSpec, list[int]]:
            spec = body.spec()
            chat = body.chat(model)
            prompt = model.encode(chat.prompt, "input", add_special_tokens=False)
            return chat, chat.guided(spec), prompt

        chat, spec, prompt = await aside(prepare, len(await request.body()))
        sequences = sequences_of(model, request, [prompt], spec, "input")
        head = _head(body, request, model.name)
        written = ResponseFormat(head, model.tokenizer, chat.parser(), shows_logprobs=body.shows_logprobs)
        job = Job(model, sequences, written, is_stream=bool(body.stream), ignored=body.ignored())
        return await self._responder.respond(request, job)


def _head(body: ResponseBody, request: ApiRequest, model_name: str) -> dict[str, Any]:
    return {
        "id": f"resp_{request.internal_id}",
        "object": "response",
        "created_at": int(time.time()),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model_name,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": body.effort, "summary": None},
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
    }
