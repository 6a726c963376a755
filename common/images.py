"""Images in prompts: where their tokens are, and what tells one image from another.

An image takes a run of a prompt's tokens. Most of these are *placeholders*: one id, whose K/V come from the image's encoder and not
from the id. So equal ids do not mean equal K/V. An image's digest goes into the hash of the block that has its first placeholder
(:mod:`kvrelay.common.block_hash`), and so into the hashes of all blocks behind it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

IMAGE_DIGEST_NBYTES = 16


class ImageSpan(msgspec.Struct, frozen=True, array_like=True):
    """An image's tokens in a prompt: from its first placeholder to its last one. There may be other tokens between them."""

    start: int
    stop: int  # position behind the last placeholder
    digest: bytes  # see image_digest


class PromptImage(msgspec.Struct, frozen=True, array_like=True):
    """An image of a prompt, as the client sent it."""

    span: ImageSpan
    data: bytes  # a PNG, JPEG, WebP or GIF file

    def __repr__(self) -> str:
        return f"PromptImage({self.span}, {len(self.data)} bytes)"  # so that no log gets a file


class ImageText(msgspec.Struct, frozen=True, array_like=True):
    """What a prompt has in an image's place."""

    text: str
    num_placeholders: int


class ImageTexts(msgspec.Struct, frozen=True):
    """What prompts have in the place of images of certain sizes. It depends on nothing but the model and the sizes."""

    mark: str  # the chat template writes it once for each image; its text replaces it
    placeholder: int  # token id
    texts: list[ImageText]


def image_digest(data: bytes) -> bytes:
    """16 bytes, equal exactly for equal files."""
    return hashlib.blake2b(data, digest_size=IMAGE_DIGEST_NBYTES, person=b"kvrelay-image").digest()


def spans_problem(spans: Sequence[ImageSpan], num_prompt_tokens: int) -> str | None:
    """What is wrong with a prompt's spans, which must be in order and apart; None if nothing is."""
    end = 0
    for number, span in enumerate(spans):
        if not end <= span.start < span.stop <= num_prompt_tokens:
            return (
                f"image {number} has tokens {span.start} to {span.stop}; they must lie in {end} to {num_prompt_tokens}"
            )
        if len(span.digest) != IMAGE_DIGEST_NBYTES:
            return f"image {number} has a digest of {len(span.digest)} bytes; it must have {IMAGE_DIGEST_NBYTES}"
        end = span.stop
    return None
