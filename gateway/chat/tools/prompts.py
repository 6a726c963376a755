"""Tools for models whose chat template knows none: they are described in the system prompt, and calls and results told as text.

The format that the model is asked for is its family's own, as a guide would spell it, so that parser and guide fit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvrelay.gateway.chat.tools.formats.families import Spelling
from kvrelay.gateway.chat.tools.functions import Function

Message = dict[str, Any]


def with_tools(
    messages: Sequence[Mapping[str, Any]], functions: Sequence[Function], spelling: Spelling, *, has_system: bool = True
) -> list[Message]:
    """``messages`` with a description of ``functions`` in the system message, which is made if there is none.

    ``has_system``: whether the template takes a system message; if not, the description comes in front of the first message.
    """
    text = description(functions, spelling)
    result = [dict(message) for message in messages]
    if result and (result[0].get("role") == "system" or not has_system):
        content = result[0].get("content") or ""
        parts = [content, text] if result[0].get("role") == "system" else [text, content]
        result[0]["content"] = "\n\n".join(part for part in parts if part)
        return result
    return [{"role": "system" if has_system else "user", "content": text}, *result]


def description(functions: Sequence[Function], spelling: Spelling) -> str:
    """What the model is told of its functions and of how to call them."""
    tools = "\n".join(json.dumps(function.as_tool()["function"], ensure_ascii=False) for function in functions)
    example = spelling.write([("NAME", "ARGUMENTS")])
    return (
        "You can call functions. Each line is one of them, its parameters as a JSON Schema:\n"
        f"<tools>\n{tools}\n</tools>\n"
        "To call a function, answer with this and nothing else, NAME being the function's name and ARGUMENTS its arguments"
        f" ({spelling.arguments_are}):\n{example}\n"
        "Call a function only if it helps; otherwise answer in words."
    )


def as_text(messages: Sequence[Mapping[str, Any]], spelling: Spelling) -> list[Message]:
    """``messages`` without calls and results: a call is what the assistant wrote, a result is what the user tells.

    Expects arguments as JSON text (:func:`.messages.template_messages`). Results in a row become one message.
    """
    result: list[Message] = []
    was_result = False
    for message in messages:
        told = dict(message)
        if calls := told.pop("tool_calls", None):
            functions = [call["function"] for call in calls]
            text = spelling.write([(each["name"], spelling.write_arguments(each["arguments"])) for each in functions])
            told["content"] = "\n".join(part for part in (told.get("content"), text) if part)
        is_result = told.get("role") == "tool"
        if is_result:
            told = {"role": "user", "content": f"<tool_response>\n{told.get('content') or ''}\n</tool_response>"}
        if is_result and was_result:
            result[-1]["content"] += "\n" + told["content"]
        else:
            result.append(told)
        was_result = is_result
    return result
