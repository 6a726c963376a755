"""``tools`` and ``tool_choice``: their meaning, and the field that is named when they are invalid."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.gateway.chat.tools.functions import Function, ToolChoice, ToolMode, parse_tool_choice, parse_tools
from kvrelay.gateway.errors import InvalidRequestError

F, G = Function(name="f", param="tools[0].function"), Function(name="g", param="tools[1].function")


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return {"properties": {"a": schema}}


def test_tools_of_chat_completions_and_of_responses() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}}
    nested = parse_tools([tool(description="does", parameters=parameters, strict=True, extra=1)])
    flat = parse_tools(
        [{"type": "function", "name": "f", "description": "does", "parameters": parameters, "strict": True}]
    )
    assert nested == (
        Function(name="f", description="does", parameters=parameters, strict=True, param="tools[0].function"),
    )
    assert flat[0].as_tool() == nested[0].as_tool()
    assert flat[0].as_tool() == {
        "type": "function",
        "function": {"name": "f", "description": "does", "parameters": parameters},
    }


def test_no_tools() -> None:
    assert parse_tools(None) == parse_tools([]) == ()
    assert (
        parse_tool_choice(None, ()) == parse_tool_choice("auto", ()) == parse_tool_choice("none", (F,)) == ToolChoice()
    )
    assert ToolChoice().max_calls == 0


@pytest.mark.parametrize("parameters", [None, {}])
def test_a_function_without_parameters_takes_an_empty_object(parameters: object) -> None:
    (function,) = parse_tools([tool(parameters=parameters)])
    assert function.parameters is None
    assert function.as_tool()["function"]["parameters"] == {"type": "object", "properties": {}}


@pytest.mark.parametrize("key", ["parameters", "input_schema"])
def test_what_a_typed_client_leaves_out_is_null(key: str) -> None:
    (function,) = parse_tools([{"name": "f", key: {"type": "object", "properties": None, "required": None}}])
    assert function.parameters == {"type": "object"}
    properties = {"a": {"type": "string"}}
    (function,) = parse_tools([{"name": "f", key: {"properties": properties, "required": None}}])
    assert function.parameters == {"properties": properties}


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        (["f"], "tools[0].type"),
        ([{"type": "web_search"}], "tools[0].type"),
        ([{"type": "function", "function": "f"}], "tools[0].function"),
        ([{"type": "function"}], "tools[0].name"),
        ([tool(name="")], "tools[0].function.name"),
        ([tool(name="a b")], "tools[0].function.name"),
        ([tool(name="f\n")], "tools[0].function.name"),
        ([tool(name="ä")], "tools[0].function.name"),
        ([tool(name="a" * 65)], "tools[0].function.name"),
        ([tool(name=3)], "tools[0].function.name"),
        ([tool(), tool()], "tools[1].function.name"),
        ([tool(description=3)], "tools[0].function.description"),
        ([tool(strict="yes")], "tools[0].function.strict"),
        ([tool(parameters=[])], "tools[0].function.parameters"),
        ([tool(parameters={"type": "string"})], "tools[0].function.parameters.type"),
        ([tool(parameters={"properties": []})], "tools[0].function.parameters.properties"),
        ([tool(parameters={"properties": {"a": 3}})], "tools[0].function.parameters.properties"),
        ([tool(parameters={"required": "a"})], "tools[0].function.parameters.required"),
        ([tool(parameters=deep(5000))], "tools[0].function.parameters"),
        ([tool(name=f"f{index}") for index in range(129)], "tools"),
    ],
)
def test_a_wrong_tool_is_named(tools: list[Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_tools(tools)
    assert caught.value.param == param
    assert param in str(caught.value)


def test_what_is_allowed_at_most() -> None:
    assert len(parse_tools([tool(name=f"f{index}") for index in range(128)])) == 128
    assert parse_tools([tool(name="a" * 64, parameters=deep(40))])


def test_choices() -> None:
    both = (F, G)
    assert parse_tool_choice(None, both) == ToolChoice(mode=ToolMode.AUTO, functions=both, shown=both)
    required = parse_tool_choice("required", both, allows_parallel=False)
    assert (required.mode, required.functions, required.max_calls) == (ToolMode.REQUIRED, both, 1)
    assert parse_tool_choice("required", both).max_calls is None


@pytest.mark.parametrize("choice", [{"type": "function", "function": {"name": "g"}}, {"type": "function", "name": "g"}])
def test_a_named_function_is_the_only_one_and_all_are_shown(choice: dict[str, Any]) -> None:
    named = parse_tool_choice(choice, (F, G))
    assert named == ToolChoice(mode=ToolMode.REQUIRED, functions=(G,), shown=(F, G), is_named=True)
    assert named.max_calls == 1


def test_allowed_tools_may_be_called_and_all_are_shown() -> None:
    tools = [{"type": "function", "function": {"name": "g"}}]
    for choice in (
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools}},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]},
    ):
        allowed = parse_tool_choice(choice, (F, G))
        assert allowed == ToolChoice(mode=ToolMode.REQUIRED, functions=(G,), shown=(F, G))


@pytest.mark.parametrize(
    ("choice", "functions", "param"),
    [
        ("any", (F,), "tool_choice"),
        (3, (F,), "tool_choice"),
        (["auto"], (F,), "tool_choice"),
        ({}, (F,), "tool_choice"),
        ({"type": "function"}, (F,), "tool_choice"),
        ({"type": "function", "function": {"name": "g"}}, (F,), "tool_choice"),
        ({"type": "function", "function": "f"}, (F,), "tool_choice"),
        ({"type": "allowed_tools", "allowed_tools": {}}, (F,), "tool_choice.tools"),
        ({"type": "allowed_tools", "tools": [{"name": "g"}]}, (F,), "tool_choice"),
        ({"type": "allowed_tools", "tools": [{"name": "f"}], "mode": []}, (F,), "tool_choice"),
        ("required", (), "tool_choice"),
    ],
)
def test_a_wrong_choice_is_named(choice: Any, functions: tuple[Function, ...], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_tool_choice(choice, functions)
    assert caught.value.param == param
