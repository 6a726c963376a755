"""Conversations with calls, in the shape that each template takes."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from kvrelay.gateway.chat.tools.messages import MessageStyle, template_messages
from kvrelay.gateway.errors import InvalidRequestError

CALL = {"id": "call_0123456789abcdef01234567", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
TURN: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "What "}, {"type": "text", "text": "now?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": CALL["id"], "content": "3"},
]


def test_arguments_become_an_object_null_becomes_empty_and_results_get_a_name() -> None:
    before = copy.deepcopy(TURN)
    assert template_messages(TURN, MessageStyle()) == [
        {"role": "user", "content": "What now?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": CALL["id"], "type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}],
        },
        {"role": "tool", "tool_call_id": CALL["id"], "content": "3", "name": "f"},
    ]
    assert before == TURN


def test_arguments_as_text_and_null_for_templates_that_ask() -> None:
    _, call, _ = template_messages(TURN, MessageStyle(has_text_arguments=True, takes_null=True))
    assert call["content"] is None
    assert call["tool_calls"][0]["function"]["arguments"] == '{"a": "é"}'
    (user,) = template_messages([{"role": "user", "content": None}], MessageStyle(takes_null=True))
    assert user["content"] == "", "null means something beside calls only"


def test_short_ids_are_nine_letters_and_still_belong_together() -> None:
    _, call, result = template_messages(TURN, MessageStyle(has_short_ids=True))
    short = call["tool_calls"][0]["id"]
    assert result["tool_call_id"] == short
    assert len(short) == 9
    assert short.isalnum()
    kept = [{"role": "tool", "tool_call_id": "abcDEF123", "content": ""}]
    assert template_messages(kept, MessageStyle(has_short_ids=True))[0]["tool_call_id"] == "abcDEF123"


def test_ids_that_say_who_is_called_count_through_the_conversation() -> None:
    style = MessageStyle.of("<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>")
    calls = [{**CALL, "id": name, "function": {"name": name, "arguments": "{}"}} for name in ("f", "g")]
    turns: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "g", "content": "2"},
        {"role": "tool", "tool_call_id": "f", "content": "1"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": CALL["id"], "content": "3"},
        {"role": "tool", "tool_call_id": "unknown", "content": "4"},
    ]
    first, of_g, of_f, second, result, unknown = template_messages(turns, style)
    assert [call["id"] for call in first["tool_calls"]] == ["functions.f:0", "functions.g:1"]
    assert (of_g["tool_call_id"], of_f["tool_call_id"]) == ("functions.g:1", "functions.f:0")
    assert second["tool_calls"][0]["id"] == result["tool_call_id"] == "functions.f:2"
    assert unknown["tool_call_id"] == "unknown"


@pytest.mark.parametrize(
    ("arguments", "expected"), [(None, {}), ("", {}), ({"a": 1}, {"a": 1}), (' {"a": 1}\n', {"a": 1})]
)
def test_arguments_that_clients_send(arguments: Any, expected: dict[str, Any]) -> None:
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    (told,) = template_messages([message], MessageStyle())
    assert told["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": expected}}]
    assert told["content"] == ""


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"tool_calls": "f"}, "messages[0].tool_calls"),
        ({"tool_calls": ["f"]}, "messages[0].tool_calls[0].function"),
        ({"tool_calls": [{"function": {"arguments": "{}"}}]}, "messages[0].tool_calls[0].function"),
        (
            {"tool_calls": [CALL, {"function": {"name": "f", "arguments": '{"a": '}}]},
            "messages[0].tool_calls[1].function.arguments",
        ),
        ({"tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}, "messages[0].tool_calls[0].function.arguments"),
        ({"tool_calls": [{"function": {"name": "f", "arguments": 3}}]}, "messages[0].tool_calls[0].function.arguments"),
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": '{"a": ' + "[" * 10**5 + "]" * 10**5 + "}"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"tool_call_id": 3}, "messages[0].tool_call_id"),
    ],
)  # fmt: skip
def test_a_malformed_call_is_named(message: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        template_messages([{"role": "assistant", **message}], MessageStyle())
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("template", "style"),
    [
        ("{{ message.content }}", MessageStyle()),
        ("{{ tool_call.arguments | tojson }}", MessageStyle()),
        ("{{ tool['function']['arguments'] + '<end>' }}", MessageStyle(has_text_arguments=True)),
        ("{%- if message['content'] is none -%}", MessageStyle(takes_null=True)),
        ("{% if message.content is not none %}", MessageStyle(takes_null=True)),
        ("{% if tool_call.id|length != 9 %}{{ raise_exception('…') }}", MessageStyle(has_short_ids=True)),
    ],
)
def test_styles_are_read_off_the_template(template: str, style: MessageStyle) -> None:
    assert MessageStyle.of(template) == style
