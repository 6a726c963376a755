"""Messages as clients send them, checked: who speaks, and what as one text.

By hand and not by a model of pydantic's: that would hold the interpreter's lock for all of a hundred thousand messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvrelay.gateway.errors import InvalidRequestError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXT_PARTS = ("text", "input_text", "output_text")


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a chat, each content as one text. Raises InvalidRequestError naming the one that is wrong."""
    return [_checked(message, f"messages[{index}]") for index, message in enumerate(messages)]


def checked_role(role: Any, param: str) -> str:
    """``role``, of the message ``param``. Raises InvalidRequestError if it is none."""
    if role not in ROLES:
        raise InvalidRequestError(
            f"{param}.role is {str(role)[:80]!r}; it must be one of {', '.join(ROLES)}", param=param
        )
    return str(role)


def text_of(content: Any, param: str) -> str:
    """A content as one text: it is one, or a list of text parts. Raises InvalidRequestError, also on images."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(
            f"{param} must be a text or a list of text parts, not {str(content)[:80]!r}", param=param
        )
    pieces: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind in TEXT_PARTS and isinstance(text, str):
            pieces.append(text)
            continue
        raise InvalidRequestError(
            f'{param}[{index}] must be a text part, {{"type": "text", "text": …}}, not {str(part)[:80]!r}; '
            "this deployment reads text only: no images, audio or files",
            param=param,
        )
    return "".join(pieces)


def _checked(message: Mapping[str, Any], param: str) -> dict[str, Any]:
    content = message.get("content")
    text = None if content is None else text_of(content, f"{param}.content")
    return {**message, "role": checked_role(message.get("role"), param), "content": text}
