"""Pictures of Pillow in chats: they become files, as clients over HTTP send them."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

from kvrelay.gateway.errors import InvalidRequestError

_KIND = "image_pil"  # as in vLLM's ``LLM.chat``


def with_files(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """``messages`` with each part ``{"type": "image_pil", "image_pil": image}`` as an ``image_url`` part.

    Raises InvalidRequestError naming a part that has no ``PIL.Image.Image``.
    """
    return [_with_files(message, f"messages[{index}].content") for index, message in enumerate(messages)]


def _with_files(message: Mapping[str, Any], param: str) -> Mapping[str, Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple) or not any(map(_is_picture, content)):
        return message
    return {**message, "content": [_as_file(part, f"{param}[{place}]") for place, part in enumerate(content)]}


def _is_picture(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == _KIND


def _as_file(part: Any, param: str) -> Any:
    if not _is_picture(part):
        return part
    from PIL import Image, ImageOps  # noqa: PLC0415 - only these parts need Pillow

    picture = part.get(_KIND)
    if not isinstance(picture, Image.Image):
        raise InvalidRequestError(
            f"{param}.{_KIND} is of type {type(picture).__name__}; it must be a PIL.Image.Image", param=param
        )
    written = io.BytesIO()
    # What a worker makes of a file: turned as its EXIF data says, and in RGB.
    ImageOps.exif_transpose(picture).convert("RGB").save(written, format="PNG", compress_level=1)
    url = f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
