"""An Anthropic message, as one body and as events: a list of content blocks, of which one is open at a time.

Also its OpenAPI shapes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

from kvrelay.common.sampling import FinishReason
from kvrelay.gateway.apis.answering import Choice, Format
from kvrelay.gateway.chat.tools.calls import Part, Said, Thought
from kvrelay.gateway.chat.tools.parser import CallParser
from kvrelay.gateway.errors import ApiError, anthropic_error
from kvrelay.gateway.http.sse import sse
from kvrelay.gateway.text.output import TextDelta, Usage

# A block's kind: its field that comes in pieces, and what a piece of it is called.
_PIECES = {
    "text": ("text", "text_delta"),
    "thinking": ("thinking", "thinking_delta"),
    "tool_use": ("partial_json", "input_json_delta"),
}


class MessageFormat(Format):
    """Answers of ``/v1/messages``."""

    def __init__(self, message_id: str, model_name: str, parser: CallParser, *, is_shortened: bool) -> None:
        """``is_shortened``: fewer tokens may come than the client asked for, as no more fit the model."""
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": model_name}
        self._parser = parser
        self._limit_reason = "model_context_window_exceeded" if is_shortened else "max_tokens"
        self._content: list[dict[str, Any]] = []
        self._pieces: list[str] = []  # pieces of the open block, which is the last one
        self._ending: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def opening(self, usage: Usage) -> bytes:
        """The message begins."""
        return _event("message_start", message={**self._head, "content": [], **self._ending, "usage": _told(usage)})

    def chunk(self, index: int, delta: TextDelta, usage: Usage) -> bytes:
        """Events for the parts that the text was parsed into."""
        parsed = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            parsed += self._parser.finish()
        events = [event for part in parsed.parts for event in self._take(part)]
        if delta.finish_reason is not None:
            events += self._close()
            self._end(delta)
        return b"".join(events)

    def closing(self, usage: Usage, extras: dict[str, object]) -> bytes:
        """The stop reason and the usage."""
        return _event("message_delta", delta=self._ending, usage=_told(usage), **extras) + _event("message_stop")

    def failed(self, error: ApiError) -> bytes:
        """The error."""
        return sse(anthropic_error(error)[1], "error")

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The message."""
        for delta in choices[0].deltas:
            self.chunk(0, delta, usage)
        return {**self._head, "content": self._content, **self._ending, "usage": _told(usage)}

    def _take(self, part: Part) -> Iterator[bytes]:
        match part:
            case Thought():
                yield from self._piece({"type": "thinking", "thinking": "", "signature": ""}, part.text)
            case Said():
                yield from self._piece({"type": "text", "text": ""}, part.text)
            case _ if part.name is not None:
                yield from self._close()
                yield from self._piece(
                    {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}, part.arguments
                )
            case _:
                yield from self._piece(self._content[-1], part.arguments)

    def _piece(self, block: dict[str, Any], text: str) -> Iterator[bytes]:
        """Events that add ``text`` to the open block, or open ``block`` first if the open one is of another kind."""
        kind = block["type"]
        if not self._pieces or self._content[-1]["type"] != kind:
            yield from self._close()
            self._content.append(block)
            yield _event("content_block_start", index=len(self._content) - 1, content_block=block)
        self._pieces.append(text)
        name, delta = _PIECES[kind]
        yield _event("content_block_delta", index=len(self._content) - 1, delta={"type": delta, name: text})

    def _close(self) -> Iterator[bytes]:
        if not self._pieces:
            return
        block, text = self._content[-1], "".join(self._pieces)
        self._pieces = []
        if block["type"] == "tool_use":
            block["input"] = _input(text)
        else:
            block[block["type"]] = text
        yield _event("content_block_stop", index=len(self._content) - 1)

    def _end(self, delta: TextDelta) -> None:
        stop = delta.stop_reason if isinstance(delta.stop_reason, str) else None
        has_called = any(block["type"] == "tool_use" for block in self._content)
        reason = "stop_sequence" if stop is not None else "tool_use" if has_called else "end_turn"
        if delta.finish_reason is FinishReason.LENGTH:
            reason = self._limit_reason
        self._ending = {"stop_reason": reason, "stop_sequence": stop}


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object. It is empty if they were cut off, or hold infinity or half of a character."""
    try:
        value = json.loads(arguments)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()  # as the answer is written
    except (RecursionError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, kind)


def _told(usage: Usage) -> dict[str, int]:
    """Anthropic's usage object. Its parts of the prompt add up to the prompt's length."""
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_output_tokens,
    }


class AnthropicErrorDetail(BaseModel):
    """What went wrong."""

    type: str = Field(min_length=1, description="What is wrong, for programs.")
    message: str = Field(min_length=1, description="What is wrong, and the way out.")


class AnthropicErrorBody(BaseModel):
    """Anthropic's error object."""

    type: Literal["error"] = Field(description="Always error.")
    error: AnthropicErrorDetail = Field(description="Its message, and what programs read.")
    request_id: str | None = Field(None, description="The request's id, as in the header x-request-id.")


class MessageUsage(BaseModel):
    """Tokens of a message."""

    input_tokens: int = Field(ge=0, description="Tokens of the prompt that were computed.")
    cache_creation_input_tokens: int = Field(ge=0, description="Always 0: what is cached costs nothing.")
    cache_read_input_tokens: int = Field(ge=0, description="Tokens of the prompt that nobody had to compute.")
    output_tokens: int = Field(ge=0, description="Tokens that were generated.")


class MessageAnswer(BaseModel):
    """Of ``/v1/messages`` without ``stream``."""

    id: str = Field(description="The message's id.")
    type: Literal["message"] = Field(description="What this is.")
    role: Literal["assistant"] = Field(description="Always the assistant.")
    model: str = Field(description="The served model.")
    content: list[dict[str, Any]] = Field(description="Blocks: thoughts, texts and calls, in their order.")
    stop_reason: Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"] = (
        Field(description="Why it ended.")
    )
    stop_sequence: str | None = Field(description="The text that ended it.")
    usage: MessageUsage = Field(description="Tokens of the message.")


class TokenCount(BaseModel):
    """Of ``/v1/messages/count_tokens``."""

    input_tokens: int = Field(ge=1, description="Tokens of the prompt.")
