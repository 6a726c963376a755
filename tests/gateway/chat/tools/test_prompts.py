"""What a template does for tools is left to it, the rest is said in words; and what is said in words reads back."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.gateway.chat.dialect import Dialect
from kvrelay.gateway.chat.template import ChatTemplate
from kvrelay.gateway.chat.tools.formats.families import FAMILIES, ToolFamily
from kvrelay.gateway.chat.tools.functions import Function, ToolChoice
from kvrelay.gateway.chat.tools.messages import as_text, description, with_tools

from .cases import choice_of, parser_of, read

FUNCTION = Function(
    name="f", description="Does it.", parameters={"type": "object", "properties": {"a": {"type": "integer"}}}
)
CHOICE = choice_of([FUNCTION])
USER = {"role": "user", "content": "What now?"}
TURN: list[dict[str, Any]] = [
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
    messages, tools = dialect.render_arguments(TURN, CHOICE)
    assert tools == [FUNCTION.as_tool()]
    text = ChatTemplate(KNOWING, {}).render(messages, tools=tools)
    assert '<tools>{"type": "function", "function": {"name": "f", "description": "Does it."' in text
    assert '<tool_call>{"a": 1}</tool_call><tool_call>{"a": 2}</tool_call><tool>one<tool>two' in text


def test_a_template_that_knows_none_gets_words() -> None:
    dialect = Dialect.of(PLAIN)
    messages, tools = dialect.render_arguments(TURN, CHOICE)
    assert tools is None
    text = ChatTemplate(PLAIN, {}).render(messages)
    assert text.startswith("<system>You can call functions.")
    assert '{"name": "f", "description": "Does it."' in text
    assert text.endswith(
        "<user>What now?<assistant><tool_call>\n"
        '{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n{"name": "f", "arguments": {"a": 2}}\n</tool_call>'
        "<user><tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
    )


def test_without_tools_nothing_is_added_and_old_calls_are_still_told() -> None:
    dialect = Dialect.of(PLAIN)
    assert dialect.render_arguments([USER], ToolChoice()) == ([USER], None)
    messages, _ = dialect.render_arguments(TURN, ToolChoice())
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_calls_that_are_told_read_back(family: ToolFamily) -> None:
    text_turn = [{**TURN[1], "content": ""}]
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
