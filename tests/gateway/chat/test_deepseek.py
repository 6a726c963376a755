# ruff: noqa: RUF001
"""Chats of DeepSeek-V3.2 and V4, whose checkpoints have no chat template. Prompts are written by hand from the published format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvrelay.gateway.chat.dialect import Dialect, read_chat
from kvrelay.gateway.chat.template import ChatTemplate
from kvrelay.gateway.chat.tools.functions import parse_tool_choice, parse_tools

from .tools.cases import Answer, read
from .tools.grammars import Grammars

THINK = {"thinking": True}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
SHOWN = '{"name": "weather", "parameters": ' + json.dumps(PARAMETERS) + "}"
SYSTEM = {"role": "system", "content": "Be brief."}
SUM = {"role": "user", "content": "1+1?"}
TWO = {"role": "assistant", "content": "2", "reasoning_content": "easy"}
PARIS = {"role": "user", "content": "Paris?"}


def call(number: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """A call as clients send it."""
    return {"id": f"c{number}", "type": "function", "function": {"name": "weather", "arguments": json.dumps(arguments)}}


CALLS = {
    "role": "assistant",
    "reasoning_content": "look",
    "content": "Looking.",
    "tool_calls": [call(0, {"city": 'a "b"', "days": 2}), call(1, {})],
}
RESULTS = [{"role": "tool", "tool_call_id": f"c{n}", "content": text} for n, text in enumerate(["rain", "sun"])]
WRITTEN = (  # between the tags of the block
    '<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">a "b"</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    '<｜DSML｜invoke name="weather">\n\n</｜DSML｜invoke>\n'
)


def template_of(directory: Path, kind: str) -> ChatTemplate:
    """The template of a checkpoint that has none."""
    (directory / "config.json").write_text(json.dumps({"model_type": kind}))
    return ChatTemplate.load(directory, {})


def prompt_of(directory: Path, kind: str, messages: list[dict[str, Any]], *, tools: bool = False, **more: Any) -> str:
    template = template_of(directory, kind)
    dialect = Dialect.of(template.source)
    return read_chat(template, dialect, messages, tools=[TOOL] if tools else None, **more).prompt


BEGIN = "<｜begin▁of▁sentence｜>"
CASES: list[tuple[str, list[dict[str, Any]], dict[str, Any], str]] = [
    ("deepseek_v32", [SYSTEM, SUM], {}, "Be brief.<｜User｜>1+1?<｜Assistant｜></think>"),
    ("deepseek_v32", [SUM], {"add_generation_prompt": False}, "<｜User｜>1+1?"),
    ("deepseek_v32", [SUM], {"variables": {"enable_thinking": True}}, "<｜User｜>1+1?<｜Assistant｜><think>"),
    (
        "deepseek_v32", [SUM, TWO, PARIS], {"variables": THINK},
        "<｜User｜>1+1?<｜Assistant｜></think>2<｜end▁of▁sentence｜><｜User｜>Paris?<｜Assistant｜><think>",
    ),
    (
        "deepseek_v32", [SUM, {**TWO, "content": "It is"}], {"variables": THINK, "continues": True},
        "<｜User｜>1+1?<｜Assistant｜><think>easy</think>It is",
    ),
    (
        "deepseek_v32", [PARIS, CALLS, *RESULTS], {"variables": THINK},
        "<｜User｜>Paris?<｜Assistant｜><think>look</think>Looking.\n\n<｜DSML｜function_calls>\n" + WRITTEN
        + "</｜DSML｜function_calls><｜end▁of▁sentence｜>\n\n<function_results>\n<result>rain</result>\n<result>sun</result>\n"
        "</function_results>\n\n<think>",
    ),
    (
        "deepseek_v32", [PARIS, CALLS, *RESULTS, SUM], {"variables": THINK},
        "<｜User｜>Paris?<｜Assistant｜></think>Looking.\n\n<｜DSML｜function_calls>\n" + WRITTEN
        + "</｜DSML｜function_calls><｜end▁of▁sentence｜>\n\n<function_results>\n<result>rain</result>\n<result>sun</result>\n"
        "</function_results>\n\n</think><｜User｜>1+1?<｜Assistant｜><think>",
    ),
    ("deepseek_v4", [SYSTEM, SUM], {}, "Be brief.<｜User｜>1+1?<｜Assistant｜></think>"),
    ("deepseek_v4", [SUM, PARIS], {"variables": THINK}, "<｜User｜>1+1?\n\nParis?<｜Assistant｜><think>"),
    (
        "deepseek_v4", [SUM, TWO, PARIS], {"variables": THINK},
        "<｜User｜>1+1?<｜Assistant｜></think>2<｜end▁of▁sentence｜><｜User｜>Paris?<｜Assistant｜><think>",
    ),
    (
        "deepseek_v4", [PARIS, CALLS, *reversed(RESULTS), SUM], {},  # V4 sorts results by their calls
        "<｜User｜>Paris?<｜Assistant｜></think>Looking.\n\n<｜DSML｜tool_calls>\n" + WRITTEN
        + "</｜DSML｜tool_calls><｜end▁of▁sentence｜><｜User｜><tool_result>rain</tool_result>\n\n<tool_result>sun</tool_result>"
        "\n\n1+1?<｜Assistant｜></think>",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "messages", "more", "expected"), CASES)
def test_prompts_are_those_of_the_published_encoder(
    tmp_path: Path, kind: str, messages: list[dict[str, Any]], more: dict[str, Any], expected: str
) -> None:
    assert prompt_of(tmp_path, kind, messages, **more) == BEGIN + expected


def test_v32_shows_tools_behind_the_system_message(tmp_path: Path) -> None:
    prompt = prompt_of(tmp_path, "deepseek_v32", [SYSTEM, PARIS], tools=True)
    head = "Be brief.\n\n## Tools\n\nYou have access to a set of tools you can use to answer the user's question.\nYou can invoke"
    assert prompt.startswith(BEGIN + head)
    assert 'user:\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="$FUNCTION_NAME">\n' in prompt
    assert "</｜DSML｜function_calls>\n\nString and scalar" in prompt
    assert "example:\n\n<｜DSML｜function_calls>\n...\n</｜DSML｜function_calls>\n\n<function_results>\n...\n" in prompt
    tail = f"JSONSchema format:\n<functions>\n{SHOWN}\n</functions>\n<｜User｜>Paris?<｜Assistant｜></think>"
    assert prompt.endswith(tail)
    alone = prompt_of(tmp_path, "deepseek_v32", [PARIS], tools=True)
    assert alone == prompt.replace("Be brief.", "")


def test_v4_shows_tools_and_then_keeps_earlier_thoughts(tmp_path: Path) -> None:
    prompt = prompt_of(tmp_path, "deepseek_v4", [SYSTEM, SUM, TWO, PARIS], tools=True, variables=THINK)
    assert prompt.startswith(BEGIN + "Be brief.\n\n## Tools\n\nYou have access to a set of tools to help answer")
    assert 'following:\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="$TOOL_NAME">\n' in prompt
    assert prompt.endswith(
        f"### Available Tool Schemas\n\n{SHOWN}\n\nYou MUST strictly follow the above defined tool name and parameter schemas to "
        "invoke tool calls.\n<｜User｜>1+1?"
        "<｜Assistant｜><think>easy</think>2<｜end▁of▁sentence｜><｜User｜>Paris?<｜Assistant｜><think>"
    )


def test_v4_thinks_harder_if_it_should(tmp_path: Path) -> None:
    prompt = prompt_of(tmp_path, "deepseek_v4", [SUM], variables={**THINK, "reasoning_effort": "max"})
    assert prompt.startswith(
        f"{BEGIN}Reasoning Effort: Absolute maximum with no shortcuts permitted.\nYou MUST be very"
    )
    assert prompt.endswith("no assumption is left unchecked.\n\n<｜User｜>1+1?<｜Assistant｜><think>")
    assert "Effort" not in prompt_of(tmp_path, "deepseek_v4", [SUM], variables={**THINK, "reasoning_effort": "high"})


@pytest.mark.parametrize(("kind", "block"), [("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls")])
def test_thoughts_and_calls_of_an_answer_are_read(tmp_path: Path, kind: str, block: str) -> None:
    template = template_of(tmp_path, kind)
    chat = read_chat(template, Dialect.of(template.source), [PARIS], tools=[TOOL], variables=THINK)
    text = f"look</think>Looking.\n\n<｜DSML｜{block}>\n{WRITTEN}</｜DSML｜{block}>"
    expected = [("weather", {"city": 'a "b"', "days": 2}), ("weather", {})]
    for pieces in ([text], list(text)):
        answer = read(chat.parser(), pieces)
        assert (answer.reasoning, answer.content, answer.parsed_calls) == ("look", "Looking.", expected)
    assert read(chat.parser(), ["look</think>Rain."]) == Answer("Rain.", "look")


@pytest.mark.parametrize("special", [(), ("｜DSML｜",), ("｜DSML｜", "<think>", "</think>")])
@pytest.mark.parametrize("kind", ["deepseek_v32", "deepseek_v4"])
def test_a_call_that_must_come_is_guided_behind_the_thoughts(
    tmp_path: Path, kind: str, special: tuple[str, ...]
) -> None:
    template = template_of(tmp_path, kind)
    dialect = Dialect.of(template.source)
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    chat = read_chat(template, dialect, [PARIS], tools=[strict], tool_choice="required", variables=THINK)
    guide = dialect.guide(chat.prompt, parse_tool_choice("required", parse_tools([strict])))
    assert guide is not None
    models = Grammars(special)
    for seed in range(3):
        answer = read(chat.parser(), [models.answer(guide, seed, start="look</think>")])
        assert (answer.reasoning, answer.content) == ("look", "")
        assert answer.calls
        for name, arguments in answer.parsed_calls:
            assert name == "weather"
            assert isinstance(arguments.get("city", ""), str)
            assert isinstance(arguments.get("days", 0), int)


def test_a_checkpoint_keeps_its_own_template(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("own")
    assert template_of(tmp_path, "deepseek_v32").source == "own"
