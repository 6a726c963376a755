"""Schemas are closed and loosened, never made wrong."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.gateway.tools.schemas import closed, loosened


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, {"type": "string"}),
        (True, True),
        ({"properties": {"a": {}}}, {"properties": {"a": {}}, "additionalProperties": False}),
        (
            {"properties": {"a": {}}, "additionalProperties": True},
            {"properties": {"a": {}}, "additionalProperties": True},
        ),
        ({"type": "object"}, {"type": "object"}),
        (
            {"properties": {"a": {"items": {"properties": {"b": True}}}}},
            {
                "properties": {"a": {"items": {"properties": {"b": True}, "additionalProperties": False}}},
                "additionalProperties": False,
            },
        ),
        (
            {"required": ["a"]},
            {"required": ["a"], "properties": {"a": {}}, "additionalProperties": False},
        ),
        (
            {"allOf": [{"properties": {"a": {}}}], "properties": {}},
            {"allOf": [{"properties": {"a": {}}}], "properties": {}},
        ),
        (
            {"properties": {"properties": {"type": "object"}}},
            {"properties": {"properties": {"type": "object"}}, "additionalProperties": False},
        ),
        (
            {"anyOf": [{"properties": {"a": {}}}], "$defs": {"d": {"properties": {"a": {}}}}},
            {
                "anyOf": [{"properties": {"a": {}}, "additionalProperties": False}],
                "$defs": {"d": {"properties": {"a": {}}, "additionalProperties": False}},
            },
        ),
    ],
)
def test_closed(schema: Any, expected: Any) -> None:
    assert closed(schema) == expected


def test_loosened_keeps_what_compiles_and_drops_the_rest() -> None:
    schema = {
        "type": "object",
        "title": "T",
        "properties": {
            "a": {"type": "string", "pattern": "(", "format": "zzz", "description": "d"},
            "b": {"enum": ["x", 1]},
            "c": {"enum": []},
            "d": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/e"}]},
            "e": {"$ref": "https://example.org/schema"},
            "f": {"type": "array", "items": {"type": "integer", "minimum": 3, "maximum": 1}, "minItems": 2},
            "g": {"const": None},
            "h": {"type": "money"},
            "i": {"allOf": [{"properties": {"z": {}}}], "properties": {"y": {}}},
            "j": {"$ref": "#/$defs/loop"},
            "k": False,
        },
        "required": ["a", "missing"],
        "$defs": {"e": {"type": "number", "multipleOf": 0}, "loop": {"$ref": "#/$defs/loop"}},
    }
    assert loosened(schema) == {
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "b": {"enum": ["x", 1]},
            "c": {},
            "d": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/e"}]},
            "e": {},
            "f": {"type": "array", "items": {"type": "integer"}},
            "g": {"const": None},
            "h": {},
            "i": {"properties": {"y": {}}, "required": [], "additionalProperties": True},
            "j": {},
            "k": {},
        },
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"e": {"type": "number"}, "loop": {}},
    }


def test_loosened_objects_stay_objects() -> None:
    assert loosened({}) == {"type": "object"}
    assert loosened({"anyOf": [{"required": ["a"]}]})["type"] == "object"
