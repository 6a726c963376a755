"""Calls as DeepSeek's models write them, between markers of their own.

V3 and R1 write ``function<sep>f`` and fenced JSON, V3.1 writes ``f<sep>{"a": 1}``. Either is read, whatever the template announces.
"""

from __future__ import annotations

from kvrelay.gateway.tools.parser import Context, Section, read_arguments
from kvrelay.gateway.tools.reader import Reading

# The bars and the spaces between words are not ASCII: U+FF5C and U+2581.
CALLS_BEGIN, CALLS_END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
CALL_BEGIN, CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
FENCE_BEGIN, FENCE_END = "```json", "```"


def _read_call(context: Context) -> Reading[bool]:
    reader = context.reader
    yield from reader.spaces()
    name = yield from reader.word()
    if not (yield from reader.next_is(SEPARATOR)):
        return False
    if (yield from reader.char()) not in ("{", ""):  # what came was the kind of tool
        name = yield from reader.word()
    if not context.may_call(name):
        return False
    yield from reader.spaces()
    is_fenced = (yield from reader.next_is(FENCE_BEGIN)) is not None
    yield from reader.spaces()
    if not (yield from read_arguments(reader, context.writer(name))):
        return False
    yield from reader.spaces()
    if is_fenced and not (yield from reader.next_is(FENCE_END)):
        return False
    yield from context.close(CALL_END)
    return True


SYNTAX = Section(CALLS_BEGIN, CALL_BEGIN, CALLS_END, _read_call).syntax
