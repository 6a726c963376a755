"""The parser that all families share: text until a marker, then calls, then text again.

A :class:`Syntax` says where a family's calls begin and how to read them (a function over a :class:`Context`). Text that only looks
like a call (JSON that does not parse, an undeclared function) becomes content, so no text of the model is lost. If a call's
arguments break off in the middle, the call keeps what was already sent, and the rest of the text is content. An answer that must be
calls has no content: what its end leaves is the beginning of a call.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice

from kvrelay.gateway.chat.tools.calls import CallIds, Outbox, ParsedDelta, Said
from kvrelay.gateway.chat.tools.functions import Function, ToolChoice, ToolMode
from kvrelay.gateway.chat.tools.reader import Reader, Reading, is_json_object


@dataclass(frozen=True, slots=True)
class Context:
    """The input and output of reading one answer's calls."""

    reader: Reader
    out: Outbox
    functions: Mapping[str, Function]
    max_calls: int | None = None

    def may_call(self, name: str | None) -> bool:
        """Whether the choice allows a call of ``name``."""
        return name in self.functions and (self.max_calls is None or self.out.num_calls < self.max_calls)

    def writer(self, name: str) -> Callable[[str], None]:
        """A function that takes a new call's arguments as they are read.

        The first piece opens the call and settles the text read so far.
        """
        if self.out.has_open_call:  # the end of the call before never came
            self.out.close_call()

        def write(text: str) -> None:
            if not self.out.has_open_call:
                self.out.open_call(name)
            self.out.add_arguments(text)
            self.reader.settle()

        return write

    def close(self, *ends: str) -> Reading[None]:
        """End the call. Reads white space and the end marker, if one of ``ends`` follows.

        A cut-off end marker does not become text.
        """
        reader = self.reader
        reader.settle()
        if ends:
            yield from reader.spaces()
            end = yield from reader.next_is(*ends)
            if end is None and reader.is_finished and any(end.startswith(reader.rest) for end in ends):
                reader.skip(len(reader.rest))
            elif end is None:
                return
            reader.settle()
        self.out.close_call()


@dataclass(frozen=True, slots=True)
class Syntax:
    """Where calls begin and how they are read.

    ``read(context, marker)`` reads the calls after ``marker``, which has been read already. It returns whether they were
    well-formed.
    ``starts``: characters that begin a call without a marker (``marker`` is "" then), only at the start of an answer.
    """

    markers: tuple[str, ...]
    read: Callable[[Context, str], Reading[bool]]
    starts: str = ""


def _read_no_calls(context: Context, marker: str) -> Reading[bool]:
    raise AssertionError(f"{marker!r} is no marker")


NO_CALLS = Syntax((), _read_no_calls)
"""The syntax of answers without calls."""


class CallParser:
    """Reads one answer, which may think and call functions, while it arrives. The result depends only on the text, not on its
    pieces.

    ``read_first``: reads what precedes the answer itself, such as thoughts. ``is_json``: an answer that does not begin with a call
    is a JSON document, whose strings may spell calls.
    """

    def __init__(
        self,
        syntax: Syntax,
        choice: ToolChoice,
        new_id: CallIds,
        read_first: Callable[[Context], Reading[None]] | None = None,
        *,
        is_json: bool = False,
    ) -> None:
        self._syntax = syntax
        self._read_first = read_first
        self._is_json = is_json
        self._must_call = choice.mode is ToolMode.REQUIRED
        functions = {function.name: function for function in choice.functions}
        self._context = Context(Reader(), Outbox(new_id), functions, choice.max_calls)
        self._steps = self._parse()

    def push(self, text: str) -> ParsedDelta:
        """Take new text; returns the parts that are certain. Text that may begin a marker is held back."""
        self._context.reader.feed(text)
        next(self._steps)
        return self._context.out.take()

    def finish(self) -> ParsedDelta:
        """End the text; returns what was held back. Do not push afterwards."""
        self._context.reader.finish()
        num_waits = sum(1 for _ in islice(self._steps, 1))
        assert num_waits == 0, "a parser waits for text after the end"
        found = self._context.out.take()
        if self._must_call:  # its guide allows nothing but calls, so max_tokens has cut one off
            return ParsedDelta(tuple(part for part in found.parts if not isinstance(part, Said)))
        return found

    def _parse(self) -> Reading[None]:
        reader, out = self._context.reader, self._context.out
        if self._read_first is not None:
            yield from self._read_first(self._context)
        is_start = True
        while is_start or not reader.is_over():
            # White space at the start, or after a call, belongs to the next call if one follows.
            yield from reader.spaces()
            char = yield from reader.char()
            marker = "" if is_start and char and char in self._syntax.starts else None
            if marker is None:
                marker = yield from reader.next_is(*self._syntax.markers)
            if marker is None:
                spaces = reader.settle()
                if not (reader.is_over() and out.num_calls):
                    out.add_content(spaces)
                is_document = self._is_json and not out.num_calls
                marker = yield from reader.free(() if is_document else self._syntax.markers, out.add_content)
            if marker is not None:
                yield from self._calls(marker)
            is_start = False

    def _calls(self, marker: str) -> Reading[None]:
        reader, out = self._context.reader, self._context.out
        is_good = yield from self._syntax.read(self._context, marker)
        rest = reader.settle()
        if not is_good and not (reader.is_over() and out.has_open_call):
            out.add_content(rest)
        out.close_call()


def read_arguments(reader: Reader, on_text: Callable[[str], None]) -> Reading[bool]:
    """Read a call's arguments: an object, an object inside a string, or null for none. False if they are anything else."""
    char = yield from reader.char()
    if char == "{":
        return (yield from reader.json_value(on_text))
    if char == '"':
        text = yield from reader.json_string()
        if text is None or not is_json_object(text.strip()):
            return False
        on_text(text.strip())
        return True
    if (yield from reader.next_is("null")):
        on_text("{}")
        return True
    return False


class ListEnd(enum.Enum):
    """How a list of calls ended."""

    CLOSED = "closed"
    CUT_OFF = "cut off"  # the text ended
    MALFORMED = "malformed"


def read_rest(context: Context, read_call: Callable[[Context], Reading[bool]]) -> Reading[ListEnd]:
    """Read a list of calls after its ``[``; each call is closed."""
    reader = context.reader
    end: str | None = ","
    while end == ",":
        yield from reader.spaces()
        if not (yield from read_call(context)):
            return ListEnd.MALFORMED
        yield from context.close()
        yield from reader.spaces()
        end = yield from reader.next_is(",", "]")
        if end is not None:
            reader.settle()
    if end is None:
        return ListEnd.CUT_OFF if reader.is_over() else ListEnd.MALFORMED
    return ListEnd.CLOSED
