"""Decodes image files."""

from __future__ import annotations

import io

from PIL import Image, ImageOps

from kvrelay.engine.images.interface import ImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def decoded(data: bytes, number: int) -> Image.Image:
    """The first frame of a file in RGB, turned as its EXIF data says. ``number``: of the image in its prompt, for errors.

    Raises ImageError if the file is broken, or of another format.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # of a broken file Pillow may raise anything
        raise ImageError(
            f"image {number} cannot be read as one of {', '.join(FORMATS)} ({type(error).__name__}: {error})"
        ) from error
