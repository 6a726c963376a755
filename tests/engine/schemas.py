"""Random JSON Schemas: of what can be followed, and of anything."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]

NAMES = st.sampled_from(
    ["a", "b", "name", "id", "x y", 'say "hi"', "back\\slash", "größe", "😀", "line\nbreak", "$ref", "type"]
)
# The demo model's tokens do not have all bytes: it cannot write what lies beyond.
TEXTS = st.text(st.characters(max_codepoint=0xFFFD, exclude_categories=("Cs",)), max_size=8)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-(2**53), 2**53), st.floats(-(2**53), 2**53), TEXTS)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=4
)
PATTERNS = st.sampled_from(
    [
        "^[a-z]{2,5}$",
        "^[A-Z][a-z]+$",
        "^(foo|bar)-[0-9]{3}$",
        "^\\d{4}-\\d{2}$",
        "^.{3}$",
        "^[^ab]{1,4}$",
        '^"[a-z]"$',
        "^a\\\\b$",
        "^\\S{2}$",
        "^[\\w.]+@[a-z]+\\.com$",
        "^[ -~]{1,200}$",
        "^.{0,150}$",
        "^\\n$",
        "^a$|^b$",
        "^(a|b)*c?$",
        "^[\\s\\S]{2}$",
        '^["a]$',
    ]
)
FORMATS = st.sampled_from(["date", "time", "date-time", "uuid", "ipv4", "duration", "int32", "password"])
ANNOTATIONS = st.fixed_dictionaries(
    {}, optional={"title": TEXTS, "description": TEXTS, "default": VALUES, "x-order": st.integers()}
)


@st.composite
def followable_schemas(draw: st.DrawFn) -> Schema:
    """A schema that some document meets, with keywords that can be followed only."""
    schema = draw(_followable(3))
    if draw(st.booleans()):
        schema = {
            "type": "object",
            "properties": {
                "one": {"$ref": "#/$defs/part"},
                "other": schema,
                "more": {"type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 3},
            },
            "required": ["one"],
            "$defs": {"part": draw(_followable(2))},
        }  # fmt: skip
    return schema


def _followable(depth: int) -> st.SearchStrategy[Schema]:
    kinds = [
        _strings(),
        _numbers(),
        _enums(),
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}]),
    ]
    if depth:
        kinds += [_arrays(depth), _objects(depth), _objects(depth), _unions(depth)]
    return st.tuples(ANNOTATIONS, st.one_of(kinds)).map(lambda pair: {**pair[0], **pair[1]})


def _strings() -> st.SearchStrategy[Schema]:
    lengths = st.tuples(st.integers(0, 6), st.integers(6, 300)).map(
        lambda both: {"minLength": both[0], "maxLength": both[1]}
    )
    more = st.one_of(
        st.just({}), lengths, PATTERNS.map(lambda one: {"pattern": one}), FORMATS.map(lambda one: {"format": one}),
        st.integers(1, 3).map(lambda least: {"minLength": least}),
    )  # fmt: skip
    return more.map(lambda one: {"type": "string", **one})


@st.composite
def _numbers(draw: st.DrawFn) -> Schema:
    schema: Schema = {"type": draw(st.sampled_from(["integer", "number"]))}
    least = draw(st.integers(-1000, 1000))
    for keyword, value in (("minimum", least), ("maximum", least + draw(st.integers(50, 5000)))):
        if draw(st.booleans()):
            name = keyword if draw(st.booleans()) else "exclusive" + keyword.capitalize()
            schema[name] = value
    if schema["type"] == "integer" and draw(st.booleans()):
        schema["multipleOf"] = draw(st.sampled_from([2, 5, 7]))
    return schema


@st.composite
def _enums(draw: st.DrawFn) -> Schema:
    values = draw(st.lists(VALUES, min_size=1, max_size=4))
    return {"const": values[0]} if draw(st.booleans()) else {"enum": values}


@st.composite
def _arrays(draw: st.DrawFn, depth: int) -> Schema:
    schema: Schema = {"type": "array"}
    first = draw(st.lists(_followable(depth - 1), max_size=2))
    if first:
        schema["prefixItems"] = first
    schema["items"] = draw(_followable(depth - 1)) if draw(st.booleans()) or not first else False
    most = len(first) if schema["items"] is False else len(first) + 3
    if draw(st.booleans()):
        schema["minItems"] = draw(st.integers(0, most))
    schema["maxItems"] = most
    return schema


@st.composite
def _objects(draw: st.DrawFn, depth: int) -> Schema:
    schema: Schema = {"type": "object"}
    properties = draw(st.dictionaries(NAMES, _followable(depth - 1), max_size=4))
    if properties or draw(st.booleans()):
        schema["properties"] = properties
        schema["required"] = draw(st.lists(st.sampled_from(sorted(properties)), unique=True)) if properties else []
    others = draw(st.sampled_from(["none", "false", "schema"]))
    if others == "false":
        schema["additionalProperties"] = False
    elif others == "schema":
        schema["additionalProperties"] = draw(_followable(0))
        if set(schema.get("required", ())) == properties.keys():  # others are refused by name
            schema["maxProperties"] = len(properties) + 2
    return schema


@st.composite
def _unions(draw: st.DrawFn, depth: int) -> Schema:
    branches = draw(st.lists(_followable(depth - 1), min_size=1, max_size=3))
    if draw(st.booleans()):
        return {"anyOf": branches}
    tagged = [
        {"type": "object", "properties": {"kind": {"const": name}, "value": branch}, "required": ["kind"]}
        for name, branch in zip("abc", branches, strict=False)
    ]
    return {"oneOf": tagged}


def any_schemas() -> st.SearchStrategy[Any]:
    """Any keywords side by side, those that nobody can follow as well; many meet no document at all."""
    counts, numbers = st.integers(0, 4), st.one_of(st.integers(-5, 5), st.floats(-5, 5))
    types = st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object"])

    def nest(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        some, named = st.lists(inner, min_size=1, max_size=2), st.dictionaries(NAMES, inner, max_size=2)
        keywords: dict[str, st.SearchStrategy[Any]] = {
            "type": st.one_of(types, st.lists(types, min_size=1, max_size=2, unique=True)),
            "minLength": counts, "maxLength": counts, "pattern": PATTERNS, "format": FORMATS, "minimum": numbers,
            "maximum": numbers, "exclusiveMinimum": numbers,
            "exclusiveMaximum": numbers, "multipleOf": st.integers(1, 4), "minItems": counts,
            "maxItems": counts, "uniqueItems": st.booleans(), "items": inner, "prefixItems": some, "contains": inner,
            "properties": named, "required": st.lists(NAMES, max_size=2, unique=True), "additionalProperties": inner,
            "patternProperties": st.dictionaries(PATTERNS, inner, max_size=2), "propertyNames": inner, "minProperties": counts,
            "maxProperties": counts, "enum": st.lists(VALUES, min_size=1, max_size=3), "const": VALUES, "anyOf": some,
            "oneOf": some, "allOf": some, "not": inner, "if": inner, "then": inner, "dependentRequired": st.just({"a": ["b"]}),
            "$ref": st.sampled_from(["#", "#/properties/a", "#/items", "#/nowhere"]),
        }  # fmt: skip
        pairs = [values.map(lambda value, keyword=keyword: (keyword, value)) for keyword, values in keywords.items()]
        return st.lists(st.one_of(pairs), min_size=1, max_size=4).map(dict)

    return st.recursive(st.booleans() | st.just({}), nest, max_leaves=4)
