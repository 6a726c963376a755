"""Conversations with calls, in the form that chat templates expect.

Clients send a call's arguments as JSON text, its result as a message of role ``tool``, and null as the content of a message that
has only calls. Templates differ. Most want arguments as an object, some as text. Some distinguish null from empty, most cannot take
null. Some accept only short ids, or ids that name the function. Few know the role ``developer``. A :class:`MessageStyle` says what
a template expects.

If a template knows no tools, the system prompt describes them, and calls and results become text. The model is asked for its
family's own format, spelled as a guide would, so that parser and guide fit.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrelay.gateway.chat.tools.formats.families import Spelling
from kvrelay.gateway.chat.tools.functions import Function
from kvrelay.gateway.chat.tools.reader import is_json_object
from kvrelay.gateway.errors import InvalidRequestError

Message = dict[str, Any]

_TEXT_ARGUMENTS = re.compile(r"arguments['\"]?\]?\s*[+~]")  # the template joins them to text without converting them
_NULL_CONTENT = re.compile(r"content['\"]?\]?\s+is\s+(not\s+)?none")
_SHORT_IDS = re.compile(r"length\s*!=\s*9")
_SHORT_ID_LENGTH = 9
_NUMBERED_IDS = re.compile(r"<\|tool_call_argument_begin\|>")  # Kimi K2 writes a call's id instead of its name
_THINKING = re.compile(r"message(\.thinking|\[['\"]thinking['\"]\])")  # the field that clients call reasoning_content


@dataclass(frozen=True, slots=True)
class MessageStyle:
    """The form of messages that a template expects."""

    has_text_arguments: bool = False
    takes_null: bool = False
    has_short_ids: bool = False  # exactly nine letters and digits
    has_numbered_ids: bool = False  # ``functions.NAME:0``, counted through the conversation
    has_thinking: bool = False  # thoughts are in a field ``thinking``
    has_developer: bool = False  # knows the role ``developer``; others drop or refuse it

    @classmethod
    def of(cls, chat_template: str) -> MessageStyle:
        """The style of a template, read from its source."""
        return cls(
            has_text_arguments=_TEXT_ARGUMENTS.search(chat_template) is not None,
            takes_null=_NULL_CONTENT.search(chat_template) is not None,
            has_short_ids=_SHORT_IDS.search(chat_template) is not None,
            has_numbered_ids=_NUMBERED_IDS.search(chat_template) is not None,
            has_thinking=_THINKING.search(chat_template) is not None,
            has_developer="developer" in chat_template,
        )


@dataclass(slots=True)
class _Calls:
    """The calls of a conversation so far."""

    names: dict[str, str] = field(default_factory=dict)  # names of functions, by the client's ids of their calls
    ids: dict[str, str] = field(default_factory=dict)  # the template's ids by the client's ids
    number: int = 0


def template_messages(messages: Sequence[Mapping[str, Any]], style: MessageStyle) -> list[Message]:
    """The messages in the template's style; other fields stay. Does not change ``messages``.

    Raises InvalidRequestError naming the field of a malformed call.
    """
    known = _Calls()
    return [_message(message, style, known, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Mapping[str, Any], style: MessageStyle, known: _Calls, param: str) -> Message:
    result = dict(message)
    if message.get("role") == "developer" and not style.has_developer:
        result["role"] = "system"
    content = message.get("content")
    if isinstance(content, list):
        content = joined([part for part in content if _is_shown(part)])
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise InvalidRequestError(f"{param}.tool_calls must be a list of calls", param=f"{param}.tool_calls")
    result.pop("tool_calls", None)
    if calls:
        result["tool_calls"] = [
            _call(call, style, known, f"{param}.tool_calls[{index}]") for index, call in enumerate(calls)
        ]
    result["content"] = None if content is None and calls and style.takes_null else content or ""
    call_id = message.get("tool_call_id")
    if call_id is not None:
        if not isinstance(call_id, str):
            raise InvalidRequestError(f"{param}.tool_call_id must be text", param=f"{param}.tool_call_id")
        result["tool_call_id"] = known.ids.get(call_id) or _id(call_id, style)
        if result.get("name") is None and call_id in known.names:
            result["name"] = known.names[call_id]
    thoughts = message.get("reasoning_content")
    # Gpt-oss takes either content or thoughts beside calls.
    if style.has_thinking and isinstance(thoughts, str) and not (calls and content):
        result.setdefault("thinking", thoughts)
    return result


def _call(call: Any, style: MessageStyle, known: _Calls, param: str) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise InvalidRequestError(
            f"{param}.function must be an object with the name and arguments of a call", param=f"{param}.function"
        )
    arguments = _arguments(function.get("arguments"), style, f"{param}.function.arguments")
    result: Message = {**call, "type": "function", "function": {**function, "arguments": arguments}}
    call_id = call.get("id")
    if style.has_numbered_ids:
        result["id"] = f"functions.{name}:{known.number}"
    elif isinstance(call_id, str):
        result["id"] = _id(call_id, style)
    if isinstance(call_id, str):
        known.names[call_id], known.ids[call_id] = name, result["id"]
    known.number += 1
    return result


def _arguments(arguments: Any, style: MessageStyle, param: str) -> dict[str, Any] | str:
    """The arguments as an object, or as its JSON text."""
    try:
        if isinstance(arguments, str) and is_json_object(arguments.strip()):
            arguments = json.loads(arguments)
        arguments = {} if arguments in (None, "") else arguments
        if isinstance(arguments, Mapping):
            return json.dumps(arguments, ensure_ascii=False) if style.has_text_arguments else dict(arguments)
    except (RecursionError, ValueError):
        pass  # nested too deep to parse, or a number of thousands of digits
    raise InvalidRequestError(
        f"{param} is no JSON object: {str(arguments)[:80]!r}; leave out a call whose arguments were cut off",
        param=param,
    )


def _id(call_id: str, style: MessageStyle) -> str:
    if not style.has_short_ids or (len(call_id) == _SHORT_ID_LENGTH and call_id.isalnum() and call_id.isascii()):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:_SHORT_ID_LENGTH]


def joined(*contents: str | Sequence[Message]) -> str | list[Message]:
    """Contents one behind the other, each a text or a list of parts that are texts and images. A list only if there are images.

    Templates may trim parts or put something between them, so texts side by side become one part.
    """
    parts: list[Message] = []
    texts: list[str] = []  # behind the last image
    for content in contents:
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if not _is_image(part):
                texts.append(part["text"])
                continue
            if text := "".join(texts):
                parts.append({"type": "text", "text": text})
            texts = []
            parts.append(part)
    text = "".join(texts)
    if not parts:
        return text
    return [*parts, {"type": "text", "text": text}] if text else parts


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def _is_shown(part: Any) -> bool:
    return isinstance(part, Mapping) and ("text" in part or _is_image(part))


def with_tools(
    messages: Sequence[Mapping[str, Any]], functions: Sequence[Function], spelling: Spelling, *, has_system: bool = True
) -> list[Message]:
    """``messages`` with a description of ``functions`` in the system message, which is added if there is none.

    ``has_system``: whether the template takes a system message. If not, the description precedes the first message.
    """
    text = description(functions, spelling)
    result = [dict(message) for message in messages]
    if result and (result[0].get("role") == "system" or not has_system):
        content = result[0].get("content") or ""
        between = "\n\n" if content else ""
        parts = [content, between, text] if result[0].get("role") == "system" else [text, between, content]
        result[0]["content"] = joined(*parts)
        return result
    return [{"role": "system" if has_system else "user", "content": text}, *result]


def description(functions: Sequence[Function], spelling: Spelling) -> str:
    """The text that tells the model about its functions and how to call them."""
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
    """``messages`` with calls and results as text: a call is the assistant's text, a result is a user message.

    Expects arguments as JSON text (:func:`template_messages`). Consecutive results become one message.
    """
    result: list[Message] = []
    was_result = False
    for message in messages:
        told = dict(message)
        if calls := told.pop("tool_calls", None):
            functions = [call["function"] for call in calls]
            text = spelling.write([(each["name"], spelling.write_arguments(each["arguments"])) for each in functions])
            content = told.get("content") or ""
            told["content"] = joined(content, "\n" if content else "", text)
        is_result = told.get("role") == "tool"
        if is_result:
            content = joined("<tool_response>\n", told.get("content") or "", "\n</tool_response>")
            told = {"role": "user", "content": content}
        if is_result and was_result:
            result[-1]["content"] = joined(result[-1]["content"], "\n", told["content"])
        else:
            result.append(told)
        was_result = is_result
    return result
