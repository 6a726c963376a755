"""Prepares a client's JSON Schema for llguidance.

llguidance follows a schema literally, or refuses it and names the keyword. Three things remain to be done here. Formats that JSON
Schema does not define become annotations. An object that names its properties and does not mention others has no others, because a
model that may invent properties does so without end. For the same reason white space is limited.
"""

from __future__ import annotations

import json
from typing import Any

from kvrelay.engine.guides.errors import UnsupportedGuideError

_FORMATS = frozenset(  # of JSON Schema 2020-12; llguidance refuses formats that it does not know
    {"date", "time", "date-time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uuid", "uri",
     "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer", "relative-json-pointer", "regex"}
)  # fmt: skip
_OF_NAMES = frozenset({"properties", "patternProperties", "$defs", "definitions"})  # their values map names to schemas
_OF_SCHEMAS = frozenset({"items", "prefixItems", "additionalProperties", "allOf", "anyOf", "oneOf"})
_COMBINING = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
_AS_DUMPS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_SOME_SPACES = r"[ \t\r\n]{0,16}"
_SPACED = {
    "whitespace_flexible": False,
    "item_separator": f"{_SOME_SPACES},{_SOME_SPACES}",
    "key_separator": f"{_SOME_SPACES}:{_SOME_SPACES}",
}


def followable(schema: Any, *, is_spaced: bool = False) -> dict[str, Any]:
    """The schema with llguidance's options. ``is_spaced``: some white space around commas and colons; otherwise as ``json.dumps``
    writes.

    Raises UnsupportedGuideError if it is no schema, or allows no value.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise UnsupportedGuideError(
            "the schema is false: nothing can match it"
            if schema is False
            else f"not a JSON Schema: {str(schema)[:80]!r}"
        )
    opened: set[str] = set()
    num_opened = -1
    try:
        while len(opened) > num_opened:  # what an opened definition refers to may have to be opened, too
            num_opened = len(opened)
            prepared = _prepared(schema, opened, may_close=True)
    except RecursionError as error:
        raise UnsupportedGuideError("the schema is nested too deeply") from error
    return {**prepared, "x-guidance": _SPACED if is_spaced else _AS_DUMPS}


def parse_json(text: str, what: str) -> Any:
    """The JSON in ``text``. Raises UnsupportedGuideError, which calls the text ``what``."""

    def refuse(name: str) -> float:
        raise ValueError(f"{name} is no JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise UnsupportedGuideError(f"{what} is not JSON: {error}") from error


def _prepared(part: Any, opened: set[str], *, may_close: bool) -> Any:
    """``opened``: references to schemas that must not be closed, because other properties stand beside them; this adds to it."""
    if isinstance(part, list):
        return [_prepared(inner, opened, may_close=may_close) for inner in part]
    if not isinstance(part, dict):
        return part
    # Beside others, a closed part would forbid their properties.
    is_alone = may_close and "properties" not in part and len(_COMBINING & part.keys()) <= 1
    if isinstance(reference := part.get("$ref"), str) and not is_alone:
        opened.add(reference.replace("~1", "/").replace("~0", "~"))
    schema: dict[str, Any] = {}
    for key, value in part.items():
        if key in _OF_NAMES and isinstance(value, dict):
            schema[key] = {
                name: _prepared(inner, opened, may_close=f"#/{key}/{name}" not in opened)
                for name, inner in value.items()
            }
        elif key in _OF_SCHEMAS:
            is_one_of_many = key == "allOf" and isinstance(value, list) and len(value) > 1
            may = key not in _COMBINING or (is_alone and not is_one_of_many)
            schema[key] = _prepared(value, opened, may_close=may)
        elif key == "format" and not isinstance(value, str | None):
            raise UnsupportedGuideError(f'format is {str(value)[:80]}; it must be a name such as "date", or left out')
        elif key != "format" or value in _FORMATS:
            schema[key] = value
    is_open = {"additionalProperties", "patternProperties"} & schema.keys() or _COMBINING & schema.keys()
    if may_close and isinstance(schema.get("properties"), dict) and not is_open:
        required = schema.get("required")
        undeclared = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        schema["properties"] = {
            **schema["properties"],
            **{name: {} for name in undeclared if name not in schema["properties"]},
        }
        schema["additionalProperties"] = False
    return schema
