"""The output items of a response while they grow, and the events that tell of it.

An answer is a row of items: what the model thought, what it said, the calls that it asks for. One is open at a time; a piece of
another kind, or of another call, closes it and opens the next. Every event is numbered.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrelay.gateway.chat.tools.calls import ParsedDelta, Said, Thought, ToolCallDelta
from kvrelay.gateway.http.sse import sse

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
        """Of a message or of thoughts: the one piece of content."""
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
    """One answer's items. Methods that take something in return its events, as bytes."""

    def __init__(self, new_id: Callable[[], str] = lambda: secrets.token_hex(16)) -> None:
        self._new_id = new_id
        self._num_events = 0
        self._done: list[dict[str, Any]] = []
        self._open: _Item | None = None

    @property
    def done(self) -> Sequence[dict[str, Any]]:
        """The complete items."""
        return self._done

    def event(self, kind: str, **fields: Any) -> bytes:
        """An event of our own numbering."""
        number = self._num_events
        self._num_events += 1
        return sse({"type": kind, "sequence_number": number, **fields}, kind)

    def push(self, delta: ParsedDelta, logprobs: list[dict[str, Any]]) -> bytes:
        """What the model wrote; ``logprobs`` of its tokens go with the text of a message."""
        events = b""
        for part in delta.parts:
            match part:
                case Thought():
                    events += self._text("reasoning", part.text, [])
                case Said():
                    events += self._text("message", part.text, logprobs)
                    logprobs = []
                case ToolCallDelta():
                    events += self._call(part)
        return events

    def close(self, status: str = "completed") -> bytes:
        """The open item is over."""
        item, self._open = self._open, None
        if item is None:
            return b""
        where: dict[str, Any] = {"item_id": item.item_id, "output_index": len(self._done)}
        events = b""
        match item.kind:
            case "function_call":
                events += self.event(
                    "response.function_call_arguments.done", **where, name=item.name, arguments=item.text
                )
            case _:
                kind, logprobs = _TEXTS[item.kind], {} if item.kind == "reasoning" else {"logprobs": item.logprobs}
                where["content_index"] = 0
                events += self.event(f"response.{kind}.done", **where, text=item.text, **logprobs)
                events += self.event("response.content_part.done", **where, part=item.part())
        body = item.body(status)
        events += self.event("response.output_item.done", output_index=len(self._done), item=body)
        self._done.append(body)
        return events

    def _text(self, kind: str, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        events = b""
        if self._open is None or self._open.kind != kind:
            events += self._begin(_Item(kind, f"{_PREFIXES[kind]}_{self._new_id()}"))
        item = self._open
        assert item is not None
        item.pieces.append(text)
        item.logprobs += logprobs
        where = {"item_id": item.item_id, "output_index": len(self._done), "content_index": 0, "delta": text}
        more = {} if kind == "reasoning" else {"logprobs": logprobs}
        return events + self.event(f"response.{_TEXTS[kind]}.delta", **where, **more)

    def _call(self, call: ToolCallDelta) -> bytes:
        events = b""
        if call.name is not None:
            item = _Item("function_call", f"fc_{self._new_id()}")
            item.call_id, item.name, item.call_index = call.id or "", call.name, call.index
            events += self._begin(item)
        item = self._open or _Item("", "")
        assert item.call_index == call.index, f"arguments of call {call.index} within item {item.kind}"
        if call.arguments:
            item.pieces.append(call.arguments)
            where = {"item_id": item.item_id, "output_index": len(self._done)}
            events += self.event("response.function_call_arguments.delta", **where, delta=call.arguments)
        return events

    def _begin(self, item: _Item) -> bytes:
        events = self.close()
        self._open = item
        index = len(self._done)
        events += self.event("response.output_item.added", output_index=index, item=item.body("in_progress"))
        if item.kind != "function_call":
            events += self.event(
                "response.content_part.added",
                item_id=item.item_id,
                output_index=index,
                content_index=0,
                part=item.part(),
            )
        return events
