"""Calls as Kimi K2 writes them: a section of calls between special tokens, each with an id that holds the function's name.

``<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>…
<|tool_calls_section_end|>``. The number behind the name counts the conversation's calls.
"""

from __future__ import annotations

import re
from typing import Any

from kvrelay.gateway.structural_tag import Format, const, json_schema, regex, sequence
from kvrelay.gateway.tools.parser import Context, Section, read_arguments
from kvrelay.gateway.tools.reader import Reading

CALLS_BEGIN, CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS_BEGIN = "<|tool_call_argument_begin|>"
PREFIX = "functions."

_ID = re.compile(r"[^\s<]*")
_MAX_ID_LENGTH = 96  # a prefix, a name, a number


def _read_call(context: Context) -> Reading[bool]:
    reader = context.reader
    yield from reader.spaces()
    call_id = yield from reader.word(_ID, _MAX_ID_LENGTH)
    name = call_id.removeprefix(PREFIX).partition(":")[0]
    yield from reader.spaces()
    if not context.may_call(name) or not (yield from reader.next_is(ARGUMENTS_BEGIN)):
        return False
    yield from reader.spaces()
    if not (yield from read_arguments(reader, context.writer(name))):
        return False
    yield from context.close(CALL_END)
    return True


def numbered_arguments(schema: dict[str, Any]) -> Format:
    """A call's number and its arguments: what follows ``functions.f:``."""
    return sequence(regex("[0-9]{1,3}"), const(ARGUMENTS_BEGIN), json_schema(schema))


def write_arguments(arguments: str) -> str:
    """The same of arguments that are JSON text. Nobody knows here how many calls there were; the number is 0."""
    return f"0{ARGUMENTS_BEGIN}{arguments}"


SYNTAX = Section(CALLS_BEGIN, CALL_BEGIN, CALLS_END, _read_call).syntax
