"""Schemas are loosened, never made wrong."""

from __future__ import annotations

from kvrelay.gateway.chat.tools.call_grammar import loosened


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
