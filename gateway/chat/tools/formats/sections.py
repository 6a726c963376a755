"""Calls between marks, with a pair of marks around all calls: DeepSeek-V3.1 and Kimi K2.

DeepSeek writes ``f<sep>{"a": 1}`` between the marks. Kimi writes ``functions.f:0`` instead of the name; the number counts the
conversation's calls.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from kvrelay.gateway.chat.structural_tag import Format, const, json_schema, regex, sequence
from kvrelay.gateway.chat.tools.parser import Context, Syntax, read_arguments
from kvrelay.gateway.chat.tools.reader import Reading

PREFIX = "functions."
_ID = re.compile(r"[^\s<]*")
_MAX_ID_LENGTH = 96  # a prefix, a name, a number


@dataclass(frozen=True, slots=True)
class Section:
    """The marks around calls; all are special tokens. The first may be missing in an answer."""

    begin: str
    end: str
    call_begin: str
    call_end: str
    arguments_begin: str

    @property
    def tokens(self) -> tuple[str, ...]:
        """All marks."""
        return (self.begin, self.end, self.call_begin, self.call_end, self.arguments_begin)

    @property
    def syntax(self) -> Syntax:
        """The parser's syntax of a section."""
        return Syntax((self.begin, self.call_begin), self._read)

    def _read(self, context: Context, marker: str) -> Reading[bool]:
        reader = context.reader
        mark: str | None = marker
        if marker == self.begin:
            yield from reader.spaces()
            mark = yield from reader.next_is(self.call_begin)
        while mark == self.call_begin:
            if not (yield from self._read_call(context)):
                return False
            yield from reader.spaces()
            mark = yield from reader.next_is(self.call_begin, self.end)
            if mark == self.end or reader.is_over():
                return True
        return False

    def _read_call(self, context: Context) -> Reading[bool]:
        reader = context.reader
        yield from reader.spaces()
        call_id = yield from reader.word(_ID, _MAX_ID_LENGTH)
        name = call_id.removeprefix(PREFIX).partition(":")[0]
        yield from reader.spaces()
        if not context.may_call(name) or not (yield from reader.next_is(self.arguments_begin)):
            return False
        yield from reader.spaces()
        if not (yield from read_arguments(reader, context.writer(name))):
            return False
        yield from context.close(self.call_end)
        return True


# The bars and the underscores between words are not ASCII: U+FF5C and U+2581.
DEEPSEEK = Section(
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>",
    "<\uff5ctool\u2581sep\uff5c>",
)
KIMI = Section(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
)


def numbered_arguments(schema: dict[str, Any]) -> Format:
    """A call's number and its arguments, as Kimi writes them behind ``functions.f:``."""
    return sequence(regex("[0-9]{1,3}"), const(KIMI.arguments_begin), json_schema(schema))


def write_numbered(arguments: str) -> str:
    """Arguments that are JSON text with a number before them, as Kimi writes them.

    The count of calls is unknown here, so the number is 0.
    """
    return f"0{KIMI.arguments_begin}{arguments}"
