"""Contents of messages in OpenAI's and Anthropic's bodies: a text, or parts that are texts and images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvrelay.gateway.chat.images import Gallery, is_image
from kvrelay.gateway.errors import InvalidRequestError

TEXT_PARTS = ("text", "input_text", "output_text")
CONTENT_SCHEMA = {
    "description": (
        "What is said: a text, or parts that are texts and images. Images may be in messages of users, and in results of tools."
    ),
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "anyOf": [
                    {
                        "type": "object",
                        "description": "A text. Texts side by side are put together.",
                        "required": ["type", "text"],
                        "properties": {
                            "type": {"enum": list(TEXT_PARTS), "description": "What it is."},
                            "text": {"type": "string", "description": "The text."},
                        },
                    },
                    {
                        "type": "object",
                        "description": "An image: PNG, JPEG, WebP or GIF, of which the first frame counts.",
                        "required": ["type", "image_url"],
                        "properties": {
                            "type": {"enum": ["image_url", "input_image"], "description": "What it is."},
                            "image_url": {
                                "description": (
                                    "A data: URL, data:image/png;base64,…, or an https: one of a host that the gateway's "
                                    "operator has listed; or an object with it as `url`."
                                ),
                                "anyOf": [{"type": "string"}, {"type": "object"}],
                            },
                            "detail": {"type": "string", "description": "Has no effect."},
                        },
                    },
                ]
            },
        },
        {"type": "null"},
    ],
}


def content_of(content: Any, param: str, gallery: Gallery | None, between: str = "") -> str | list[dict[str, Any]]:
    """A content as one text, or as a list of texts and ``{"type": "image"}`` if it has images, which ``gallery`` takes.

    Texts side by side are joined with ``between``. ``gallery``: None where no image may be. Raises InvalidRequestError naming the
    part.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(
            f"{param} must be a text or a list of text parts, not {str(content)[:80]!r}", param=param
        )
    return parts_of(enumerate(content), param, gallery, between)


def parts_of(
    numbered: Iterable[tuple[int, Any]], param: str, gallery: Gallery | None, between: str = ""
) -> str | list[dict[str, Any]]:
    """The same of some parts of the content ``param``, with their places in it."""
    parts: list[dict[str, Any]] = []
    pieces: list[str] = []  # texts behind the last image
    for index, part in numbered:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind in TEXT_PARTS and isinstance(text, str):
            pieces.append(text)
        elif is_image(part):
            where = f"{param}[{index}]"
            if gallery is None:
                raise misplaced_image(where)
            gallery.add(part, where)
            if pieces:
                parts.append({"type": "text", "text": between.join(pieces)})
            pieces = []
            parts.append({"type": "image"})
        else:
            raise InvalidRequestError(
                f'{param}[{index}] must be a text part, {{"type": "text", "text": …}}, or an image, not {str(part)[:80]!r}; this '
                "deployment reads no audio, video or files",
                param=f"{param}[{index}]",
            )
    if not parts:
        return between.join(pieces)
    return [*parts, {"type": "text", "text": between.join(pieces)}] if pieces else parts


def text_of(content: Any, param: str, between: str = "") -> str:
    """A content as one text. Raises InvalidRequestError naming the part, also for images."""
    text = content_of(content, param, None, between)
    assert isinstance(text, str), "without a gallery there are no images"
    return text


def misplaced_image(param: str) -> InvalidRequestError:
    """The error for an image that is neither in a user's message nor in a tool's result."""
    return InvalidRequestError(
        f"{param} is an image; images may be in messages of users and in results of tools only: move it there",
        param=param,
    )
