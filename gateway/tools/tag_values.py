"""Values of arguments that stand between tags as plain text: by the function's schema they are text, or JSON.

Qwen3-Coder and GLM write each argument into tags of its own. A value that is a text stands there as it is, without
quotes; all others are JSON (models also write Python's literals).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from kvrelay.gateway.tools.functions import Function
from kvrelay.gateway.tools.pythonic import literal_json


def value_json(text: str, key: str, function: Function) -> str:
    """A value's text as JSON: by the schema's types where it names some, else as JSON if it is, and as text if not."""
    schema = ((function.parameters or {}).get("properties") or {}).get(key)
    kinds = _kinds(schema)
    if isinstance(schema, Mapping) and text.strip() in [value for value in _options(schema) if isinstance(value, str)]:
        text = text.strip()  # one of a few words: spaces around it belong to the tags
    if kinds == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    written = literal_json(text) or _own_json(text)
    if written is None or (kinds and "string" in kinds and _kind(written) not in kinds):
        return json.dumps(text, ensure_ascii=False)
    return written


def value_texts(arguments: str) -> list[tuple[str, str]]:
    """JSON text of an object as (key, text of its value)."""
    values = json.loads(arguments).items()
    return [(key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)) for key, value in values]


def _own_json(text: str) -> str | None:
    """JSON as it stands there, if it is: what has a number that no float holds cannot be written anew."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return text.strip()


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


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
