"""The changes that are made to a schema before llguidance gets it."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.engine.guides.errors import UnsupportedGuideError
from kvrelay.engine.guides.schema import followable, parse_json

OPEN = {"properties": {"a": {}}}
CLOSED = {"properties": {"a": {}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "prepared"),
    [
        (True, {}),
        ({"properties": {"a": {}}}, CLOSED),
        ({**CLOSED, "additionalProperties": True}, {**CLOSED, "additionalProperties": True}),
        (
            {"properties": {"a": {"items": {"properties": {"a": {}}}}}},
            {**CLOSED, "properties": {"a": {"items": CLOSED}}},
        ),
        ({"properties": {}, "required": ["a"]}, {**CLOSED, "required": ["a"]}),
        (
            {"allOf": [{"properties": {"a": {}}}], "properties": {}},
            {"allOf": [{"properties": {"a": {}}}], "properties": {}},
        ),
        ({"anyOf": [{"properties": {"a": {}}}]}, {"anyOf": [CLOSED]}),
        ({"$defs": {"d": {"properties": {"a": {}}}}}, {"$defs": {"d": CLOSED}}),
        (
            {"$defs": {"d": OPEN}, "items": {"allOf": [{"$ref": "#/$defs/d"}]}},
            {"$defs": {"d": CLOSED}, "items": {"allOf": [{"$ref": "#/$defs/d"}]}},
        ),
        ({"enum": [{"properties": {}, "format": "x"}]}, {"enum": [{"properties": {}, "format": "x"}]}),
        ({"type": "string", "format": "password"}, {"type": "string"}),
        ({"type": "string", "format": None}, {"type": "string"}),
        ({"type": "string", "format": "date"}, {"type": "string", "format": "date"}),
    ],
)
def test_objects_are_closed_and_odd_formats_go(schema: Any, prepared: Any) -> None:
    found = followable(schema)
    assert found.pop("x-guidance")["item_separator"] == ", "
    assert found == prepared


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"$ref": "#/$defs/d"}, {"properties": {"b": {}}}]},
        {"anyOf": [{"$ref": "#/$defs/d"}], "properties": {"b": {}}},
        {"allOf": [{"anyOf": [{"$ref": "#/$defs/alias"}]}, {"properties": {"b": {}}}]},
        {"$ref": "#/$defs/a~1b", "properties": {"b": {}}},
    ],
)
def test_a_definition_beside_other_properties_does_not_forbid_them(schema: Any) -> None:
    """An object that inherits another's properties has both; closed, the definition would allow neither."""
    definitions = {"alias": {"$ref": "#/$defs/d"}, "a/b": {"$ref": "#/$defs/d"}, "d": OPEN}
    found = followable({**schema, "$defs": definitions})
    assert found["$defs"] == definitions
    assert {name: found[name] for name in schema} == schema


@pytest.mark.parametrize("name", [["date"], {}, 5])
def test_a_format_that_is_no_text_is_refused_by_name(name: Any) -> None:
    with pytest.raises(UnsupportedGuideError, match=r"format is .*; it must be a name"):
        followable({"items": {"type": "string", "format": name}})


def test_what_is_no_schema_is_refused() -> None:
    deep: Any = {}
    for _ in range(50_000):
        deep = {"items": deep}
    for schema in (False, [], 5, deep):
        with pytest.raises(UnsupportedGuideError):
            followable(schema)
    for text in ("[" * 60_000, '{"const": NaN}', "{"):
        with pytest.raises(UnsupportedGuideError, match="the schema is not JSON"):
            parse_json(text, "the schema")
