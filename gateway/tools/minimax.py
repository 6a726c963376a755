"""Calls as MiniMax's models write them.

M1: one JSON object a line, ``<tool_calls>\\n{"name": "f", "arguments": {"a": 1}}\\n</tool_calls>``. M2: tags, whose values are text
unless the function's schema says what else,
``<minimax:tool_call>\\n<invoke name="f">\\n<parameter name="a">1</parameter>\\n</invoke>\\n</minimax:tool_call>``.
"""

from __future__ import annotations

import json

from kvrelay.gateway.tools.parser import Context, Syntax, read_envelope
from kvrelay.gateway.tools.reader import Reading
from kvrelay.gateway.tools.tag_values import value_json, value_texts

LINES_BEGIN, LINES_END = "<tool_calls>", "</tool_calls>"
TAGS_BEGIN, TAGS_END = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE, INVOKE_END = '<invoke name="', "</invoke>"
PARAMETER, PARAMETER_END = '<parameter name="', "</parameter>"
NAME_END = '">'


def _read_lines(context: Context, marker: str) -> Reading[bool]:
    reader = context.reader
    yield from reader.spaces()
    while True:
        if not (yield from read_envelope(context)):
            return False
        yield from context.close()
        yield from reader.spaces()
        if (yield from reader.next_is(LINES_END)) or reader.is_over():
            return True


def _read_tags(context: Context, marker: str) -> Reading[bool]:
    reader = context.reader
    yield from reader.spaces()
    if not (yield from reader.next_is(INVOKE)):
        return False
    while True:
        if not (yield from _read_invoke(context)):
            return False
        yield from context.close()
        yield from reader.spaces()
        tag = yield from reader.next_is(INVOKE, TAGS_END)
        if tag != INVOKE:
            return tag == TAGS_END or reader.is_over()


def _read_invoke(context: Context) -> Reading[bool]:
    reader = context.reader
    name = yield from reader.word()
    if not context.may_call(name) or not (yield from reader.next_is(NAME_END)):
        return False
    write = context.writer(name)
    before = "{"
    while True:
        yield from reader.spaces()
        tag = yield from reader.next_is(PARAMETER, INVOKE_END)
        if tag is None:
            return False
        if tag == INVOKE_END:
            write("{}" if before == "{" else "}")
            return True
        key = yield from reader.until(NAME_END)
        value = None if key is None else (yield from reader.until(PARAMETER_END))
        if key is None or value is None:
            return False
        write(f"{before}{json.dumps(key, ensure_ascii=False)}: {value_json(value, key, context.functions[name])}")
        before = ", "


def write_arguments(arguments: str) -> str:
    """JSON text of an object as M2's tags; text stands there as it is."""
    return "\n".join(f"{PARAMETER}{key}{NAME_END}{text}{PARAMETER_END}" for key, text in value_texts(arguments))


LINES = Syntax((LINES_BEGIN,), _read_lines)
TAGS = Syntax((TAGS_BEGIN,), _read_tags)
