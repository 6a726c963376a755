"""The parts of a parsed answer: text, thoughts and function calls."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec

CallIds = Callable[[], str]  # a new id for every call


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A piece of one call. A call's first delta has its id and name. The ``arguments`` of all its deltas add up to JSON text."""

    index: int  # of the call within the answer
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Said(msgspec.Struct, frozen=True):
    """A piece of text for the user."""

    text: str


class Thought(msgspec.Struct, frozen=True):
    """A piece of the model's reasoning."""

    text: str


Part = Said | Thought | ToolCallDelta


class ParsedDelta(msgspec.Struct, frozen=True):
    """The parsed parts of a piece of text, in the order of the text."""

    parts: tuple[Part, ...] = ()

    @property
    def content(self) -> str:
        """All text for the user."""
        return "".join([part.text for part in self.parts if isinstance(part, Said)])

    @property
    def reasoning(self) -> str:
        """All thoughts."""
        return "".join([part.text for part in self.parts if isinstance(part, Thought)])

    @property
    def calls(self) -> tuple[ToolCallDelta, ...]:
        """The pieces of calls."""
        return tuple(part for part in self.parts if isinstance(part, ToolCallDelta))

    def __bool__(self) -> bool:
        return bool(self.parts)

    def __add__(self, later: ParsedDelta) -> ParsedDelta:
        return ParsedDelta(self.parts + later.parts)


class Outbox:
    """Collects what a parser has read until it is taken.

    A call is *open* from its name to its end. If the answer is cut off then, the missing text (a bracket, an end marker) does not
    matter.
    """

    def __init__(self, new_id: CallIds) -> None:
        self._new_id = new_id
        self._parts: list[Part] = []
        self.num_calls = 0
        self.has_open_call = False

    def add_content(self, text: str) -> None:
        """Add text for the user."""
        self._add(Said, text)

    def add_reasoning(self, text: str) -> None:
        """Add a thought."""
        self._add(Thought, text)

    def open_call(self, name: str) -> None:
        """Begin a call."""
        self._parts.append(ToolCallDelta(self.num_calls, self._new_id(), name))
        self.num_calls += 1
        self.has_open_call = True

    def add_arguments(self, text: str) -> None:
        """Add to the open call's arguments."""
        assert self.has_open_call, "arguments belong to a call"
        index = self.num_calls - 1
        last = self._parts[-1] if self._parts else None
        if isinstance(last, ToolCallDelta) and last.index == index:
            self._parts[-1] = ToolCallDelta(index, last.id, last.name, last.arguments + text)
        elif text:
            self._parts.append(ToolCallDelta(index, arguments=text))

    def close_call(self) -> None:
        """End the call, whose end marker has been read."""
        self.has_open_call = False

    def take(self) -> ParsedDelta:
        """Everything since the last call."""
        delta = ParsedDelta(tuple(self._parts))
        self._parts.clear()
        return delta

    def _add(self, kind: type[Said] | type[Thought], text: str) -> None:
        last = self._parts[-1] if self._parts else None
        if isinstance(last, kind):
            self._parts[-1] = kind(last.text + text)
        elif text:
            self._parts.append(kind(text))


def random_call_id() -> str:
    """``call_`` and 24 hexadecimal digits."""
    return f"call_{secrets.token_hex(12)}"
