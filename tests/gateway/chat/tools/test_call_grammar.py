"""A guided model writes only calls that parse, of declared functions, with arguments that fit their schemas."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import msgspec
import pytest

from kvrelay.common.sampling import Guide, GuideKind
from kvrelay.engine.guides.errors import UnsupportedGuideError
from kvrelay.gateway.chat import structural_tag
from kvrelay.gateway.chat.structural_tag import format_of
from kvrelay.gateway.chat.tools.call_grammar import ANY_OBJECT, NO_ARGUMENTS, arguments_schema, loosened, tool_guide
from kvrelay.gateway.chat.tools.formats.families import FAMILIES, ToolFamily
from kvrelay.gateway.chat.tools.functions import Function, ToolChoice, ToolMode, parse_tool_choice, parse_tools
from kvrelay.gateway.errors import UnusableGuideError

from .cases import Answer, parser_of, read
from .grammars import Grammars

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["c", "f"]},
        "at": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "l": {"type": "array", "items": {"$ref": "#/$defs/flag"}}},
            "required": ["x"],
        },
    },
    "required": ["city", "unit"],
    "$defs": {"flag": {"type": "boolean"}},
}
OPTIONAL = {"type": "object", "properties": {"a": {"type": ["string", "null"]}, "b": {"type": "boolean"}}}
FUNCTIONS = parse_tools(
    [
        {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
        {"type": "function", "function": {"name": "now"}},
        {"type": "function", "function": {"name": "optional-all", "parameters": OPTIONAL}},
    ]
)
NAMED = {"type": "function", "function": {"name": "get_weather"}}
NUM_ANSWERS = 4  # random answers of each case
WITH_MARKERS = [family for family in FAMILIES.values() if family.whole_answer is None]  # the others are in test_harmony
every_family = pytest.mark.parametrize("family", WITH_MARKERS, ids=lambda family: family.name)
# GLM's markers within arguments are left out: the workers spell them, and they are ordinary tokens of GLM's models.
SPECIAL = sorted({token for family in FAMILIES.values() for token in family.kept_tokens if "arg_" not in token})


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars()


@pytest.fixture(scope="module", params=[(), SPECIAL], ids=["markers are text", "markers are special tokens"])
def models(request: pytest.FixtureRequest) -> Grammars:
    return Grammars(request.param)


def check(answer: Answer, functions: tuple[Function, ...]) -> None:
    """Check that every call is valid."""
    known = {function.name: function for function in functions}
    for name, arguments in answer.parsed_calls:
        jsonschema.validate(arguments, known[name].parameters or NO_ARGUMENTS)


def guide_of(family: ToolFamily, choice: ToolChoice, model: Grammars | None = None) -> Guide:
    """The family's guide, for a model with or without the family's special tokens."""
    guide = tool_guide(family, choice)
    assert guide is not None
    assert guide.kind is GuideKind.STRUCTURAL_TAG
    if model is None or not model.special_ids:
        return guide
    return structural_tag.guide_of(format_of(guide), family.kept_tokens)


@every_family
@pytest.mark.parametrize("how", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("allows_parallel", [True, False])
def test_required_calls_are_valid_and_nothing_else(
    models: Grammars, family: ToolFamily, how: Any, allows_parallel: bool
) -> None:
    choice = parse_tool_choice(how, FUNCTIONS, allows_parallel=allows_parallel)
    guide = guide_of(family, choice, models)
    for seed in range(NUM_ANSWERS):
        text = models.answer(guide, seed)
        answer = read(parser_of(family, choice), [text])
        assert answer.content == "", text
        assert answer.calls, text
        assert choice.max_calls is None or len(answer.calls) == 1
        check(answer, choice.functions)


@every_family
def test_several_calls_come_if_they_may(models: Grammars, family: ToolFamily) -> None:
    calls = [
        ("now", family.spelling.write_arguments("{}")),
        ("optional-all", family.spelling.write_arguments('{"b": true}')),
    ]
    text = family.spelling.write(calls).replace("True", "true")
    assert models.allows(guide_of(family, parse_tool_choice("required", FUNCTIONS), models), text)
    once = parse_tool_choice("required", FUNCTIONS, allows_parallel=False)
    assert not models.allows(guide_of(family, once, models), text)


@every_family
def test_what_begins_a_call_goes_on_as_one(models: Grammars, family: ToolFamily) -> None:
    choice = parse_tool_choice("auto", FUNCTIONS)
    trigger = family.spelling.trigger
    if trigger is None:
        assert tool_guide(family, choice) is None, "without a marker, text may look like a call"
        return
    guide = guide_of(family, choice, models)
    assert models.allows(guide, "Just text. { [ <")
    for seed in range(NUM_ANSWERS):
        answer = read(parser_of(family, choice), [models.answer(guide, seed, start=f"Well.\n{trigger}")])
        assert answer.content.startswith("Well.")
        assert answer.calls
        check(answer, FUNCTIONS)
    once = parse_tool_choice("auto", FUNCTIONS, allows_parallel=False)
    text = models.answer(guide_of(family, once, models), 1, start=trigger)
    assert len(read(parser_of(family, once), [text]).calls) == 1
    assert not models.allows(guide_of(family, once, models), f"{text} more")


@pytest.mark.parametrize("name", ["llama3_json", "pythonic"])
def test_strict_functions_guide_answers_that_begin_as_calls(grammars: Grammars, name: str) -> None:
    family = FAMILIES[name]
    strict = parse_tools([{"type": "function", "function": {"name": "f", "parameters": OPTIONAL, "strict": True}}])
    choice = parse_tool_choice("auto", strict)
    guide = guide_of(family, choice)
    first = (family.spelling.begin or family.spelling.before("f"))[0]
    assert grammars.allows(guide, "")
    assert grammars.allows(guide, f"Text, and a {first} later.")
    assert not grammars.allows(guide, f"{first} no call")
    for seed in range(NUM_ANSWERS):
        answer = read(parser_of(family, choice), [grammars.answer(guide, seed, start=first)])
        assert answer.calls
        assert not answer.content
        check(answer, strict)


def test_text_beside_tools_follows_the_response_format(grammars: Grammars) -> None:
    family, choice = FAMILIES["hermes"], parse_tool_choice("auto", FUNCTIONS)
    content = Guide(
        kind=GuideKind.JSON_SCHEMA, text='{"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"]}'
    )
    guide = tool_guide(family, choice, content)
    assert guide is not None
    assert grammars.allows(guide, '{"x": 1}')
    assert grammars.allows(guide, family.spelling.write([("now", "{}")]))
    assert not grammars.allows(guide, "text")
    assert tool_guide(family, ToolChoice(), content) is content
    assert tool_guide(family, ToolChoice()) is None


EXOTIC: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"enum": []},
        "b": {"type": "array", "minItems": 3, "maxItems": 1},
        "c": {"type": "string", "pattern": "(?<=x)["},
    },
    "required": ["b"],
}


@pytest.mark.parametrize("name", ["hermes", "mistral", "qwen3_coder", "lfm2"])
def test_a_schema_that_does_not_compile_fails_no_request_that_did_not_ask_for_it(grammars: Grammars, name: str) -> None:
    family = FAMILIES[name]
    (function,) = parse_tools([{"type": "function", "function": {"name": "f", "parameters": EXOTIC}}])
    choice = parse_tool_choice("auto", (function,))
    answer = grammars.answer(guide_of(family, choice), 0, start=family.spelling.trigger or "")
    ((_, arguments),) = read(parser_of(family, choice), [answer]).parsed_calls[:1]
    assert "b" in arguments, "what of the schema can be followed is"
    strict = Function(name="f", parameters=EXOTIC, strict=True)
    with pytest.raises(UnsupportedGuideError):
        grammars.answer(guide_of(family, ToolChoice(mode=ToolMode.AUTO, functions=(strict,))), 0)


NUMBER = {"type": "number"}
TOO_LARGE: dict[str, dict[str, Any]] = {
    "each optional argument may be the first": {"properties": {f"a{index}": NUMBER for index in range(3000)}},
    "definitions are written with each argument": {
        "properties": {"a0": {"$ref": "#/$defs/d"}, "a1": {"$ref": "#/$defs/d"}},
        "required": ["a1"],
        "$defs": {"d": {"enum": ["x" * 40_000]}},
    },
}


@pytest.mark.parametrize("schema", TOO_LARGE.values(), ids=TOO_LARGE.keys())
def test_a_schema_that_is_too_large_in_pythons_notation_allows_any_arguments(
    grammars: Grammars, schema: dict[str, Any]
) -> None:
    """Unless the request asked for arguments that follow it. The guide that would be refused is not made."""
    family = FAMILIES["lfm2"]
    function = Function(name="f", parameters=schema)
    guide = guide_of(family, ToolChoice(mode=ToolMode.AUTO, functions=(function,)))
    assert len(guide.text) < 2**12
    assert grammars.allows(guide, family.spelling.write([("f", "a1=1, b=true")]))
    strict = msgspec.structs.replace(function, strict=True)
    for choice in (
        ToolChoice(mode=ToolMode.AUTO, functions=(strict,)),
        ToolChoice(mode=ToolMode.REQUIRED, functions=(function,)),
    ):
        with pytest.raises(UnusableGuideError, match=r"tools cannot be followed: a function.s .* bytes of guide"):
            tool_guide(family, choice)


@pytest.mark.parametrize(
    ("parameters", "strict", "mode", "expected"),
    [
        (None, None, ToolMode.AUTO, NO_ARGUMENTS),
        (None, False, ToolMode.REQUIRED, NO_ARGUMENTS),
        (WEATHER, False, ToolMode.REQUIRED, ANY_OBJECT),
        ({"type": "object"}, True, ToolMode.AUTO, ANY_OBJECT),
        ({"description": "anything"}, None, ToolMode.REQUIRED, {"type": "object", "description": "anything"}),
        (EXOTIC, True, ToolMode.AUTO, EXOTIC),
        (EXOTIC, None, ToolMode.REQUIRED, EXOTIC),
    ],
)
def test_which_schema_arguments_follow(
    parameters: dict[str, Any] | None, strict: bool | None, mode: ToolMode, expected: dict[str, Any]
) -> None:
    assert arguments_schema(Function(name="f", parameters=parameters, strict=strict), mode) == expected


def test_the_guide_is_json_of_bounded_size() -> None:
    guide = guide_of(FAMILIES["hermes"], parse_tool_choice("required", FUNCTIONS))
    assert json.loads(guide.text)["type"] == "structural_tag"
    assert len(guide.text) < 4 * len(json.dumps([function.as_tool() for function in FUNCTIONS]))


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


def test_nonsense_inside_of_a_schema_is_dropped() -> None:
    inner = {"type": [{}], "properties": {"b": {}}, "required": [{}, ["b"], "b"]}
    loose = {"properties": {"b": {}}, "required": ["b"], "additionalProperties": False}
    assert loosened({"properties": {"a": inner}})["properties"] == {"a": loose}
