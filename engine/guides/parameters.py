"""Arguments as tags, as some models write them: each parameter has its own tags, strings are plain, other values are JSON.

DeepSeek's tags also say which of the two a value is, so a string there may be any text, and spaces around it belong to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvrelay.engine.guides.errors import UnsupportedGuideError
from kvrelay.engine.guides.lark import Lark, Part, constant, pattern, text_without
from kvrelay.engine.guides.schema import followable

_SPACES = pattern(r"[ \t\r\n]{0,16}")
_ANY_NAME = pattern("[a-zA-Z_][a-zA-Z0-9_]*")
_JSON_KINDS = ["null", "boolean", "number", "array", "object"]
_COMBINING = ("anyOf", "oneOf", "allOf")
_NOTES = ("title", "description", "default", "examples", "deprecated")  # keywords that bind nothing
_MAX_REFERENCES = 16  # references that lead to further references


@dataclass(frozen=True, slots=True)
class _Style:
    before: str
    after_name: tuple[str, ...]  # with spaces between
    end: str
    of_text: str = ""  # before a string, in a style that says what a value is
    of_json: str = ""  # before any other value


STYLES = {
    "qwen_xml": _Style("<parameter=", (">",), "</parameter>"),
    "glm_xml": _Style("<arg_key>", ("</arg_key>", "<arg_value>"), "</arg_value>"),
    "deepseek_xml": _Style(
        '<\uff5cDSML\uff5cparameter name="',
        ('"',),
        "</\uff5cDSML\uff5cparameter>",
        ' string="true">',
        ' string="false">',
    ),
}


def parameters(lark: Lark, schema: Any, style: str, literal: Callable[[str], Part]) -> Part:
    """The parameters of an object's schema, in its order. Other parameters are allowed if it has no properties or says so.

    ``literal``: makes a part of a text that may contain names of special tokens.
    """
    schema = {} if schema is True else schema
    followable(schema)
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    writer = _Writer(lark, STYLES[style], definitions, literal)
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    parts = [
        lark.repeat(writer.parameter(constant(name), value), int(name in required), 1)
        for name, value in properties.items()
    ]
    if schema.get("additionalProperties", not properties) is not False:
        parts.append(lark.repeat(writer.parameter(_ANY_NAME, schema.get("additionalProperties", True)), 0, None))
    return lark.sequence([*parts, _SPACES])


class _Writer:
    def __init__(self, lark: Lark, style: _Style, definitions: dict[str, Any], literal: Callable[[str], Part]) -> None:
        self._lark, self._style, self._definitions, self._literal = lark, style, definitions, literal
        self._tells_kinds = bool(style.of_text)

    def parameter(self, name: Part, schema: Any) -> Part:
        first, *rest = self._style.after_name
        head = [_SPACES, self._literal(self._style.before), name, self._literal(first)]
        for text in rest:
            head += [_SPACES, self._literal(text)]
        return self._lark.sequence([*head, self._value(schema, 0)])

    def _value(self, schema: Any, depth: int) -> Part:
        """A value with its end: a lexeme of a text alone would also match the beginning of what ends it."""
        schema = schema if isinstance(schema, dict) else {}
        if isinstance(schema.get("$ref"), str):
            return self._value(self._definition(schema["$ref"], depth), depth + 1)
        may_be_text = self._may_be_text(schema, depth)
        if may_be_text and (choices := self._alternatives(schema, depth)):
            return self._lark.either([self._value(one, depth + 1) for one in choices])
        parts = [self._marked(self._style.of_text, text) for text in self._texts(schema)] if may_be_text else []
        rest = self._without_text(schema) if may_be_text else schema
        if rest is not None:
            json = self._lark.json(followable({**self._definitions, **rest}, is_spaced=True))
            parts.append(self._marked(self._style.of_json, _SPACES, json, _SPACES))
        return self._lark.either(parts)

    def _may_be_text(self, schema: Any, depth: int) -> bool:
        """Whether a schema admits strings. llguidance itself combines the schemas of other values."""
        if not isinstance(schema, dict):
            return schema is not False
        if isinstance(schema.get("$ref"), str):
            return self._may_be_text(self._definition(schema["$ref"], depth), depth + 1)
        values = _values(schema)
        if values is not None:
            return any(isinstance(value, str) for value in values)
        if "type" in schema and "string" not in _kinds(schema):
            return False
        found = {key: [self._may_be_text(one, depth) for one in _schemas(schema, key)] for key in _COMBINING}
        return all(all(each) if key == "allOf" else any(each) for key, each in found.items() if each)

    def _alternatives(self, schema: dict[str, Any], depth: int) -> list[dict[str, Any]]:
        """The schemas of which a string must match one, instead of ``schema`` and what it combines. Empty if it combines none."""
        key = next((key for key in _COMBINING if _schemas(schema, key)), None)
        if key is None:
            return []
        own = {name: value for name, value in schema.items() if name != key}
        if key == "allOf":
            return [_merged([own, *_schemas(schema, key)])]
        texts = [one for one in _schemas(schema, key) if self._may_be_text(one, depth)]
        if key == "oneOf" and len(texts) > 1 and any(self._listed(one, depth) is None for one in texts):
            raise UnsupportedGuideError("'oneOf' has several schemas that may match the same string")
        return [_merged([own, one]) for one in _schemas(schema, key)]

    def _listed(self, schema: Any, depth: int) -> list[Any] | None:
        """The values that a schema lists, or what it refers to."""
        if not isinstance(schema, dict):
            return None
        if isinstance(schema.get("$ref"), str):
            return self._listed(self._definition(schema["$ref"], depth), depth + 1)
        return _values(schema)

    def _marked(self, mark: str, *value: Part) -> Part:
        return self._lark.sequence([*([constant(mark)] if mark else []), *value, self._literal(self._style.end)])

    def _texts(self, schema: dict[str, Any]) -> list[Part]:
        """The texts that the value may be."""
        values = _values(schema)
        if values is not None:
            space = [] if self._tells_kinds else [_SPACES]
            return [
                self._lark.sequence([*space, constant(value), *space]) for value in values if isinstance(value, str)
            ]
        if "string" not in _kinds(schema):
            return []
        free = text_without([self._style.end])
        if odd := [name for name in ("format", "pattern") if name in followable(schema)]:
            raise UnsupportedGuideError(f"{odd[0]!r} of a string in tags cannot be kept")
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if not least and most is None:
            return [free]
        counted = pattern(f"(?s:.){{{int(least)},{'' if most is None else int(most)}}}")
        return [Part(f"({free.text} & {counted.text})")]

    def _without_text(self, schema: dict[str, Any]) -> dict[str, Any] | None:
        """The schema of the values that are JSON; None if there are none.

        Where nothing says what a value is, a text stands for all values that a schema with strings admits.
        """
        values = _values(schema)
        if values is not None:
            rest = [value for value in values if not isinstance(value, str)]
            return {"enum": rest} if rest else None
        if "string" not in _kinds(schema):
            return schema
        kinds = [kind for kind in _kinds(schema) if kind != "string"] if "type" in schema else _JSON_KINDS
        return {**schema, "type": kinds} if kinds and self._tells_kinds else None

    def _definition(self, reference: str, depth: int) -> Any:
        if depth > _MAX_REFERENCES:
            raise UnsupportedGuideError(f"{reference[:80]!r} leads to more than {_MAX_REFERENCES} further references")
        place: Any = self._definitions
        for name in reference.removeprefix("#/").split("/"):
            place = place.get(name) if isinstance(place, dict) else None
        if place is None:
            raise UnsupportedGuideError(f"{reference[:80]!r} leads to no schema")
        return place


def _schemas(schema: dict[str, Any], key: str) -> list[Any]:
    """The schemas that one combines under ``key``."""
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _merged(schemas: list[Any]) -> dict[str, Any]:
    """One schema that says what all of them say. Raises UnsupportedGuideError if two differ in a keyword other than types."""
    merged: dict[str, Any] = {}
    for schema in [one for one in schemas if isinstance(one, dict)]:
        for key, value in schema.items():
            if key == "type" and (
                kinds := [kind for kind in _kinds(schema) if kind in _kinds({"type": value, **merged})]
            ):
                merged[key] = kinds
            elif key not in _NOTES and merged.setdefault(key, value) != value:
                raise UnsupportedGuideError(f"{key!r} stands in two schemas of a string in tags, which cannot be kept")
    return merged


def _values(schema: dict[str, Any]) -> list[Any] | None:
    """The values that a schema lists."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def _kinds(schema: dict[str, Any]) -> list[Any]:
    kinds = schema.get("type", "string")
    return kinds if isinstance(kinds, list) else [kinds]
