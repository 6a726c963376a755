"""Schemas of arguments, as guides use them.

Where nobody asked for strictness, a schema is *loosened* to the keywords that always compile: a tool with an exotic schema must not
make a request fail that could have been answered with text. Loosening admits more values. But objects that name their properties
and say nothing of others have no others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

ANY_OBJECT: Schema = {"type": "object", "additionalProperties": True}
NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}

_TYPES = frozenset({"string", "number", "integer", "boolean", "array", "object", "null"})
_COMBINING = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "patternProperties", "propertyNames",
                        "dependentSchemas", "unevaluatedProperties", "minProperties"})  # fmt: skip
_DEFINITIONS = ("$defs", "definitions")


def loosened(schema: Mapping[str, Any]) -> Schema:
    """The schema of an object, with the keywords that always compile: types, properties, items, values, choices, references."""
    loose = _loose(schema, schema)
    for key in _DEFINITIONS:
        if isinstance(schema.get(key), Mapping):
            loose[key] = {name: _loose(part, schema) for name, part in schema[key].items()}
    return {**loose, "type": "object"}


def _loose(schema: Any, root: Mapping[str, Any]) -> Schema:
    if not isinstance(schema, Mapping):
        return {}
    target = schema.get("$ref")
    if target is not None:
        return {"$ref": target} if _resolves(target, root) else {}
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return {"enum": schema["enum"]}
    if "const" in schema:
        return {"const": schema["const"]}
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and schema[key] and "properties" not in schema:
            return {"anyOf": [_loose(part, root) for part in schema[key]]}
    loose: Schema = {}
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if isinstance(kinds, list) and kinds and all(kind in _TYPES for kind in kinds):
        loose["type"] = schema["type"]
    if isinstance(schema.get("items"), Mapping):
        loose["items"] = _loose(schema["items"], root)
    if isinstance(schema.get("properties"), Mapping):
        loose |= _loose_object(schema, root)
    return loose


def _loose_object(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Schema:
    properties = {name: _loose(part, root) for name, part in schema["properties"].items()}
    required = schema.get("required")
    is_open = bool(schema.get("additionalProperties", False)) or bool(_COMBINING & schema.keys())
    return {
        "properties": properties,
        "required": [name for name in required if name in properties] if isinstance(required, list) else [],
        "additionalProperties": is_open,
    }


def _resolves(target: Any, root: Mapping[str, Any]) -> bool:
    """Whether a reference leads to a definition of this schema, and not only to further references."""
    seen: set[Any] = set()
    while isinstance(target, str) and target not in seen:
        seen.add(target)
        start, _, name = target.removeprefix("#/").partition("/")
        definitions = root.get(start)
        if not target.startswith("#/") or start not in _DEFINITIONS or not isinstance(definitions, Mapping):
            return False
        if not isinstance(definitions.get(name), Mapping):
            return False
        target = definitions[name].get("$ref")
    return target is None
