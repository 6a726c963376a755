"""Calls as DeepSeek-V3.1 writes them, between markers of their own: ``f<sep>{"a": 1}``."""

from __future__ import annotations

from kvrelay.gateway.tools.parser import Context, Section, read_arguments
from kvrelay.gateway.tools.reader import Reading

# The bars and the spaces between words are not ASCII: U+FF5C and U+2581.
CALLS_BEGIN, CALLS_END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
CALL_BEGIN, CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
TOKENS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)


def _read_call(context: Context) -> Reading[bool]:
    reader = context.reader
    yield from reader.spaces()
    name = yield from reader.word()
    if not (yield from reader.next_is(SEPARATOR)) or not context.may_call(name):
        return False
    yield from reader.spaces()
    if not (yield from read_arguments(reader, context.writer(name))):
        return False
    yield from context.close(CALL_END)
    return True


SYNTAX = Section(CALLS_BEGIN, CALL_BEGIN, CALLS_END, _read_call).syntax
