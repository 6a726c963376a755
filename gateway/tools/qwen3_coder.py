"""Calls as Qwen3-Coder writes them: a tag per argument, whose values are text unless the function's schema says what else.

``<tool_call>\\n<function=f>\\n<parameter=a>\\n1\\n</parameter>\\n</function>\\n</tool_call>``
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvrelay.gateway.tools.functions import Function
from kvrelay.gateway.tools.parser import Context, Syntax
from kvrelay.gateway.tools.pythonic import literal_json
from kvrelay.gateway.tools.reader import Reading

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
        write(f"{before}{json.dumps(key, ensure_ascii=False)}: {_value(value, key, context.functions[name])}")
        before = ", "
    if marker == BEGIN:
        yield from context.close(END)
    return True


def write_arguments(arguments: str) -> str:
    """JSON text of an object as tags; text stands there as it is."""
    values = json.loads(arguments).items()
    texts = [(key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)) for key, value in values]
    return "\n".join(f"{PARAMETER}{key}>\n{text}\n{PARAMETER_END}" for key, text in texts)


def _value(text: str, key: str, function: Function) -> str:
    """A tag's text as JSON: by the schema's types where it names some, else as JSON if it is, and as text if not."""
    text = text.removeprefix("\n").removesuffix("\n")
    schema = ((function.parameters or {}).get("properties") or {}).get(key)
    kinds = _kinds(schema)
    if isinstance(schema, Mapping) and text.strip() in [value for value in _options(schema) if isinstance(value, str)]:
        text = text.strip()  # one of a few words: spaces around it belong to the tags
    if kinds == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    written = literal_json(text)
    if written is None or (kinds and "string" in kinds and _kind(written) not in kinds):
        return json.dumps(text, ensure_ascii=False)
    return written


def _kinds(schema: Any) -> set[str]:
    """The types that a schema admits; empty if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    kinds = schema.get("type")
    found = {kinds} if isinstance(kinds, str) else {kind for kind in _list(kinds) if isinstance(kind, str)}
    if not found:
        found = {_kind(json.dumps(option)) for option in _options(schema)}
    for branch in (*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))):
        found |= _kinds(branch)
    return found | ({"number"} & found and {"integer"})


def _options(schema: Mapping[str, Any]) -> list[Any]:
    return [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _kind(written: str) -> str:
    """The JSON Schema type of a JSON text."""
    value = json.loads(written)
    names = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


SYNTAX = Syntax((BEGIN, FUNCTION), _read)
