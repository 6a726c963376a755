"""Dialects: a model's tools and thoughts together."""

from __future__ import annotations

import json
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.common.sampling import Guide, GuideKind
from kvrelay.gateway.chat.dialect import (
    REASONING_FAMILIES,
    Dialect,
    ReasoningFamily,
    after_reasoning,
    read_chat,
    read_thoughts,
    reasoning_for,
)
from kvrelay.gateway.chat.template import ChatTemplate
from kvrelay.gateway.chat.tools.call_grammar import tool_guide
from kvrelay.gateway.chat.tools.calls import random_call_id
from kvrelay.gateway.chat.tools.formats.families import FAMILIES
from kvrelay.gateway.chat.tools.functions import ToolChoice, ToolMode
from kvrelay.gateway.chat.tools.parser import NO_CALLS, CallParser, Syntax
from kvrelay.gateway.errors import InvalidRequestError
from kvrelay.gateway.settings import REASONING_PARSERS, TOOL_PARSERS

from .tools.cases import CUTS, Answer, names_choice, numbered_ids, pieces_of, read
from .tools.grammars import Grammars

QWEN3 = "{% if tools %}…<tool_call>…{% endif %}{{ message.tool_calls }}<think>…</think>"
CHOICE, REQUIRED = names_choice("f"), names_choice("f", mode=ToolMode.REQUIRED)
JSON_OBJECT = Guide(kind=GuideKind.JSON_OBJECT)


def test_from_the_template_and_from_the_settings() -> None:
    dialect = Dialect.of(QWEN3)
    assert (dialect.family, dialect.reasoning) == (FAMILIES["hermes"], REASONING_FAMILIES["qwen3"])
    assert dialect.kept_tokens == ("<tool_call>", "</tool_call>", "<think>", "</think>")
    off = Dialect.of(QWEN3, "none", "none")
    assert (off.family, off.reasoning, off.kept_tokens) == (None, None, ())
    assert ("auto", "none", *sorted(FAMILIES)) == TOOL_PARSERS
    assert ("auto", "none", *sorted(REASONING_FAMILIES)) == REASONING_PARSERS
    for name, family in FAMILIES.items():
        assert Dialect.of(None, tool_parser=name).family is family
    for name, thoughts in REASONING_FAMILIES.items():
        assert Dialect.of(None, reasoning_parser=name).reasoning is thoughts


def test_an_answer_of_all_kinds() -> None:
    text = 'I should.</think>\n\nWait.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    answer = read(Dialect.of(QWEN3).parser("…<think>\n", CHOICE, numbered_ids()), text)
    assert answer == Answer(content="Wait.", reasoning="I should.", calls=[("id0", "f", '{"a": 1}')])


def test_without_tools_a_call_is_text() -> None:
    text = "<tool_call>{}</tool_call>"
    assert read(Dialect.of(QWEN3).parser("", ToolChoice()), text) == Answer(content=text)
    assert read(Dialect.of("").parser("", ToolChoice()), f" {text} ") == Answer(content=f" {text} ")


def test_guides() -> None:
    dialect, plain = Dialect.of(QWEN3), Dialect.of("")
    assert dialect.guide("", ToolChoice()) is None
    assert plain.guide("", ToolChoice(), JSON_OBJECT) is JSON_OBJECT
    ended = dialect.guide("<think>\n\n</think>\n\n", ToolChoice(), JSON_OBJECT)
    assert ended is JSON_OBJECT, "the template has ended the thoughts"
    wrapped = dialect.guide("<think>\n", ToolChoice(), JSON_OBJECT)
    required = dialect.guide("", REQUIRED)
    assert wrapped is not None
    assert required is not None
    parts = json.loads(wrapped.text)["format"]["elements"]
    assert (parts[0]["end"], parts[-1]["json_schema"]) == ("</think>", {"type": "object"})
    assert json.loads(required.text)["format"]["elements"][0]["type"] == "optional"


def test_a_model_whose_marks_are_special_tokens() -> None:
    model = Grammars(["[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"])
    guide = Dialect.of("[THINK]…[/THINK] tool_calls [TOOL_CALLS][ARGS]").guide("", CHOICE)
    assert guide is not None
    assert model.allows(guide, "[THINK]Should I? I should.[/THINK]\n[TOOL_CALLS]f[ARGS]{}")
    assert model.allows(guide, "An answer.")
    assert not model.allows(guide, "[TOOL_CALLS]no call")


@pytest.mark.parametrize("text", ["{", '"x"'])
def test_a_guide_that_is_none_is_named(text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Dialect.of(QWEN3).guide("", CHOICE, Guide(kind=GuideKind.STRUCTURAL_TAG, text=text))
    assert caught.value.param == "response_format"


def test_tools_that_are_switched_off_are_refused() -> None:
    dialect = Dialect.of(QWEN3, tool_parser="none")
    user = {"role": "user", "content": "hi"}
    assert dialect.render_arguments([user], ToolChoice()) == ([user], None)
    with pytest.raises(InvalidRequestError) as caught:
        dialect.render_arguments([user], CHOICE)
    assert caught.value.param == "tools"


def test_ids_are_random() -> None:
    ids = {random_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(len(call_id) == 29 and call_id.startswith("call_") and int(call_id[5:], 16) >= 0 for call_id in ids)


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


PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
WITH_TOOLS = (
    "{% for tool in tools %}{{ tool.function.name }}, {% endfor %}call by [TOOL_CALLS]\n"
    "{% for message in messages %}{{ message.role }}: {{ message.content or message.tool_calls }}\n{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "f"}}]
HI = {"role": "user", "content": "hi"}
CALLED = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}


def test_a_models_own_template_for_tools_shows_them() -> None:
    template = ChatTemplate(PLAIN, {}, ChatTemplate(WITH_TOOLS, {}))
    dialect = Dialect.of(PLAIN)
    chat = read_chat(template, dialect, [HI], tools=TOOLS)
    assert chat.prompt == "f, call by [TOOL_CALLS]\nuser: hi\n"
    answer = read(chat.parser(), ['[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]'])
    assert answer.parsed_calls == [("f", {"a": 1})]
    assert read_chat(template, dialect, [HI]).prompt == "user: hi\n"
    # Such templates fail without tools, so the other one tells earlier calls in words.
    assert '"name": "f"' in read_chat(template, dialect, [HI, CALLED]).prompt


@pytest.mark.parametrize("known", ["auto", "mistral"])
def test_a_template_for_tools_of_an_unknown_format_needs_the_setting(known: str) -> None:
    source = WITH_TOOLS.replace("[TOOL_CALLS]", "name")
    template = ChatTemplate(PLAIN, {}, ChatTemplate(source, {}))
    prompt = read_chat(template, Dialect.of(PLAIN, tool_parser=known), [HI], tools=TOOLS).prompt
    assert ("f, call by name" in prompt, "<tool_call>" in prompt) == (known == "mistral", known == "auto")


def test_a_template_for_tools_does_not_switch_them_on() -> None:
    template = ChatTemplate(PLAIN, {}, ChatTemplate(WITH_TOOLS, {}))
    with pytest.raises(InvalidRequestError, match="switched off"):
        read_chat(template, Dialect.of(PLAIN, tool_parser="none"), [HI], tools=TOOLS)
