"""``POST /v1/responses``: OpenAI's newer route, without memory: nothing is kept between requests."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from kvrelay.gateway.apis.answer_docs import REQUEST_HEADERS, ResponseAnswer, answers
from kvrelay.gateway.apis.answering import Job, Responder, sequences_of
from kvrelay.gateway.apis.responses.answer import ResponseFormat
from kvrelay.gateway.apis.responses.body import ResponseBody
from kvrelay.gateway.chat.chat import Chat
from kvrelay.gateway.http.request import ApiRequest
from kvrelay.gateway.model import Models
from kvrelay.gateway.relay.request import GenerationSpec
from kvrelay.gateway.text.tokenizer import aside


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
