"""Calls as Mistral's models write them.

Older ones: ``[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, …]``. Since tokenizer version 11, for each call:
``[TOOL_CALLS]f[ARGS]{"a": 1}``, at times with ``[CALL_ID]…`` in between. Either is read, whatever the template announces.
"""

from __future__ import annotations

from kvrelay.gateway.tools.parser import Context, Syntax, read_arguments, read_envelopes
from kvrelay.gateway.tools.reader import Reading

BEGIN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def _read(context: Context, marker: str) -> Reading[bool]:
    reader = context.reader
    yield from reader.spaces()
    if (yield from reader.char()) in ("[", "{", ""):
        return (yield from read_envelopes(context))
    name = yield from reader.word()
    if not context.may_call(name):
        return False
    if (yield from reader.next_is(CALL_ID, ARGS)) == CALL_ID:
        yield from reader.word()
        yield from reader.next_is(ARGS)
    yield from reader.spaces()
    is_good = yield from read_arguments(reader, context.writer(name))
    if is_good:
        yield from context.close()
    return is_good


SYNTAX = Syntax((BEGIN,), _read)
