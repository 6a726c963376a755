"""What becomes of a schema before xgrammar sees it, and which keyword is named where that cannot be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrelay.engine.guide_errors import UnsupportedGuideError
from kvrelay.engine.guide_pattern import json_string_pattern
from kvrelay.engine.guide_schema import followable, followable_schema


@pytest.mark.parametrize(
    ("schema", "rewritten"),
    [
        ({"type": "string", "enum": ["a", 1], "title": "x"}, {"enum": ["a"]}),
        ({"minimum": 3}, {"type": "number", "minimum": 3}),
        ({"type": "string", "minLength": 2}, {"type": "string", "pattern": r'^[^\x00-\x1f"\\]{2,}$'}),
        (
            {"type": "object", "required": ["a"], "additionalProperties": {"type": "null"}},
            {
                "type": "object",
                "required": ["a"],
                "additionalProperties": {"type": "null"},
                "properties": {"a": {"type": "null"}},
            },
        ),
        (
            {"type": "integer", "anyOf": [{"minimum": 3}, {"maximum": 0}]},
            {"anyOf": [{"minimum": 3, "type": "integer"}, {"maximum": 0, "type": "integer"}]},
        ),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        ({"type": "array", "minItems": 2}, {"type": "array", "minItems": 2, "items": {}}),
    ],
)
def test_what_is_rewritten(schema: Any, rewritten: Any) -> None:
    assert followable(schema) == rewritten


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ({"properties": {"a": {"not": {}}}}, "'not' at properties.a"),
        ({"if": {}, "then": {}}, "'if'"),
        ({"type": "array", "contains": {}}, "'contains'"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
        ({"allOf": [{"type": "string"}, {"minLength": 2}]}, "'allOf'"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf: a value may match several"),
        ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {}}}, "'minimum' beside '$ref'"),
        ({"$ref": "https://example.com/schema"}, "it must lead to a place in the schema itself"),
        ({"$ref": "#/nowhere"}, "leads to no schema"),
        ({"type": "string", "enum": ["a"], "minLength": 2}, "'minLength' beside 'enum'"),
        ({"type": "string", "const": 1}, "no value of the type 'string'"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "pattern and maxLength"),
        ({"type": "string", "format": "iri"}, "format 'iri'"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "leave no string"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "required has 'a'"),
        ({"type": "object", "additionalProperties": {}, "minProperties": 2}, "'minProperties'"),
        ({"properties": {"a": {}}, "patternProperties": {"^x": {}}}, "'patternProperties'"),
        ({"propertyNames": {"type": "boolean"}}, "'propertyNames'"),
        ({"dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
        ({"enum": [2**63]}, "does not fit 64 bits"),
        ({"properties": []}, "properties must be an object"),
        ([], "not a JSON Schema"),
    ],
)
def test_what_cannot_be_followed_is_named(schema: Any, names: str) -> None:
    with pytest.raises(UnsupportedGuideError) as raised:
        followable(schema)
    assert names in str(raised.value)


def test_a_schema_that_is_nested_too_deep_or_no_json_is_refused() -> None:
    deep: Any = {}
    for _ in range(80):
        deep = {"items": deep}
    for text in (json.dumps(deep), "[" * 60_000, '{"const": NaN}', "{"):
        with pytest.raises(UnsupportedGuideError):
            followable_schema(text)


def test_a_union_told_apart_by_a_constant_may_refer() -> None:
    part = {"type": "object", "properties": {"kind": {"const": "a"}}, "required": ["kind"]}
    other = {"type": "object", "properties": {"kind": {"enum": ["b", "c"]}}, "required": ["kind"]}
    schema = {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": part, "b": other}}
    assert followable(schema)["anyOf"] == schema["oneOf"]


@pytest.mark.parametrize(
    ("pattern", "rewritten"),
    [
        ("^[a-z]+$", "[a-z]+"),
        ("^a$|^b$", "a|b"),
        ("a.c", 'a[^\\x00-\\x1f"\\\\]c'),
        ("[^ab]", '[^ab\\x00-\\x1f"\\\\]'),
        ('"', '(?:\\\\")'),
        ("\\\\", "(?:\\\\\\\\)"),
        ("\\n+", "(?:\\\\n)+"),
        ("\\x22", '(?:\\\\")'),
        ("[ -~]", "[ -!#-\\[\\]-~]"),
        ("\\S", '[^\\s\\x00-\\x1f"\\\\]'),
        ("[\\s\\S]", '[^\\x00-\\x1f"\\\\]'),
        ("\\(^\\)", None),
        ("[(]|^b", "[(]|b"),
        ("(^a)", None),
        ("\\bword", None),
        ('["\\\\]', None),
    ],
)
def test_patterns_for_the_text_of_a_json_string(pattern: str, rewritten: str | None) -> None:
    if rewritten is None:
        with pytest.raises(UnsupportedGuideError):
            json_string_pattern(pattern)
    else:
        assert json_string_pattern(pattern) == rewritten
