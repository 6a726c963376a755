"""Arguments as tags, as some models write them: each parameter has its own tags, strings are plain, other values are JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvrelay.engine.guides.errors import UnsupportedGuideError
from kvrelay.engine.guides.lark import Lark, Part, constant, pattern, text_without
from kvrelay.engine.guides.schema import followable

_SPACES = pattern(r"[ \t\r\n]{0,16}")
_ANY_NAME = pattern("[a-zA-Z_][a-zA-Z0-9_]*")
_MAX_REFERENCES = 16  # references that lead to further references


@dataclass(frozen=True, slots=True)
class _Style:
    before: str
    after_name: tuple[str, ...]  # with spaces between
    end: str


STYLES = {
    "qwen_xml": _Style("<parameter=", (">",), "</parameter>"),
    "glm_xml": _Style("<arg_key>", ("</arg_key>", "<arg_value>"), "</arg_value>"),
}


def parameters(lark: Lark, schema: Any, style: str) -> Part:
    """The parameters of an object's schema, in its order. Other parameters are allowed if it has no properties or says so."""
    schema = {} if schema is True else schema
    followable(schema)
    writer = _Writer(lark, STYLES[style], {key: schema[key] for key in ("$defs", "definitions") if key in schema})
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
    def __init__(self, lark: Lark, style: _Style, definitions: dict[str, Any]) -> None:
        self._lark, self._style, self._definitions = lark, style, definitions

    def parameter(self, name: Part, schema: Any) -> Part:
        first, *rest = self._style.after_name
        head = [_SPACES, constant(self._style.before), name, constant(first)]
        for text in rest:
            head += [_SPACES, constant(text)]
        return self._lark.sequence([*head, self._value(schema, 0), constant(self._style.end)])

    def _value(self, schema: Any, depth: int) -> Part:
        if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
            if depth > _MAX_REFERENCES:
                raise UnsupportedGuideError(
                    f"{schema['$ref'][:80]!r} leads to more than {_MAX_REFERENCES} further references"
                )
            return self._value(self._definition(schema["$ref"]), depth + 1)
        if isinstance(schema, dict) and isinstance(schema.get("anyOf"), list):
            return self._lark.either([self._value(one, depth + 1) for one in schema["anyOf"]])
        text = self._text(schema) if isinstance(schema, dict) else text_without([self._style.end])
        if text is not None:
            return text
        json = self._lark.json(followable({**self._definitions, **schema}, is_spaced=True))
        return self._lark.sequence([_SPACES, json, _SPACES])

    def _text(self, schema: dict[str, Any]) -> Part | None:
        """The value if it may be a string; None if it must be JSON."""
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            if not any(isinstance(value, str) for value in values):
                return None
            rest = [value for value in values if not isinstance(value, str)]
            texts = [
                self._lark.sequence([_SPACES, constant(value), _SPACES]) for value in values if isinstance(value, str)
            ]
            return self._lark.either([*texts, *([self._value({"enum": rest}, 0)] if rest else [])])
        kinds = schema.get("type", "string")
        if "string" not in (kinds if isinstance(kinds, list) else [kinds]):
            return None
        free = text_without([self._style.end])
        if odd := [name for name in ("format", "pattern") if name in followable(schema)]:
            raise UnsupportedGuideError(f"{odd[0]!r} of a string in tags cannot be kept")
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if not least and most is None:
            return free
        counted = pattern(f"(?s:.){{{int(least)},{'' if most is None else int(most)}}}")
        return Part(f"({free.text} & {counted.text})")

    def _definition(self, reference: str) -> Any:
        place: Any = self._definitions
        for name in reference.removeprefix("#/").split("/"):
            place = place.get(name) if isinstance(place, dict) else None
        if place is None:
            raise UnsupportedGuideError(f"{reference[:80]!r} leads to no schema")
        return place
