"""Messages as clients send them, checked: who speaks, and what as one text.

By hand and not by a model of pydantic's: that would hold the interpreter's lock for all of a hundred thousand messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvrelay.gateway.errors import InvalidRequestError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXT_PARTS = ("text", "input_text", "output_text")


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
