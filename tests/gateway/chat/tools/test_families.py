"""How each family of models writes calls, and how chat templates show the family."""

from __future__ import annotations

import pytest

from kvrelay.gateway.chat.tools.formats.dsml import DSML
from kvrelay.gateway.chat.tools.formats.families import FAMILIES, family_for
from kvrelay.gateway.chat.tools.formats.sections import DEEPSEEK
from kvrelay.gateway.chat.tools.functions import Function

from .cases import Answer, choice_of, names_choice, parser_of, read

A1, NONE = ("id0", "f", '{"a": 1}'), ("id1", "g", "{}")
# Forms that models write and guides do not.
VARIANTS: list[tuple[str, str, Answer]] = [
    ("llama3_json", ' {"name": "f", "parameters": {"a": 1}}\n{"name": "g", "parameters": {}}', Answer(calls=[A1, NONE])),
    ("llama3_json", '<|python_tag|>{"name": "f", "arguments": {"a": 1}};{"name": "g"}', Answer(calls=[A1, NONE])),
    ("llama3_json", '{"name": "Bob", "age": 3}', Answer(content='{"name": "Bob", "age": 3}')),
    ("llama3_json", 'See: {"name": "f", "parameters": {}}', Answer(content='See: {"name": "f", "parameters": {}}')),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}]', Answer(calls=[A1])),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{}', Answer(calls=[A1, NONE])),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', Answer(calls=[A1])),
    ("mistral", "[TOOL_CALLS]h[ARGS]{}", Answer(content="[TOOL_CALLS]h[ARGS]{}")),
    ("pythonic", "[f(a=1), g()]", Answer(calls=[A1, NONE])),
    ("pythonic", "<|python_start|>[f(a=1),g( )]<|python_end|>", Answer(calls=[A1, NONE])),
    ("pythonic", "[f(x)](https://example.org)", Answer(content="[f(x)](https://example.org)")),
    ("pythonic", "[f(a=open('x'))]", Answer(content="[f(a=open('x'))]")),
    ("pythonic", "[1, 2]", Answer(content="[1, 2]")),
    ("lfm2", "Yes.<|tool_call_start|>[f(a=1)]<|tool_call_end|>Checking.", Answer("Yes.Checking.", calls=[A1])),
    ("qwen3_coder", "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>", Answer(calls=[A1])),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>", Answer(calls=[A1])),
    ("glm47", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n", Answer(calls=[A1])),
    ("glm47", '<tool_call>{"name": "f"}</tool_call>', Answer(content='<tool_call>{"name": "f"}</tool_call>')),
    ("glm47", "<tool_call>f<arg_key>a</arg_key>1</tool_call>", Answer(content="<tool_call>f<arg_key>a</arg_key>1</tool_call>")),
    (
        "kimi_k2",
        "Yes. <|tool_calls_section_begin|> <|tool_call_begin|> functions.f:3 <|tool_call_argument_begin|> "
        '{"a": 1} <|tool_call_end|>'
        "\n<|tool_call_begin|>g:4<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        Answer("Yes.", calls=[A1, NONE]),
    ),
    ("kimi_k2", '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}', Answer(calls=[A1])),
    (
        "deepseek_v32",
        f'Yes.\n\n<{DSML}function_calls><{DSML}invoke name="f"><{DSML}parameter name="a" string="false"> 1 </{DSML}parameter>'
        f'</{DSML}invoke><{DSML}invoke name="g"></{DSML}invoke></{DSML}function_calls>',
        Answer("Yes.", calls=[A1, NONE]),
    ),
    (
        "deepseek_v32",
        f'<{DSML}invoke name="f">\n<{DSML}parameter name="a" string="false">one</{DSML}parameter>\n</{DSML}invoke>',
        Answer(calls=[("id0", "f", '{"a": "one"}')]),
    ),
    (
        "deepseek_v4",
        f'<{DSML}invoke name="f">\n<{DSML}parameter name="a">1</{DSML}parameter>\n</{DSML}invoke>',
        Answer(f'<{DSML}invoke name="f">\n<{DSML}parameter name="a">1</{DSML}parameter>\n</{DSML}invoke>'),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "expected"), VARIANTS)
