"""Conversations with calls, in the shape that each chat template needs."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from kvrelay.gateway.chat.dialect import Dialect
from kvrelay.gateway.chat.template import ChatTemplate
from kvrelay.gateway.chat.tools.formats.families import FAMILIES, ToolFamily
from kvrelay.gateway.chat.tools.functions import Function, ToolChoice
from kvrelay.gateway.chat.tools.messages import MessageStyle, as_text, description, template_messages, with_tools
from kvrelay.gateway.errors import InvalidRequestError

from .cases import choice_of, parser_of, read

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
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": '{"a": ' + "1" * 5000 + "}"}}]},
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
        ("{% if message.role in ['system', 'developer'] %}", MessageStyle(has_developer=True)),
    ],
)
def test_styles_are_read_off_the_template(template: str, style: MessageStyle) -> None:
    assert MessageStyle.of(template) == style


FUNCTION = Function(
    name="f", description="Does it.", parameters={"type": "object", "properties": {"a": {"type": "integer"}}}
)
CHOICE = choice_of([FUNCTION])
USER = {"role": "user", "content": "What now?"}
TOLD_TURN: list[dict[str, Any]] = [
    USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "function": {"name": "f", "arguments": '{"a": 1}'}},
            {"id": "c2", "function": {"name": "f", "arguments": '{"a": 2}'}},
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "one"},
    {"role": "tool", "tool_call_id": "c2", "content": "two"},
]
PLAIN = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
KNOWING = """{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- for message in messages %}<{{ message.role }}>{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function.arguments | tojson }}</tool_call>{% endfor %}
{%- endfor %}"""


def test_a_template_that_knows_tools_gets_them() -> None:
    dialect = Dialect.of(KNOWING)
    assert dialect.family is not None
    assert dialect.family.name == "hermes"
    messages, tools = dialect.render_arguments(TOLD_TURN, CHOICE)
    assert tools == [FUNCTION.as_tool()]
    text = ChatTemplate(KNOWING, {}).render(messages, tools=tools)
    assert '<tools>{"type": "function", "function": {"name": "f", "description": "Does it."' in text
    assert '<tool_call>{"a": 1}</tool_call><tool_call>{"a": 2}</tool_call><tool>one<tool>two' in text


def test_a_template_that_knows_none_gets_words() -> None:
    dialect = Dialect.of(PLAIN)
    messages, tools = dialect.render_arguments(TOLD_TURN, CHOICE)
    assert tools is None
    text = ChatTemplate(PLAIN, {}).render(messages)
    assert text.startswith("<system>You can call functions.")
    assert '{"name": "f", "description": "Does it."' in text
    assert text.endswith(
        "<user>What now?<assistant><tool_call>\n"
        '{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n{"name": "f", "arguments": {"a": 2}}\n</tool_call>'
        "<user><tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
    )


def test_a_developer_is_the_system_to_a_template_without_that_role() -> None:
    developer = {"role": "developer", "content": "Be brief."}
    dialect = Dialect.of(PLAIN)
    messages, _ = dialect.render_arguments([developer, USER], CHOICE)
    assert [message["role"] for message in messages] == ["system", "user"]
    assert messages[0]["content"].startswith("Be brief.\n\nYou can call functions.")
    assert developer["role"] == "developer", "the client's messages stay as they are"
    knowing = Dialect.of(PLAIN + "{% if message.role == 'developer' %}{% endif %}")
    assert knowing.render_arguments([developer, USER], ToolChoice())[0] == [developer, USER]


def test_without_tools_nothing_is_added_and_old_calls_are_still_told() -> None:
    dialect = Dialect.of(PLAIN)
    assert dialect.render_arguments([USER], ToolChoice()) == ([USER], None)
    messages, _ = dialect.render_arguments(TOLD_TURN, ToolChoice())
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_calls_that_are_told_read_back(family: ToolFamily) -> None:
    text_turn = [{**TOLD_TURN[1], "content": ""}]
    (told,) = as_text(text_turn, family.spelling)
    assert read(parser_of(family, CHOICE), [told["content"]]).parsed_calls == [("f", {"a": 1}), ("f", {"a": 2})]
    assert family.spelling.before("NAME") in description([FUNCTION], family.spelling)


def test_where_the_description_goes() -> None:
    spelling = FAMILIES["hermes"].spelling
    text = description([FUNCTION], spelling)
    assert with_tools([USER], [FUNCTION], spelling) == [{"role": "system", "content": text}, USER]
    system = {"role": "system", "content": "Be brief."}
    assert with_tools([system, USER], [FUNCTION], spelling)[0]["content"] == f"Be brief.\n\n{text}"
    assert system == {"role": "system", "content": "Be brief."}, "the client's messages stay as they are"
    assert with_tools([USER], [FUNCTION], spelling, has_system=False) == [
        {"role": "user", "content": f"{text}\n\nWhat now?"}
    ]
    assert with_tools([], [FUNCTION], spelling, has_system=False) == [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("<tool_call>{% if tools %}", True),
        ("<tool_call>{%- for tool in tools -%}", True),
        ("<tool_call>{{ message['tools'] }}{% if 'tools' in message %}", False),
        ("<tool_call>{{ message.tools }}", False),
        ("<tool_call>{{ message.tool_calls }}", False),
        ("{% if tools %}<arg_key>", False),
    ],
)
def test_whether_a_template_describes_tools(template: str, expected: bool) -> None:
    dialect = Dialect.of(template)
    assert dialect.describes_tools is expected


def test_one_call_at_a_time_for_templates_that_take_no_more() -> None:
    dialect = Dialect.of(KNOWING + "{{ raise_exception('This model only supports single tool-calls at once!') }}")
    assert dialect.choice_for(CHOICE).max_calls == 1
    assert CHOICE.max_calls is None
