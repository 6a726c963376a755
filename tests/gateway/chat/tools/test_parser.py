"""The call parser returns calls as they were written, however the text is cut. All other text is content."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvrelay.gateway.chat.tools.formats.dsml import DSML
from kvrelay.gateway.chat.tools.formats.families import FAMILIES, ToolFamily
from kvrelay.gateway.chat.tools.functions import Function, ToolMode

from .cases import CALLS, CUTS, FRAGMENTS, Answer, choice_of, functions_of, names_choice, parser_of, pieces_of, read

PREFIXES = ("", "Let me see.", "a < b\n\n", "{ [ <tool", "naïve 🙂 ")
HERMES = FAMILIES["hermes"]
VALUE_ENDS = {  # a value in tags cannot contain these
    "qwen3_coder": "</parameter>",
    "glm47": "</arg_value>",
    **dict.fromkeys(["deepseek_v32", "deepseek_v4"], f"</{DSML}parameter>"),
}
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)


def written(family: ToolFamily, calls: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, str]]:
    """The calls as the family writes them."""
    return [
        (name, family.spelling.write_arguments(json.dumps(arguments, ensure_ascii=False))) for name, arguments in calls
    ]


@every_family
@given(calls=CALLS, cuts=CUTS, prefix=st.sampled_from(PREFIXES))
def test_calls_come_back_as_they_were_written(
    family: ToolFamily, calls: list[tuple[str, dict[str, Any]]], cuts: list[int], prefix: str
) -> None:
    calls = list({name: (name, arguments) for name, arguments in calls}.values())  # one schema for each name
    assume(VALUE_ENDS.get(family.name, "\0") not in json.dumps(calls))
    prefix = prefix if family.spelling.trigger else ""
    text = prefix + family.spelling.write(written(family, calls))
    answer = read(parser_of(family, choice_of(functions_of(calls))), pieces_of(text, cuts))
    assert answer.parsed_calls == calls
    assert [call_id for call_id, _, _ in answer.calls] == [f"id{index}" for index in range(len(calls))]
    assert answer.content == prefix.rstrip()


@every_family
@given(parts=st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3)), max_size=16), cuts=CUTS)
def test_a_text_has_one_outcome_however_it_is_cut(family: ToolFamily, parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    choice = names_choice("f", "g")
    whole = read(parser_of(family, choice), [text])
    assert read(parser_of(family, choice), pieces_of(text, cuts)) == whole
    assert read(parser_of(family, choice), text) == whole
    if not whole.calls:
        assert whole.content == text, "what is no call is content, all of it"


@every_family
@given(calls=CALLS, data=st.data())
def test_an_answer_that_is_cut_off_keeps_what_was_said(
    family: ToolFamily, calls: list[tuple[str, dict[str, Any]]], data: st.DataObject
) -> None:
    calls = list({name: (name, arguments) for name, arguments in calls}.values())
    text = family.spelling.write(written(family, calls))
    choice = choice_of(functions_of(calls))
    whole = read(parser_of(family, choice), [text])
    cut = read(parser_of(family, choice), [text[: data.draw(st.integers(0, len(text)))]])
    assert len(cut.calls) <= len(whole.calls)
    for (_, name, arguments), (_, whole_name, whole_arguments) in zip(cut.calls, whole.calls, strict=False):
        assert name == whole_name
        assert whole_arguments.startswith(arguments)


@every_family
def test_a_call_that_must_come_and_is_cut_off_is_not_shown_as_text(family: ToolFamily) -> None:
    text = family.spelling.write([("f", family.spelling.write_arguments('{"a": "b"}'))])
    choice = choice_of([Function(name="f")], ToolMode.REQUIRED)
    for end in range(len(text)):
        assert read(parser_of(family, choice), text[:end]).content == ""
    assert read(parser_of(family, choice), text).parsed_calls == [("f", {"a": "b"})]


@every_family
def test_one_call_at_most_if_the_choice_says_so(family: ToolFamily) -> None:
    text = family.spelling.write([("f", family.spelling.write_arguments("{}"))] * 2)
    assert len(read(parser_of(family, names_choice("f")), text).calls) == 2
    once = read(parser_of(family, names_choice("f", allows_parallel=False)), text)
    assert len(once.calls) == 1
    assert "f" in once.content, "the second one is not lost"


@every_family
def test_a_function_that_nobody_declared_is_no_call(family: ToolFamily) -> None:
    text = family.spelling.write([("unknown", family.spelling.write_arguments('{"a": 1}'))])
    assert read(parser_of(family, names_choice("f")), text) == Answer(content=text)


@every_family
def test_content_goes_out_at_once(family: ToolFamily) -> None:
    parser = parser_of(family, names_choice("f"))
    for word in ("Hello", " there", ", it", " is", " 3 >", " 2."):
        assert parser.push(word).content == word
    held = parser.push(" \n").content
    assert held + parser.push("x").content + parser.finish().content == " \nx"


def test_name_and_arguments_stream() -> None:
    parser = parser_of(HERMES, names_choice("f"))
    assert not parser.push('Well.\n<tool_call>\n{"name": "f", "arguments": ').calls
    first = parser.push('{"city').calls
    assert [(call.index, call.id, call.name, call.arguments) for call in first] == [(0, "id0", "f", '{"city')]
    second = parser.push('": "Par').calls
    assert [(call.index, call.id, call.name, call.arguments) for call in second] == [(0, None, None, '": "Par')]
    assert parser.push('is"}').calls[0].arguments == 'is"}'
    assert not parser.push("}\n</tool_call>")
    assert not parser.finish()


ODD_ENVELOPES = {
    '{"arguments": {"a": 1}, "name": "f"}': '{"a": 1}',
    '{"id": 7, "name": "f", "type": "function", "arguments": {}, "x": [1, {"y": null}]}': "{}",
    '{"name": "f"}': "{}",
    '{"name": "f", "arguments": null}': "{}",
    '{"name": "f", "arguments": "{\\"a\\": \\"\\u00e9\\"}"}': '{"a": "é"}',
    '{"n\\u0061me": "f", "parameters": { "a" : 1 }}': '{ "a" : 1 }',
    '{"name":"f","arguments":{"a":-0.5e+3,"b":[true,false,null]}}': '{"a":-0.5e+3,"b":[true,false,null]}',
}


@pytest.mark.parametrize(("envelope", "arguments"), ODD_ENVELOPES.items())
def test_an_envelope_may_look_odd(envelope: str, arguments: str) -> None:
    for pieces in ([f"<tool_call>{envelope}</tool_call>"], f"<tool_call>{envelope}"):
        answer = read(parser_of(HERMES, names_choice("f")), pieces)
        assert answer == Answer(calls=[("id0", "f", arguments)])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>\n{",
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "no object"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\\\ud800\\ud800\\"}"}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>{}</tool_call>",
        "the tag <tool_call> is what I would write",
        "ends with a part of one: <tool_ca",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    assert read(parser_of(HERMES, names_choice("f")), text) == Answer(content=text)


def test_arguments_that_break_off_keep_what_was_sent_and_the_rest_is_content() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call> then <tool_call>{"name": "f"}</tool_call>'
    answer = read(parser_of(HERMES, names_choice("f")), text)
    assert answer.calls == [("id0", "f", '{"a": '), ("id1", "f", "{}")]
    assert answer.content == "01}}</tool_call> then"


def test_what_follows_a_complete_envelope_is_content() -> None:
    answer = read(parser_of(HERMES, names_choice("f")), '<tool_call>{"name": "f", "arguments": {}}} oops</tool_call>')
    assert answer == Answer(content="} oops</tool_call>", calls=[("id0", "f", "{}")])


def test_depth_costs_no_recursion() -> None:
    depth = 50_000
    arguments = '{"a": ' + "[" * depth + "]" * depth + "}"
    answer = read(parser_of(HERMES, names_choice("f")), [f'<tool_call>{{"name": "f", "arguments": {arguments}}}'])
    assert answer.calls == [("id0", "f", arguments)]


def test_a_call_whose_end_is_missing_does_not_swallow_the_next() -> None:
    text = (
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}'
        '<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{"b": 2}<|tool_call_end|><|tool_calls_section_end|>'
    )
    answer = read(parser_of(FAMILIES["kimi_k2"], names_choice("f", "g")), [text])
    assert answer.parsed_calls == [("f", {"a": 1}), ("g", {"b": 2})]
