"""What gateways and workers must read in an image file in the same way. Needs Pillow."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import PIL.Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")

_ORIENTATION = 0x0112  # of EXIF


def orientation_of(image: PIL.Image.Image) -> int:
    """The orientation that a file tells in front of its pixels, 1 to 8; 1 if it tells none. Call it before pixels are decoded.

    A PNG may tell one behind them. It does not count, as a gateway, which decodes no pixels, would have to look for it.
    """
    from PIL import Image  # noqa: PLC0415 - only requests with images need it

    # Not the image's own getexif: that of a PNG decodes the pixels, to look behind them.
    orientation = Image.Image.getexif(image).get(_ORIENTATION)
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1
