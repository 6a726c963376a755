"""Calls as GLM writes them from 4.7 on: the name, and each argument's key and value in tags.

``<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>``. Older ones break lines between tags; that is read, too.
Values are text unless the function's schema says what else.
"""

from __future__ import annotations

import json

from kvrelay.gateway.tools.parser import Context, Syntax
from kvrelay.gateway.tools.reader import Reading
from kvrelay.gateway.tools.tag_values import value_json, value_texts

BEGIN, END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"


def _read(context: Context, marker: str) -> Reading[bool]:
    reader = context.reader
    yield from reader.spaces()
    name = yield from reader.word()
    if not context.may_call(name):
        return False
    write = context.writer(name)
    before = "{"
    while True:
        yield from reader.spaces()
        tag = yield from reader.next_is(KEY, END)
        if tag is None:
            return False
        if tag == END:
            write("{}" if before == "{" else "}")
            yield from context.close()
            return True
        key = yield from reader.until(KEY_END)
        yield from reader.spaces()
        if key is None or not (yield from reader.next_is(VALUE)):
            return False
        value = yield from reader.until(VALUE_END)
        if value is None:
            return False
        key = key.strip()
        write(f"{before}{json.dumps(key, ensure_ascii=False)}: {value_json(value, key, context.functions[name])}")
        before = ", "


def write_arguments(arguments: str) -> str:
    """JSON text of an object as tags; text stands there as it is."""
    return "".join(f"{KEY}{key}{KEY_END}{VALUE}{text}{VALUE_END}" for key, text in value_texts(arguments))


SYNTAX = Syntax((BEGIN,), _read)
