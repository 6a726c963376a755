"""A response, whole and as events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvrelay.common.sampling import FinishReason
from kvrelay.gateway.apis.answering import Choice
from kvrelay.gateway.apis.openai.answer_parts import chat_logprobs
from kvrelay.gateway.apis.responses.items import ResponseItems
from kvrelay.gateway.chat.tools.calls import OutputParser, ParsedDelta
from kvrelay.gateway.errors import ApiError
from kvrelay.gateway.text.output import TextDelta, Usage
from kvrelay.gateway.text.tokenizer import Tokenizer


class ResponseFormat:
    """The answer of one request. Implements :class:`kvrelay.gateway.apis.answering.Format`."""

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
        self._items.event("response.created", response=body)
        self._items.event("response.in_progress", response=body)
        return self._items.take()

    def chunk(self, index: int, delta: TextDelta) -> bytes:
        """Events of what the text turned out to be."""
        parsed = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
            parsed += self._parser.finish()
        if parsed.reasoning and not parsed.content:
            self._num_reasoning_tokens += len(delta.tokens)
        self._items.push(parsed, self._logprobs(parsed, delta))
        return self._items.take()

    def closing(self, usage: Usage, extras: dict[str, object]) -> bytes:
        """The open item's end, and the whole response."""
        self._items.close(self._status)
        body = {**self._body(usage), **extras}
        self._items.event(f"response.{body['status']}", response=body)
        return self._items.take()

    def failed(self, error: ApiError) -> bytes:
        """The response as far as it came, and why not further."""
        detail = error.body()["error"]
        body = {**self._head, "status": "failed", "output": list(self._items.done), "usage": None}
        message = f"{detail['message']} ({detail['code']})"
        body["error"] = {"code": "server_error", "message": message, "request_id": error.request_id}
        self._items.event("response.failed", response=body)
        return self._items.take()

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The response object."""
        for delta in choices[0].deltas:
            self.chunk(0, delta)
        self._items.close(self._status)
        return self._body(usage)

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish_reason is FinishReason.LENGTH else "completed"

    def _body(self, usage: Usage) -> dict[str, Any]:
        return {
            **self._head,
            "status": self._status,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
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
