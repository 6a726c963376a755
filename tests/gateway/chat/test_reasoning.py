"""Thoughts are kept apart from the answer, whatever the pieces; guides hold for the answer only."""

from __future__ import annotations

import json
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.common.sampling import Guide, GuideKind
from kvrelay.gateway.chat.dialect import (
    REASONING_FAMILIES,
    ReasoningFamily,
    after_reasoning,
    read_thoughts,
    reasoning_for,
)
from kvrelay.gateway.chat.tools.call_grammar import tool_guide
from kvrelay.gateway.chat.tools.formats.families import FAMILIES
from kvrelay.gateway.chat.tools.functions import ToolChoice, ToolMode
from kvrelay.gateway.chat.tools.parser import NO_CALLS, CallParser, Syntax

from .tools.cases import CUTS, Answer, names_choice, numbered_ids, pieces_of, read
from .tools.grammars import Grammars

QWEN = REASONING_FAMILIES["qwen3"]
every_family = pytest.mark.parametrize("family", REASONING_FAMILIES.values(), ids=list(REASONING_FAMILIES))
SCHEMA = Guide(
    kind=GuideKind.JSON_SCHEMA, text='{"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}'
)


FRAGMENTS = [
    "<think>",
    "</think>",
    "[THINK]",
    "[/THINK]",
    "<seed:think>",
    "<",
    "a",
    " ",
    "\n",
]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars()


def parser(
    family: ReasoningFamily, *, starts_inside: bool = False, syntax: Syntax = NO_CALLS, choice: ToolChoice | None = None
) -> CallParser:
    thoughts = partial(read_thoughts, family=family, starts_inside=starts_inside)
    return CallParser(syntax, choice or ToolChoice(), numbered_ids(), thoughts)


def parsed(family: ReasoningFamily, text: str, *, starts_inside: bool = False) -> Answer:
    return read(parser(family, starts_inside=starts_inside), text)


@every_family
def test_thoughts_come_apart(family: ReasoningFamily) -> None:
    expected = Answer(content="The answer: <b>.", reasoning="First <this>,\n\nthen that.")
    inner = f"First <this>,\n\nthen that.\n{family.end}\n\nThe answer: <b>."
    assert parsed(family, f"{family.begin}\n{inner}") == expected
    assert parsed(family, inner, starts_inside=True) == expected
    assert parsed(family, f"\n{family.begin}{inner}", starts_inside=True) == expected, "said twice is said once"


@every_family
def test_an_answer_without_thoughts_is_all_content(family: ReasoningFamily) -> None:
    for text in ("", " \n", " plain", f"a tag {family.begin} in {family.end} the midst", family.begin[:-1]):
        assert parsed(family, text) == Answer(content=text)


def test_thoughts_that_do_not_end_stay_thoughts() -> None:
    assert parsed(QWEN, "<think>\nhm, </thi") == Answer(reasoning="hm, </thi")
    assert parsed(QWEN, "hm", starts_inside=True) == Answer(reasoning="hm")
    assert parsed(QWEN, "<think>\n\n</think>\n\nyes") == Answer(content="yes")


def test_thoughts_and_content_stream() -> None:
    streamed = parser(QWEN)
    assert not streamed.push("<thi")
    assert streamed.push("nk>\nso").reasoning == "so"
    assert streamed.push(" be it").reasoning == " be it"
    assert not streamed.push("\n</think")
    assert not streamed.push(">\n")
    assert streamed.push("\nYes").content == "Yes"
    assert streamed.push(". ").content == ". "


def test_calls_come_after_thoughts() -> None:
    hermes = FAMILIES["hermes"]
    text = f"<think>call f? <tool_call></think>\n\nWell.{hermes.spelling.write([('f', '{}')])}"
    assert read(parser(QWEN, syntax=hermes.syntax, choice=names_choice("f")), text) == Answer(
        content="Well.", reasoning="call f? <tool_call>", calls=[("id0", "f", "{}")]
    )


@every_family
@given(parts=st.lists(st.sampled_from(FRAGMENTS), max_size=12), cuts=CUTS, starts_inside=st.booleans())
def test_a_text_has_one_outcome_however_it_is_cut(
    family: ReasoningFamily, parts: list[str], cuts: list[int], starts_inside: bool
) -> None:
    text = "".join(parts)
    outcomes = [
        read(parser(family, starts_inside=starts_inside), pieces) for pieces in ([text], pieces_of(text, cuts), text)
    ]
    assert outcomes[0] == outcomes[1] == outcomes[2]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if '</think>' in content %}{{ content.split('</think>')[-1] }}", "qwen3"),
        ("{{ '<think>\\n\\n</think>\\n\\n' }}", "qwen3"),
        ("{{'<\uff5cAssistant\uff5c><think>\\n'}}", "deepseek_r1"),
        ("[THINK]…[/THINK]", "mistral"),
        ("<seed:think>", "seed_oss"),
        ("{{ messages[0].content }}", None),
        ("<\uff5cAssistant\uff5c>", None),
    ],
)
def test_templates_give_families_away(template: str, name: str | None) -> None:
    family = reasoning_for(template)
    assert family == (None if name is None else REASONING_FAMILIES[name])


def test_whether_a_prompt_ends_within_thoughts() -> None:
    assert QWEN.starts_inside("<|im_start|>assistant\n<think>\n")
    assert not QWEN.starts_inside("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not QWEN.starts_inside("what does <think> mean?<|im_start|>assistant\n")


@every_family
@pytest.mark.parametrize("starts_inside", [True, False])
def test_a_guide_holds_after_the_thoughts(grammars: Grammars, family: ReasoningFamily, starts_inside: bool) -> None:
    guide = after_reasoning(SCHEMA, family, starts_inside=starts_inside)
    begin = "" if starts_inside else family.begin
    assert grammars.allows(guide, f'{begin}anything {{ at <all{family.end}\n\n{{"x": true}}')
    assert not grammars.allows(guide, f"{begin}anything{family.end}\n\nno JSON")
    assert grammars.allows(guide, '{"x": true}') is not starts_inside, "a model may choose not to think"
    for seed in range(5):
        text = grammars.answer(guide, seed, start=f"{begin}hm{family.end}")
        answer = parsed(family, text, starts_inside=starts_inside)
        assert answer.reasoning == "hm"
        assert isinstance(json.loads(answer.content)["x"], bool)


def test_required_calls_come_after_the_thoughts(grammars: Grammars) -> None:
    hermes, choice = FAMILIES["hermes"], names_choice("f", mode=ToolMode.REQUIRED)
    required = tool_guide(hermes, choice)
    assert required is not None
    guide = after_reasoning(required, QWEN, starts_inside=True)
    for seed in range(5):
        text = grammars.answer(guide, seed, start="hm</think>")
        answer = read(parser(QWEN, starts_inside=True, syntax=hermes.syntax, choice=choice), [text])
        assert answer.calls
        assert answer.content == ""
