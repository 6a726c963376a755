"""A response of OpenAI's Responses API, as one body and as events.

An answer is a list of items: reasoning, messages and function calls. One item is open at a time. Text of another kind, or of
another call, closes it and opens the next one. Every event has a number.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrelay.common.sampling import FinishReason, SampledToken
from kvrelay.gateway.apis.answering import Choice, Format
from kvrelay.gateway.apis.openai.completion_answer import chat_logprobs
from kvrelay.gateway.chat.tools.calls import ParsedDelta, Said, Thought, ToolCallDelta
from kvrelay.gateway.chat.tools.parser import CallParser
from kvrelay.gateway.errors import ApiError
from kvrelay.gateway.http.sse import sse
from kvrelay.gateway.text.output import TextDelta, Usage
from kvrelay.gateway.text.tokenizer import Tokenizer

_TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


@dataclass(slots=True)
class _Item:
    kind: str
    item_id: str
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    call_id: str = ""
    name: str = ""
    call_index: int = -1

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def part(self) -> dict[str, Any]:
        """The one content part of a message or of reasoning."""
        if self.kind == "reasoning":
            return {"type": _TEXTS[self.kind], "text": self.text}
        return {"type": _TEXTS[self.kind], "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def body(self, status: str) -> dict[str, Any]:
        head = {"id": self.item_id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            return {**head, "call_id": self.call_id, "name": self.name, "arguments": self.text}
        content = [] if status == "in_progress" else [self.part()]
        if self.kind == "reasoning":
            return {**head, "summary": [], "content": content}
        return {**head, "role": "assistant", "content": content}


class ResponseItems:
    """One answer's items and events. :meth:`take` returns the events and forgets them."""

    def __init__(self, new_id: Callable[[], str] = lambda: secrets.token_hex(16)) -> None:
        self._new_id = new_id
        self._num_events = 0
        self._events: list[bytes] = []  # not taken yet
        self._open: _Item | None = None
        self.done: list[dict[str, Any]] = []  # the complete items

    def event(self, kind: str, **fields: Any) -> None:
        """Append an event with the next number."""
        self._events.append(sse({"type": kind, "sequence_number": self._num_events, **fields}, kind))
        self._num_events += 1

    def take(self) -> bytes:
        """All events since the last call."""
        events = b"".join(self._events)
        self._events.clear()
        return events

    def push(self, delta: ParsedDelta, logprobs: list[dict[str, Any]]) -> None:
        """Append parsed text. ``logprobs`` of its tokens go with a message's text."""
        for part in delta.parts:
            match part:
                case Thought():
                    self._text("reasoning", part.text, [])
                case Said():
                    self._text("message", part.text, logprobs)
                    logprobs = []
                case ToolCallDelta():
                    self._call(part)

    def close(self, status: str = "completed") -> None:
        """Close the open item."""
        item, self._open = self._open, None
        if item is None:
            return
        index = len(self.done)
        where: dict[str, Any] = {"item_id": item.item_id, "output_index": index}
        if item.kind == "function_call":
            self.event("response.function_call_arguments.done", **where, name=item.name, arguments=item.text)
        else:
            where["content_index"] = 0
            logprobs = {} if item.kind == "reasoning" else {"logprobs": item.logprobs}
            self.event(f"response.{_TEXTS[item.kind]}.done", **where, text=item.text, **logprobs)
            self.event("response.content_part.done", **where, part=item.part())
        body = item.body(status)
        self.event("response.output_item.done", output_index=index, item=body)
        self.done.append(body)

    def _text(self, kind: str, text: str, logprobs: list[dict[str, Any]]) -> None:
        item = self._open
        if item is None or item.kind != kind:
            item = self._begin(_Item(kind, f"{_PREFIXES[kind]}_{self._new_id()}"))
        item.pieces.append(text)
        item.logprobs += logprobs
        where = {"item_id": item.item_id, "output_index": len(self.done), "content_index": 0, "delta": text}
        self.event(f"response.{_TEXTS[kind]}.delta", **where, **({} if kind == "reasoning" else {"logprobs": logprobs}))

    def _call(self, call: ToolCallDelta) -> None:
        item = self._open
        if call.name is not None:
            item = self._begin(
                _Item(
                    "function_call",
                    f"fc_{self._new_id()}",
                    call_id=call.id or "",
                    name=call.name,
                    call_index=call.index,
                )
            )
        assert item is not None, f"arguments of call {call.index} in front of its name"
        assert item.call_index == call.index, f"arguments of call {call.index} within item {item.kind}"
        if call.arguments:
            item.pieces.append(call.arguments)
            where = {"item_id": item.item_id, "output_index": len(self.done)}
            self.event("response.function_call_arguments.delta", **where, delta=call.arguments)

    def _begin(self, item: _Item) -> _Item:
        self.close()
        self._open = item
        where = {"output_index": len(self.done)}
        self.event("response.output_item.added", **where, item=item.body("in_progress"))
        if item.kind != "function_call":
            part = item.part()
            self.event("response.content_part.added", item_id=item.item_id, **where, content_index=0, part=part)
        return item


class ResponseFormat(Format):
    """The answer of one request."""

    def __init__(self, head: dict[str, Any], tokenizer: Tokenizer, parser: CallParser, *, shows_logprobs: bool) -> None:
        """``head``: the fields of the response object that are known before generation."""
        self._head = head
        self._tokenizer = tokenizer
        self._parser = parser
        self._shows_logprobs = shows_logprobs
        self._items = ResponseItems()
        self._finish_reason: FinishReason | None = None
        self._num_reasoning_tokens = 0
        self._unsaid: list[SampledToken] = []  # tokens whose text is held back

    def opening(self, usage: Usage) -> bytes:
        """The response begins."""
        body = {**self._head, "status": "in_progress", "output": [], "usage": None}
        self._items.event("response.created", response=body)
        self._items.event("response.in_progress", response=body)
        return self._items.take()

    def chunk(self, index: int, delta: TextDelta, usage: Usage) -> bytes:
        """Events for the parts that the text was parsed into."""
        parsed = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
            parsed += self._parser.finish()
        self._unsaid += delta.tokens
        if parsed:
            tokens, self._unsaid = self._unsaid, []
            if parsed.reasoning and not parsed.content:
                self._num_reasoning_tokens += len(tokens)
            shows_logprobs = self._shows_logprobs and parsed.content
            self._items.push(parsed, chat_logprobs(self._tokenizer, tokens)["content"] if shows_logprobs else [])
        return self._items.take()

    def closing(self, usage: Usage, extras: dict[str, object]) -> bytes:
        """The open item's end, and the whole response."""
        self._items.close(self._status)
        body = {**self._body(usage), **extras}
        self._items.event(f"response.{body['status']}", response=body)
        return self._items.take()

    def failed(self, error: ApiError) -> bytes:
        """The response so far, and the error."""
        detail = error.body()["error"]
        body = {**self._head, "status": "failed", "output": list(self._items.done), "usage": None}
        message = f"{detail['message']} ({detail['code']})"
        body["error"] = {"code": "server_error", "message": message, "request_id": error.request_id}
        self._items.event("response.failed", response=body)
        return self._items.take()

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The response object."""
        for delta in choices[0].deltas:
            self.chunk(0, delta, usage)
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
                "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.num_output_tokens,
                "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
                "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
            },
        }