def test_what_models_write(name: str, text: str, expected: Answer) -> None:
    family = FAMILIES[name]
    assert read(parser_of(family, names_choice("f", "g")), [text]) == expected
    assert read(parser_of(family, names_choice("f", "g")), text) == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("'it\\'s'", '"it\'s"'),
        ("True", "true"),
        ("None", "null"),
        ("null", "null"),
        ("-1.5", "-1.5"),
        ("+1", "1"),
        ("(1, 2)", "[1, 2]"),
        ("{'a': [1, {}]}", '{"a": [1, {}]}'),
        ('"a, b) = c"', '"a, b) = c"'),
        (r"'\d'", r'"\\d"'),
        ("'a' 'b'", '"ab"'),
        ('"\\ud83d\\ude42"', '"🙂"'),
        ("'\\ud83d'", '"\\ud83d"'),
    ],
)
def test_python_literals_become_json(written: str, expected: str) -> None:
    answer = read(parser_of(FAMILIES["pythonic"], names_choice("f")), f"[f(a={written})]")
    assert answer == Answer(calls=[("id0", "f", f'{{"a": {expected}}}')])


@pytest.mark.parametrize(
    "written", ["1e999", "x", "1+1", "f'{x}'", "b'x'", "1j", "{1: 2}", "__import__('os')", "[" * 500, "'", ""]
)
def test_what_is_no_literal_is_no_argument(written: str) -> None:
    text = f"[f(a={written})]"
    assert read(parser_of(FAMILIES["pythonic"], names_choice("f")), text) == Answer(content=text)


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, "1", '"1"'),
        ({"type": "integer"}, "1", "1"),
        ({"type": "integer"}, "many", '"many"'),
        ({"type": "boolean"}, "True", "true"),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, "1", '"1"'),
        ({"anyOf": [{"type": "string"}, {"type": "number"}]}, "2", "2"),
        ({"enum": ["1", "2"]}, "1", '"1"'),
        ({"const": 1}, "1", "1"),
        ({"type": "object"}, ' {"x": 412E900}', '{"x": 412E900}'),
        ({}, "[1, 2]", "[1, 2]"),
        ({}, "two\nlines ", '"two\\nlines "'),
        ({"type": 7, "anyOf": 3, "enum": "x"}, "a", '"a"'),
        (True, "{}", "{}"),
    ],
)
@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"),
        ("glm47", "<tool_call>f<arg_key>a</arg_key><arg_value>{}</arg_value></tool_call>"),
    ],
)
def test_values_between_tags_are_read_by_the_schema(
    name: str, written: str, schema: object, text: str, expected: str
) -> None:
    function = Function(name="f", parameters={"type": "object", "properties": {"a": schema}})
    answer = read(parser_of(FAMILIES[name], choice_of([function])), written.format(text))
    assert answer == Answer(calls=[("id0", "f", f'{{"a": {expected}}}')])


# The parts of published chat templates that show the family.
TEMPLATES = {
    "hermes": 'within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>',
    "qwen3_coder": "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>",
    "llama3_json": "'<|start_header_id|>' … 'Respond in the format {\"name\": function name, \"parameters\": dictionary'",
    "pythonic": "Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]",
    "mistral": '{{- "[TOOL_CALLS] [" }}',
    "mistral_args": '"[TOOL_CALLS]" + name + "[ARGS]" + arguments',
    "deepseek_v31": f"'{DEEPSEEK.begin}{DEEPSEEK.call_begin}' + name + '{DEEPSEEK.arguments_begin}'",
    "deepseek_v32": f"<{DSML}function_calls>\n<{DSML}invoke name=",
    "deepseek_v4": f"<{DSML}tool_calls>\n<{DSML}invoke name=",
    "lfm2": "<|tool_call_start|>[…]<|tool_call_end|>",
    "gpt_oss": '"<|start|>assistant to=" + "functions." + name + "<|channel|>commentary json<|message|>"',
    "glm47": "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>",
    "kimi_k2": "<|tool_calls_section_begin|>…<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>…<|tool_call_end|>",
}


def test_templates_give_families_away() -> None:
    assert {name: getattr(family_for(template), "name", None) for name, template in TEMPLATES.items()} == {
        name: name for name in TEMPLATES
    }
    assert TEMPLATES.keys() == {family.name for family in FAMILIES.values()}


@pytest.mark.parametrize(
    "template",
    ["", "{{ messages[0].content }}", "{%- set ns_token = ']<]minimax[>[' -%}<tool_call>", "<|im_start|>{{ role }}"],
)
def test_other_templates_give_none_away(template: str) -> None:
    assert family_for(template) is None
