"""The images of a conversation: their files, or where they are on the web, and what headers of files say of their sizes.

No pixel is decoded here, which is for workers, so a header costs nothing, however much it promises.
"""

from __future__ import annotations

import binascii
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrelay.common.image_files import FORMATS, orientation_of
from kvrelay.gateway.errors import InvalidRequestError
from kvrelay.gateway.image_hosts import WebAddress
from kvrelay.wire.codec import MAX_IMAGES_NBYTES

MAX_IMAGES = 64
MAX_PIXELS = 50_000_000  # of one
MAX_ALL_PIXELS = 200_000_000  # of all together; a worker takes about a second for ten million

_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]+(;[a-z0-9=.-]+)*;base64,", re.IGNORECASE)
_LYING = (5, 6, 7, 8)  # orientations in which width and height change places
_AS_URL = "send the image itself, as a data: URL such as data:image/png;base64,…"


@dataclass(frozen=True, slots=True)
class ChatImage:
    """An image of a conversation, its header checked."""

    data: bytes = field(repr=False)  # a PNG, JPEG, WebP or GIF file
    size: tuple[int, int]  # width and height in pixels, as it is shown
    param: str  # where it is in the body, such as ``messages[2].content[1]``


@dataclass(frozen=True, slots=True)
class ImageLink:
    """An image of a conversation that is on the web. Nothing has been fetched."""

    address: WebAddress
    param: str  # as of a ChatImage


class Gallery:
    """Collects the images of one conversation, in order."""

    def __init__(self) -> None:
        self.images: list[ChatImage | ImageLink] = []
        self._bounds = _Bounds()

    def add(self, part: Mapping[str, Any], param: str) -> None:
        """Take the image of a content part, in the form of any API: ``image_url``, ``input_image`` or ``image``.

        Raises InvalidRequestError naming the part, if it is no image that can be read, or one too many.
        """
        if len(self.images) == MAX_IMAGES:
            raise InvalidRequestError(
                f"{param} is one image too many: a request may have {MAX_IMAGES}; leave some out", param=param
            )
        given = _given(part, param)
        if isinstance(given, WebAddress):
            self.images.append(ImageLink(given, param))
            return
        try:
            data = binascii.a2b_base64(given, strict_mode=True)
        except ValueError as error:
            raise InvalidRequestError(
                f"{param} has an image that is not base64 ({error}); encode it without line breaks, with + and /, and padded",
                param=param,
            ) from error
        self.images.append(self._bounds.read(data, param))


def with_files(images: Sequence[ChatImage | ImageLink], files: Iterable[bytes]) -> tuple[ChatImage, ...]:
    """The images of one conversation, with the fetched ``files`` of its links, in order.

    Raises InvalidRequestError naming an image that cannot be read, or that is one too large.
    """
    bounds, fetched = _Bounds(), iter(files)
    return tuple(
        bounds.read(next(fetched), image.param) if isinstance(image, ImageLink) else bounds.count(image)
        for image in images
    )


class _Bounds:
    """The bounds of what the images of one request have together."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._num_pixels = 0

    def read(self, data: bytes, param: str) -> ChatImage:
        """The image of a file. Raises InvalidRequestError."""
        return self.count(ChatImage(data, _size_of(data, param), param))

    def count(self, image: ChatImage) -> ChatImage:
        """The same image. Raises InvalidRequestError if it is too large beside those before."""
        self._num_bytes += len(image.data)
        if self._num_bytes > MAX_IMAGES_NBYTES:
            raise InvalidRequestError(
                f"{image.param} and the images before it have {self._num_bytes} bytes; a request's images may have "
                f"{MAX_IMAGES_NBYTES}: send smaller ones",
                param=image.param,
            )
        self._num_pixels += image.size[0] * image.size[1]
        if self._num_pixels > MAX_ALL_PIXELS:
            raise InvalidRequestError(
                f"{image.param} and the images before it have {self._num_pixels} pixels; a request's images may have "
                f"{MAX_ALL_PIXELS}: scale them down, which models do anyway",
                param=image.param,
            )
        return image


def is_image(part: object) -> bool:
    """Whether a content part is an image, in the form of any API."""
    return isinstance(part, Mapping) and part.get("type") in ("image_url", "input_image", "image")


def _given(part: Mapping[str, Any], param: str) -> str | WebAddress:
    """What a part has: a file in base64, or its address."""
    if part["type"] == "image":
        return _given_source(part.get("source"), param)
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
    return _address(url, param)


def _given_source(source: object, param: str) -> str | WebAddress:
    kind = source.get("type") if isinstance(source, Mapping) else None
    data = source.get("data") if isinstance(source, Mapping) else None
    url = source.get("url") if isinstance(source, Mapping) else None
    if kind == "base64" and isinstance(data, str):
        return data
    if kind == "url" and isinstance(url, str):
        return _address(url, param)
    raise InvalidRequestError(
        f"{param}.source is of type {str(kind)[:80]!r}; this deployment keeps no files: send the image itself, "
        '{"type": "base64", "media_type": "image/png", "data": …}',
        param=param,
    )


def _address(url: str, param: str) -> WebAddress:
    try:
        return WebAddress.of(url)
    except ValueError as error:
        raise InvalidRequestError(
            f"{param} names an image by a URL that is not fetched: {error}; or {_AS_URL}", param=param
        ) from error


def _size_of(data: bytes, param: str) -> tuple[int, int]:
    """Width and height as the image is shown. Raises InvalidRequestError."""
    # Only requests with images need Pillow. The plugin is named because Pillow would import all of its plugins to find it.
    from PIL import Image, WebPImagePlugin  # noqa: F401, PLC0415

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            orientation = orientation_of(image)
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


def _too_large(pixels: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{param} has {pixels} than {MAX_PIXELS // 1_000_000} million pixels; scale it down, which models do anyway",
        param=param,
    )
