"""gpt-oss's answers: the parser of messages in channels, and guides of whole answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrelay.common.sampling import Guide, GuideKind
from kvrelay.gateway.chat.dialect import Dialect
from kvrelay.gateway.chat.tools.formats.families import FAMILIES
from kvrelay.gateway.chat.tools.formats.harmony import TOKENS
from kvrelay.gateway.chat.tools.functions import ToolChoice, parse_tool_choice, parse_tools

from .cases import Answer, names_choice, numbered_ids, parser_of, read
from .grammars import Grammars

TEMPLATE = (
    "{% if tools %}{% endif %}{#- We assume max 1 tool call per message, and so we infer the tool call name #}"
    "{{ message.thinking }}<|start|>assistant<|channel|>analysis<|message|>{{ message.tool_calls }} to=functions."
)
THOUGHT = "<|channel|>analysis<|message|>I should call f.<|end|>"
CALL = '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
A1 = ("id0", "f", '{"a": 1}')
GPT_OSS = FAMILIES["gpt_oss"]
# On workers the end tokens have no text.
NAMES = [name for name in TOKENS if name not in ("<|call|>", "<|return|>")]


def dialect() -> Dialect:
    return Dialect.of(TEMPLATE)


def parsed(text: str, choice: ToolChoice | None = None) -> Answer:
    """The parsed answer. Checks that parsing it character by character gives the same."""
    choice = names_choice("f", "g") if choice is None else choice
    whole = read(dialect().parser("", choice, numbered_ids()), [text])
    assert read(dialect().parser("", choice, numbered_ids()), text) == whole
    return whole


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{THOUGHT}{CALL}", Answer(reasoning="I should call f.", calls=[A1])),
        (f"{THOUGHT}{CALL.removesuffix('<|call|>')}", Answer(reasoning="I should call f.", calls=[A1])),
        (
            f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>It is <b>.<|return|>",
            Answer(content="It is <b>.", reasoning="I should call f."),
        ),
        ("<|channel|>final <|constrain|>json<|message|> {}", Answer(content=" {}")),
        (" to=functions.f<|channel|>commentary json<|message|>{\"a\": 1}<|call|>", Answer(calls=[A1])),
        ("<|channel|>commentary to=f json<|message|>{\"a\": 1}", Answer(calls=[A1])),
        ("<|channel|>analysis to=functions.f code<|message|>{\"a\": 1}", Answer(calls=[A1])),
        (
            "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|> Two.<|start|>assistant"
            "<|channel|>final<|message|>Three.",
            Answer(content="Three.", reasoning="One. Two."),
        ),
        ("<|channel|>final<|message|>", Answer()),
        ("<|channel|>analysis<|message|>hm, <|en", Answer(reasoning="hm, <|en")),
    ],
)  # fmt: skip
def test_messages_come_apart(text: str, expected: Answer) -> None:
    assert parsed(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain text",
        "to whom it may concern",
        "to=",
        "The end.",
        "<|channel|>",
        "<|channel|>other<|message|>text",
        "<|channel|>analysis analysis",
        "<|channel|>final a b c d e f g h i j<|message|>text",
        "<|start|>user<|message|>text",
        "<|message|>text<|end|>",
        '<|channel|>commentary to=functions.unknown json<|message|>{"a": 1}<|call|>',
        '<|channel|>commentary to=browser.search code<|message|>{"query": "x"}<|call|>',
        "<|channel|>commentary to=functions.f json<|message|>no object",
    ],
)
def test_what_is_no_message_is_content(text: str) -> None:
    assert parsed(text) == Answer(content=text)


def test_several_calls_where_several_may_be() -> None:
    text = (
        f"<|channel|>commentary<|message|>Let me see.<|end|>{CALL}"
        "<|start|>assistant to=functions.g<|channel|>commentary<|message|>{}<|call|>"
    )
    assert read(parser_of(GPT_OSS, names_choice("f", "g")), text) == Answer(
        "Let me see.", calls=[A1, ("id1", "g", "{}")]
    )


def test_without_tools_channels_are_read_all_the_same() -> None:
    assert not dialect().is_plain(ToolChoice())
    answer = parsed(f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>Hi.", ToolChoice())
    assert answer == Answer(content="Hi.", reasoning="I should call f.")
    assert dialect().guide("", ToolChoice()) is None


def test_all_of_it_streams() -> None:
    parser = dialect().parser("", names_choice("f"), numbered_ids())
    assert not parser.push("<|channel|>ana")
    assert not parser.push("lysis<|message|>")
    assert parser.push("I shou").reasoning == "I shou"
    assert parser.push("ld.").reasoning == "ld."
    assert not parser.push("<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>")
    assert [call.arguments for call in parser.push('{"a').calls] == ['{"a']
    assert [call.arguments for call in parser.push('": 1}').calls] == ['": 1}']
    assert not parser.push("<|call|><|start|>assistant<|channel|>final<|message|>")
    assert parser.push("Yes").content == "Yes"


PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTIONS = parse_tools(
    [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("f", "g")]
)
SCHEMA = Guide(
    kind=GuideKind.JSON_SCHEMA, text='{"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"]}'
)


@pytest.fixture(scope="module", params=[[], NAMES], ids=["markers are text", "markers are special tokens"])
def model(request: pytest.FixtureRequest) -> Grammars:
    return Grammars(request.param)


def guide_of(choice: ToolChoice, content: Guide | None = None) -> Guide:
    guide = dialect().guide("<|start|>assistant", choice, content)
    assert guide is not None
    return guide


def test_a_call_that_is_required_comes_after_thoughts(model: Grammars) -> None:
    guide = guide_of(parse_tool_choice("required", FUNCTIONS))
    for start in (f"{THOUGHT}<|start|>assistant", "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant"):
        for seed in range(4):
            answer = parsed(model.answer(guide, seed, start=f"{start}<|channel|>commentary to=functions.g"))
            assert [(name, type(arguments["a"])) for name, arguments in answer.parsed_calls] == [("g", int)]
    assert model.allows(guide, CALL.removeprefix("<|start|>assistant").removesuffix("<|call|>"))
    assert model.allows(guide, ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}')
    assert not model.allows(guide, "<|channel|>final<|message|>No.")
    assert not model.allows(guide, ' to=functions.f<|channel|>commentary json<|message|>{"b": 1}')


def test_an_answer_or_a_call(model: Grammars) -> None:
    guide = guide_of(parse_tool_choice("auto", FUNCTIONS))
    assert model.allows(guide, f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>It is so.")
    assert model.allows(guide, f"{THOUGHT}{CALL.removesuffix('<|call|>')}")
    assert not model.allows(guide, "<|channel|>commentary to=functions.h json<|message|>{}")


def test_a_response_format_binds_the_final_message(model: Grammars) -> None:
    for choice in (ToolChoice(), parse_tool_choice("auto", FUNCTIONS)):
        guide = guide_of(choice, SCHEMA)
        for head in (
            "<|channel|>final<|message|>",
            f"{THOUGHT}<|start|>assistant<|channel|>final <|constrain|>json<|message|>",
        ):
            assert model.allows(guide, f'{head}{{"x":1}}')
            assert not model.allows(guide, f"{head}text")
        answer = parsed(model.answer(guide, 1, start="<|channel|>final"))
        assert json.loads(answer.content) == {"x": 1}


def test_thoughts_of_earlier_turns_go_where_the_template_has_them() -> None:
    messages = [{"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}]
    told, _ = dialect().render_arguments(messages, ToolChoice())
    assert told[0]["thinking"] == "Hm."
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    told, _ = dialect().render_arguments([{**messages[0], "tool_calls": [call]}], ToolChoice())
    assert "thinking" not in told[0], "the template takes one of the two beside a call"
