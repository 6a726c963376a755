"""How the fake engine reads images: it checks files and placeholders, and decodes nothing.

Its text has a placeholder for each 64 x 64 pixels, at most 4 in a row and 4 rows, with a line break between rows. The K/V of all
tokens from an image's first placeholder on depend on the image's digest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from pathlib import Path

from kvrelay.common.images import ImageSpan, ImageText, ImageTexts, PromptImage
from kvrelay.engine.images.interface import ImageError, Numbers, ReadImages

_MARK = "<image>"
_PIXELS = 64  # of a placeholder, in each direction
_MOST = 4  # placeholders in a row, and rows
_PNG, _PNG_END = b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"
_STARTS = (_PNG, b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"RIFF")


class FakeImageReader:
    """Implements :class:`kvrelay.engine.images.interface.ImageReader`."""

    def __init__(self, placeholder: int = 3, text: str = "<pad>", *, takes_whole: bool = False) -> None:
        """``text``: that the tokenizer turns into the token ``placeholder``."""
        self.takes_whole = takes_whole
        self._placeholder = placeholder
        self._text = text

    @classmethod
    def of_tokenizer(cls, directory: Path) -> FakeImageReader | None:
        """A reader whose placeholder is the last special token of the model's tokenizer; None if there is none."""
        try:
            added = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
            special = [(int(token["id"]), str(token["content"])) for token in added if token.get("special")]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return cls(*max(special)) if special else None

    def texts(self, sizes: Seq[tuple[int, int]]) -> ImageTexts:
        """See ImageReader."""
        texts = []
        for width, height in sizes:
            num_columns, num_rows = _grid(width, height)
            texts.append(ImageText("\n".join([self._text * num_columns] * num_rows), num_columns * num_rows))
        return ImageTexts(_MARK, self._placeholder, texts)

    def read(self, token_ids: Seq[int], num_prompt_tokens: int, images: Seq[PromptImage]) -> ReadImages:
        """See ImageReader. Only of a PNG file are the end and the number of placeholders checked, too."""
        spans = tuple(image.span for image in images)
        for number, image in enumerate(images):
            self._check(number, image, token_ids[image.span.start : image.span.stop])
        num_in_spans = sum(list(token_ids[span.start : span.stop]).count(self._placeholder) for span in spans)
        if (num_found := list(token_ids[:num_prompt_tokens]).count(self._placeholder)) != num_in_spans:
            raise ImageError(f"the prompt has {num_found} placeholders; its images have {num_in_spans}")
        inputs = tuple({"digest": Numbers("uint8", (len(span.digest),), span.digest)} for span in spans)
        return ReadImages(spans, inputs, position_offset=fake_offset(spans))

    def _check(self, number: int, image: PromptImage, token_ids: Seq[int]) -> None:
        if not image.data.startswith(_STARTS):
            raise ImageError(f"image {number} is no PNG, JPEG, WebP or GIF file")
        if {token_ids[0], token_ids[-1]} != {self._placeholder}:
            raise ImageError(f"image {number} does not begin and end with a placeholder")
        if not image.data.startswith(_PNG):
            return
        if not image.data.endswith(_PNG_END):
            raise ImageError(f"image {number} is cut off")
        num_columns, num_rows = _grid(*(int.from_bytes(image.data[start : start + 4]) for start in (16, 20)))
        num_found = list(token_ids).count(self._placeholder)
        if num_found != num_columns * num_rows:
            raise ImageError(f"image {number} has {num_found} placeholders; it needs {num_columns * num_rows}")


def fake_offset(spans: Seq[ImageSpan]) -> int:
    """The position offset behind a prompt with these images: as if an image took the positions of one token."""
    return sum(1 + span.start - span.stop for span in spans)


def _grid(width: int, height: int) -> tuple[int, int]:
    """Placeholders in a row, and rows. Raises ImageError."""
    if width < 1 or height < 1:
        raise ImageError(f"an image of {width} x {height} pixels; both must be 1 at least")
    return min(_MOST, -(-width // _PIXELS)), min(_MOST, -(-height // _PIXELS))
