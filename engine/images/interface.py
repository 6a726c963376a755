"""What workers ask of whoever reads images, without a tensor. The encoder itself belongs to the engine."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import msgspec

from kvrelay.common.errors import KvrelayError
from kvrelay.common.images import ImageSpan, ImageTexts, PromptImage


class ImageError(KvrelayError):
    """An image cannot be read, or does not fit its prompt. The message is for the client."""


class Numbers(msgspec.Struct, frozen=True, array_like=True):
    """An array that a message can carry."""

    dtype: str  # numpy's name
    shape: tuple[int, ...]
    data: bytes


class ReadImages(msgspec.Struct, frozen=True, array_like=True):
    """The images of one prompt, ready for the encoder."""

    spans: tuple[ImageSpan, ...]
    inputs: tuple[dict[str, Numbers], ...]  # for each image: the encoder's inputs by name
    # [axes, num_prompt_tokens] int64: positions that rotary embeddings use; None: 0, 1, 2, …
    positions: Numbers | None = None
    # What is added to the position of each token behind the last image for rotary embeddings.
    position_offset: int = 0
    takes_whole: bool = False  # as ImageReader.takes_whole

    def without_inputs(self) -> ReadImages:
        """The same, without pixels, for ranks that do not encode."""
        return msgspec.structs.replace(self, inputs=())


class ImageReader(Protocol):
    """Reads images for one model. Any thread may call it; a call may take some tenths of a second."""

    @property
    def takes_whole(self) -> bool:
        """Whether an image's tokens see each other, so that one step must compute all of them."""

    def texts(self, sizes: Seq[tuple[int, int]]) -> ImageTexts:
        """What a prompt has in the place of images of these sizes (width, height), in order. Raises ImageError."""

    def read(self, token_ids: Seq[int], num_prompt_tokens: int, images: Seq[PromptImage]) -> ReadImages:
        """Decode the images, and make them ready. Raises ImageError, also if the prompt's placeholders do not fit them."""
