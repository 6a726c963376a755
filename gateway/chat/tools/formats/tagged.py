"""Calls whose arguments stand in tags of their own: Qwen3-Coder and GLM.

Qwen3-Coder: ``<tool_call>\\n<function=f>\\n<parameter=a>\\n1\\n</parameter>\\n</function>\\n</tool_call>``. GLM from 4.7 on:
``<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>``. Older GLM models break lines between tags, which is read,
too. A value that is text by the function's schema stands there without quotes. All other values are JSON (models also write
Python's literals).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvrelay.gateway.chat.tools.formats.pythonic import literal_json, refuse_constant
from kvrelay.gateway.chat.tools.functions import Function
from kvrelay.gateway.chat.tools.parser import Context, Syntax
from kvrelay.gateway.chat.tools.reader import Reading

BEGIN, END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags around names, keys and values. With ``has_lines``, line breaks next to a value's tags belong to the tags."""

    name: str  # before a function's name
    after_name: str
    end: str  # after the last argument
    key: str
    after_key: str
    value: str
    after_value: str
    has_lines: bool = False

    @property
    def syntax(self) -> Syntax:
        """The parser's syntax of these calls."""
        return Syntax((BEGIN, self.name) if self.name else (BEGIN,), self._read)

    def write_arguments(self, arguments: str) -> str:
        """JSON text of an object as tags; text values are written without quotes."""
        line = "\n" if self.has_lines else ""
        texts = [
            (key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            for key, value in json.loads(arguments).items()
        ]
        return line.join(
            f"{self.key}{key}{self.after_key}{self.value}{line}{text}{line}{self.after_value}" for key, text in texts
        )

    def _read(self, context: Context, marker: str) -> Reading[bool]:
        reader = context.reader
        yield from reader.spaces()
        if marker == BEGIN and (yield from reader.next_is(self.name)) is None:
            return False
        name = yield from reader.word()
        if not context.may_call(name) or (yield from reader.next_is(self.after_name)) is None:
            return False
        write = context.writer(name)
        before = "{"
        while True:
            yield from reader.spaces()
            tag = yield from reader.next_is(self.key, self.end)
            if tag is None:
                return False
            if tag == self.end:
                break
            key = yield from reader.until(self.after_key)
            if self.value:
                yield from reader.spaces()
            if key is None or (yield from reader.next_is(self.value)) is None:
                return False
            value = yield from reader.until(self.after_value)
            if value is None:
                return False
            if self.has_lines:
                value = value.removeprefix("\n").removesuffix("\n")
            key = key.strip()
            write(f"{before}{json.dumps(key, ensure_ascii=False)}: {_value_json(value, key, context.functions[name])}")
            before = ", "
        write("{}" if before == "{" else "}")
        yield from context.close(*([END] if marker == BEGIN and self.end != END else []))
        return True


QWEN3_CODER = Tags("<function=", ">", "</function>", "<parameter=", ">", "", "</parameter>", has_lines=True)
GLM = Tags("", "", END, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


def _value_json(text: str, key: str, function: Function) -> str:
    """A value's text as JSON. The schema's types decide if it names some; otherwise the value is JSON if it parses, else text."""
    schema = ((function.parameters or {}).get("properties") or {}).get(key)
    kinds = _kinds(schema)
    if isinstance(schema, Mapping) and text.strip() in [value for value in _options(schema) if isinstance(value, str)]:
        text = text.strip()  # the schema lists the values: spaces around one belong to the tags
    if kinds == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    written = literal_json(text) or _own_json(text)
    if written is None or (kinds and "string" in kinds and _kind(written) not in kinds):
        return json.dumps(text, ensure_ascii=False)
    return written


def _own_json(text: str) -> str | None:
    """The text itself if it is JSON. It is not written anew, because it may have a number that no float can hold."""
    try:
        json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return None
    return text.strip()


def _kinds(schema: Any) -> set[str]:
    """The types that a schema admits; empty if it names none."""
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
