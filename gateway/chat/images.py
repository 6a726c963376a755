"""The images of a conversation: their files, and what their headers say of their sizes.

Nothing is fetched. No pixel is decoded here, which is for prefill workers, so a header costs nothing, however much it promises.
"""

from __future__ import annotations

import binascii
import io
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvrelay.gateway.errors import InvalidRequestError
from kvrelay.wire.codec import MAX_IMAGES_NBYTES

MAX_IMAGES = 64
MAX_PIXELS = 50_000_000  # of one
MAX_ALL_PIXELS = 200_000_000  # of all together; a worker takes about a second for ten million

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]+(;[a-z0-9=.-]+)*;base64,", re.IGNORECASE)
_ORIENTATION = 0x0112  # of EXIF
_LYING = (5, 6, 7, 8)  # orientations in which width and height change places
_PNG = b"\x89PNG\r\n\x1a\n"
_ORIENTING = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")  # chunks of a PNG that may tell the orientation
_AS_URL = "send the image itself, as a data: URL such as data:image/png;base64,…"


@dataclass(frozen=True, slots=True)
class ChatImage:
    """An image of a conversation, its header checked."""

    data: bytes = field(repr=False)  # a PNG, JPEG, WebP or GIF file
    size: tuple[int, int]  # width and height in pixels, as it is shown
    param: str  # where it is in the body, such as ``messages[2].content[1]``


class Gallery:
    """Collects the images of one conversation, in order."""

    def __init__(self) -> None:
        self.images: list[ChatImage] = []
        self._num_bytes = 0
        self._num_pixels = 0

    def add(self, part: Mapping[str, Any], param: str) -> None:
        """Take the image of a content part, in the form of any API: ``image_url``, ``input_image`` or ``image``.

        Raises InvalidRequestError naming the part, if it is no image that can be read, or one too many.
        """
        if len(self.images) == MAX_IMAGES:
            raise InvalidRequestError(
                f"{param} is one image too many: a request may have {MAX_IMAGES}; leave some out", param=param
            )
        text = _base64_of(part, param)
        try:
            data = binascii.a2b_base64(text, strict_mode=True)
        except ValueError as error:
            raise InvalidRequestError(
                f"{param} has an image that is not base64 ({error}); encode it without line breaks, with + and /, and padded",
                param=param,
            ) from error
        self._num_bytes += len(data)
        if self._num_bytes > MAX_IMAGES_NBYTES:
            raise InvalidRequestError(
                f"{param} and the images before it have {self._num_bytes} bytes; a request's images may have "
                f"{MAX_IMAGES_NBYTES}: send smaller ones",
                param=param,
            )
        width, height = _size_of(data, param)
        self._num_pixels += width * height
        if self._num_pixels > MAX_ALL_PIXELS:
            raise InvalidRequestError(
                f"{param} and the images before it have {self._num_pixels} pixels; a request's images may have "
                f"{MAX_ALL_PIXELS}: scale them down, which models do anyway",
                param=param,
            )
        self.images.append(ChatImage(data, (width, height), param))


def is_image(part: object) -> bool:
    """Whether a content part is an image, in the form of any API."""
    return isinstance(part, Mapping) and part.get("type") in ("image_url", "input_image", "image")


def _base64_of(part: Mapping[str, Any], param: str) -> str:
    """The file in a part, still as base64."""
    if part["type"] == "image":
        return _base64_of_source(part.get("source"), param)
    if part.get("file_id") is not None:
        raise InvalidRequestError(
            f"{param} names a file by its id; this deployment keeps no files: {_AS_URL}", param=param
        )
    url = part.get("image_url")
    if isinstance(url, Mapping):
        url = url.get("url")
    if not isinstance(url, str):
        raise InvalidRequestError(f"{param} has no image_url; {_AS_URL}", param=param)
    if (head := _DATA_URL.match(url)) is not None:
        return url[head.end() :]
    if url[:5].lower() == "data:":
        raise InvalidRequestError(
            f"{param} begins {url[:40]!r}; it must be data:image/TYPE;base64, and the image in base64", param=param
        )
    raise InvalidRequestError(
        f"{param} names an image by {url[:80]!r}; this deployment fetches nothing: {_AS_URL}", param=param
    )


def _base64_of_source(source: object, param: str) -> str:
    kind = source.get("type") if isinstance(source, Mapping) else None
    data = source.get("data") if isinstance(source, Mapping) else None
    if kind == "base64" and isinstance(data, str):
        return data
    raise InvalidRequestError(
        f"{param}.source is of type {str(kind)[:80]!r}; this deployment fetches nothing and keeps no files: send the image itself, "
        '{"type": "base64", "media_type": "image/png", "data": …}',
        param=param,
    )


def _size_of(data: bytes, param: str) -> tuple[int, int]:
    """Width and height as the image is shown. Raises InvalidRequestError."""
    # Only requests with images need Pillow. The plugin is named because Pillow would import all of its plugins to find it.
    from PIL import Image, WebPImagePlugin  # noqa: F401, PLC0415

    try:
        with Image.open(io.BytesIO(_with_all_in_front(data)), formats=_FORMATS) as image:
            width, height = image.size
            # Not the image's own getexif: that of a PNG decodes the pixels, to look behind them.
            orientation = Image.Image.getexif(image).get(_ORIENTATION)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_large("many more", param) from error
    except Exception as error:  # on a damaged file, its format's reader raises anything
        raise InvalidRequestError(
            f"{param} is no PNG, JPEG, WebP or GIF that can be read; check that its file is whole, or convert it",
            param=param,
        ) from error
    if width * height > MAX_PIXELS:
        raise _too_large(f"{width} x {height} pixels, more", param)
    return (height, width) if orientation in _LYING else (width, height)


def _with_all_in_front(data: bytes) -> bytes:
    """``data``; of a PNG whose orientation may be told behind its pixels, as some programs do, the same with that in front of them.

    Then the image's size is the one that workers see, who decode the pixels.
    """
    if not data.startswith(_PNG):
        return data
    place, pixels, behind = len(_PNG), 0, []
    while place + 12 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, place)
        if kind == b"IDAT":
            pixels = pixels or place
        elif pixels and kind in (b"fcTL", b"IEND"):  # behind the first frame
            break
        elif pixels and kind in _ORIENTING:
            chunk = data[place : place + 8 + length]
            # Pillow checks sums in front of the pixels only.
            behind.append(chunk + zlib.crc32(chunk[4:]).to_bytes(4))
        place += 12 + length
    return b"".join((data[:pixels], *behind, data[pixels : pixels + 8])) if behind else data


def _too_large(pixels: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{param} has {pixels} than {MAX_PIXELS // 1_000_000} million pixels; scale it down, which models do anyway",
        param=param,
    )
