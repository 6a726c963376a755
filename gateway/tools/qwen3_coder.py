"""Calls as Qwen3-Coder writes them: a tag per argument, whose values are text unless the function's schema says what else.

``<tool_call>\\n<function=f>\\n<parameter=a>\\n1\\n</parameter>\\n</function>\\n</tool_call>``
"""

from __future__ import annotations

import json

from kvrelay.gateway.tools.parser import Context, Syntax
from kvrelay.gateway.tools.reader import Reading
from kvrelay.gateway.tools.tag_values import value_json, value_texts

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


def _read(context: Context, marker: str) -> Reading[bool]:
    reader = context.reader
    yield from reader.spaces()
    if marker == BEGIN and not (yield from reader.next_is(FUNCTION)):
        return False
    name = yield from reader.word()
    if not context.may_call(name) or not (yield from reader.next_is(">")):
        return False
    write = context.writer(name)
    before = "{"
    while True:
        yield from reader.spaces()
        tag = yield from reader.next_is(PARAMETER, FUNCTION_END)
        if tag is None:
            return False
        if tag == FUNCTION_END:
            write("{}" if before == "{" else "}")
            break
        key = yield from reader.until(">")
        value = None if key is None else (yield from reader.until(PARAMETER_END))
        if key is None or value is None:
            return False
        value = value.removeprefix("\n").removesuffix("\n")
        write(f"{before}{json.dumps(key, ensure_ascii=False)}: {value_json(value, key, context.functions[name])}")
        before = ", "
    if marker == BEGIN:
        yield from context.close(END)
    return True


def write_arguments(arguments: str) -> str:
    """JSON text of an object as tags; text stands there as it is."""
    return "\n".join(f"{PARAMETER}{key}>\n{text}\n{PARAMETER_END}" for key, text in value_texts(arguments))


SYNTAX = Syntax((BEGIN, FUNCTION), _read)
