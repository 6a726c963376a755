"""Decodes image files."""

from __future__ import annotations

import io

from PIL import Image

from kvrelay.common.image_files import FORMATS, orientation_of
from kvrelay.engine.images.interface import ImageError

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # by orientation of EXIF


def decoded(data: bytes, number: int) -> Image.Image:
    """The first frame of a file in RGB, turned as its EXIF data says. ``number``: of the image in its prompt, for errors.

    Raises ImageError if the file is broken, or of another format.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            turn = _TURNS.get(orientation_of(image))
            return (image if turn is None else image.transpose(turn)).convert("RGB")
    except Exception as error:  # of a broken file Pillow may raise anything
        raise ImageError(
            f"image {number} cannot be read as one of {', '.join(FORMATS)} ({type(error).__name__}: {error})"
        ) from error
