"""Clients' grammars, and formats of structural tags other than those of tool calls. Refusals of both."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrelay.common.sampling import GuideKind
from kvrelay.engine.guides.compiler import GrammarCompiler
from kvrelay.engine.guides.guidance import GuideRefusal

from ..guided import compiled, has_end, refusal

NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
CALLS = [{"type": "tag", "begin": f"<f={name}>", "content": NUMBER, "end": ["</f>", "/>"]} for name in ("a", "b")]


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def guide(format_: Any) -> str:
    return json.dumps({"type": "structural_tag", "format": format_})


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= term ("+" term)*\nterm ::= [0-9] | "(" root ")"', ["1", "(1+2)+3"], ["", "1+", "(1"]),
        ('root ::= "\\u0041b\\u00e9\\\\u0041" [\\u0041-\\u0043]', ["Abé\\u0041B"], ["Abé\\u0041", "AbéAB"]),
        ('a-1 ::= "a"\nroot ::= (a-1 | "b"){2,3} # twice or thrice\n', ["ab", "bab"], ["a", "abab"]),
        ('start: "(" start ")" | NUMBER\nNUMBER: /[0-9]+/', ["((12))"], ["((12)", "()"]),  # Lark
    ],
)
def test_a_grammar_matches_what_it_says(
    guide_compiler: GrammarCompiler, vocabulary: list[bytes], grammar: str, good: list[str], bad: list[str]
) -> None:
    for text, is_good in [*((one, True) for one in good), *((one, False) for one in bad)]:
        state = compiled(guide_compiler, GuideKind.GRAMMAR, grammar)
        assert not isinstance(state, GuideRefusal), state.detail
        assert has_end(state, vocabulary, text) is is_good, text


def dsml(**values: tuple[str, str]) -> str:
    """Parameters as DeepSeek writes them, from (whether it is text, text)."""
    return "\n".join(
        f'<\uff5cDSML\uff5cparameter name="{name}" string="{is_text}">{text}</\uff5cDSML\uff5cparameter>'
        for name, (is_text, text) in values.items()
    )


@pytest.mark.parametrize(
    ("format_", "good", "bad"),
    [
        ({"type": "triggered_tags", "triggers": ["<f="], "tags": CALLS}, ["x", "x <f=a>1</f> y <f=b>2/>"], ["<f=c>", "<f=a>x"]),
        (
            {"type": "triggered_tags", "triggers": ["<f="], "tags": CALLS, "at_least_one": True, "stop_after_first": True},
            ["<f=a>1</f>"],
            ["x", "<f=a>1</f> y"],
        ),
        ({"type": "dispatch", "rules": [["<f>", NUMBER]], "loop": False}, ["", "ab", "a<f>12"], ["<f>x", "a<f>12 "]),
        ({"type": "tags_with_separator", "tags": CALLS, "separator": ", "}, ["", "<f=a>1</f>, <f=b>2/>"], ["<f=a>1</f>,"]),
        ({"type": "repeat", "min": 2, "max": 3, "content": const("ab")}, ["abab", "ababab"], ["ab", "abababab"]),
        ({"type": "sequence", "elements": [{"type": "plus", "content": const("a")}, NUMBER]}, ["aa1"], ["1", "a"]),
        ({"type": "tag", "begin": "<", "content": {"type": "any_text", "excludes": ["x"]}, "end": ">"}, ["<a>"], ["<x>", "<a>>"]),
        ({"type": "grammar", "grammar": 'root ::= "(" root ")" | [0-9]'}, ["((1))"], ["((1)"]),
        ({"type": "sequence", "elements": [const("{"), NUMBER, const("}")]}, ["{1}"], ["{}"]),
        (
            {"type": "json_schema", "style": "qwen_xml", "json_schema": {
                "properties": {"s": {"type": "string", "maxLength": 4}, "n": {"$ref": "#/$defs/n"}, "e": {"enum": ["x", 1]},
                               "m": {"anyOf": [{"type": "null"}, {"type": "boolean"}]}},
                "required": ["s"], "$defs": {"n": {"type": "integer"}}}},
            ["<parameter=s>\nab\n</parameter>\n<parameter=n>\n12\n</parameter>",
             "<parameter=s></parameter><parameter=e>x</parameter>",
             "<parameter=s>1</parameter><parameter=m>null</parameter>"],
            ["<parameter=n>1</parameter>", "<parameter=s>abcde</parameter>",
             "<parameter=s></parameter><parameter=e>2</parameter>"],
        ),
        (
            {"type": "json_schema", "style": "deepseek_xml", "json_schema": {
                "properties": {"s": {"type": "string"}, "n": {"type": ["string", "null"]}, "e": {"enum": ["x", 1]}, "a": {}}}},
            [dsml(s=("true", " 1 "), n=("false", "null")), dsml(n=("true", "null"), e=("true", "x")), dsml(e=("false", "1")),
             dsml(a=("false", "[1]")), dsml(a=("true", "[1]"))],
            [dsml(s=("false", "1")), dsml(n=("false", "1")), dsml(e=("false", "x")), dsml(e=("true", " x")),
             dsml(a=("false", "x"))],
        ),
        (
            {"type": "json_schema", "style": "deepseek_xml", "json_schema": {
                "properties": {"e": {"allOf": [{"$ref": "#/$defs/e"}], "default": "x"},
                               "n": {"oneOf": [{"type": "integer"}, {"type": "boolean"}]},
                               "o": {"type": ["string", "null"], "oneOf": [{"const": "a"}, {"type": "null"}]},
                               "s": {"type": "string", "anyOf": [{"maxLength": 1}, {"minLength": 3}]}},
                "$defs": {"e": {"type": "string", "enum": ["x", "y"]}}}},
            [dsml(e=("true", "x"), n=("false", "1")), dsml(n=("false", "true"), o=("true", "a")), dsml(o=("false", "null")),
             dsml(s=("true", "a")), dsml(s=("true", "abc"))],
            [dsml(e=("true", "z")), dsml(n=("true", "z")), dsml(o=("true", "b")), dsml(s=("true", "ab")), dsml(s=("false", "1"))],
        ),
    ],
)  # fmt: skip
def test_formats(
    guide_compiler: GrammarCompiler, vocabulary: list[bytes], format_: Any, good: list[str], bad: list[str]
) -> None:
    for text, is_good in [*((one, True) for one in good), *((one, False) for one in bad)]:
        state = compiled(guide_compiler, GuideKind.STRUCTURAL_TAG, guide(format_))
        assert not isinstance(state, GuideRefusal), state.detail
        assert has_end(state, vocabulary, text) is is_good, text


@pytest.mark.parametrize(
    ("format_", "reason"),
    [
        ({"type": "nothing"}, "'nothing', which is not known"),
        ({"value": "x"}, "malformed"),
        ({"type": "any_text", "max_tokens": 3}, "'max_tokens' of the format any_text cannot be kept"),
        ({"type": "token", "token": "<|im_end|>"}, "by their ids"),
        ({"type": "json_schema", "json_schema": {}, "style": "cohere_xml"}, "the style 'cohere_xml'"),
        ({"type": "json_schema", "json_schema": {"properties": {"a": {"type": "string", "pattern": "a"}}},
          "style": "qwen_xml"}, "'pattern'"),
        ({"type": "json_schema", "json_schema": {"properties": {"a": {"oneOf": [{"type": "string"}, {"const": "a"}]}}},
          "style": "qwen_xml"}, "'oneOf' has several schemas that may match the same string"),
        ({"type": "json_schema", "json_schema": {"properties": {"a": {"allOf": [{"minLength": 1}, {"minLength": 2}]}}},
          "style": "qwen_xml"}, "'minLength' stands in two schemas"),
        ({"type": "json_schema", "json_schema": {"not": {}}}, '["not"]'),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_named(guide_compiler: GrammarCompiler, format_: Any, reason: str) -> None:
    assert reason in refusal(guide_compiler, GuideKind.STRUCTURAL_TAG, guide(format_))
