"""A model's tools and thoughts together, as the API uses them."""

from __future__ import annotations

import json

import pytest

from kvrelay.common.sampling import Guide, GuideKind
from kvrelay.gateway.chat.dialect import REASONING_FAMILIES, Dialect
from kvrelay.gateway.chat.tools.calls import random_call_id
from kvrelay.gateway.chat.tools.formats.families import FAMILIES
from kvrelay.gateway.chat.tools.functions import ToolChoice, ToolMode
from kvrelay.gateway.errors import InvalidRequestError
from kvrelay.gateway.settings import REASONING_PARSERS, TOOL_PARSERS

from .tools.cases import Answer, names_choice, numbered_ids, read
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
