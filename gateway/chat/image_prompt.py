"""Where a rendered chat has images: their marks become what the model expects there, and their tokens are found.

The chat template writes the model's mark once for each image, and a worker tells what stands there instead
(:class:`kvrelay.common.images.ImageTexts`). Texts of the client that contain a mark or a placeholder are refused, as they would be
taken for an image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

from kvrelay.common.images import ImageSpan, ImageTexts, PromptImage, image_digest
from kvrelay.gateway.chat.images import ChatImage
from kvrelay.gateway.errors import ChatTemplateError, InvalidRequestError

_MAX_WHERE = 200  # characters of a field's name that an error shows


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's tokens, and its images in order."""

    token_ids: list[int]
    images: tuple[PromptImage, ...] = ()


def with_texts(prompt: str, told: ImageTexts, given: Mapping[str, Any], placeholder: str) -> str:
    """The rendered ``prompt`` with each image's text in place of its mark.

    ``given``: the client's fields that the template has seen, by name. ``placeholder``: the placeholder as text. Raises
    InvalidRequestError naming a field that contains a mark, and ChatTemplateError if there are more or fewer marks than images.
    """
    for reserved in (told.mark, placeholder):
        if reserved and (where := where_is(reserved, given)) is not None:
            where = where[:_MAX_WHERE]
            raise InvalidRequestError(
                f"{where} contains {reserved!r}, which marks an image in this model's prompts; leave it out, or send no images",
                param=where,
            )
    pieces = prompt.split(told.mark)
    if len(pieces) - 1 != len(told.texts):
        raise ChatTemplateError(
            f"the model's chat template shows {len(pieces) - 1} of {len(told.texts)} images; send text only, or images only in "
            "messages in which it shows them",
            param=next(iter(given), None),
        )
    texts = [text.text for text in told.texts]
    return "".join(chain.from_iterable(zip_longest(pieces, texts, fillvalue="")))


def placed(token_ids: Sequence[int], images: Sequence[ChatImage], told: ImageTexts) -> tuple[PromptImage, ...]:
    """The images with their tokens in a prompt. Raises InvalidRequestError if there are more or fewer placeholders than told."""
    places = [place for place, token_id in enumerate(token_ids) if token_id == told.placeholder]
    expected = sum(text.num_placeholders for text in told.texts)
    if len(places) != expected:
        raise InvalidRequestError(
            f"the prompt has {len(places)} placeholders of images, and its images have {expected}; leave out texts that look like "
            "the model's special tokens",
            param=images[0].param,
        )
    found: list[PromptImage] = []
    first = 0
    for image, text in zip(images, told.texts, strict=True):
        last = first + text.num_placeholders - 1
        span = ImageSpan(places[first], places[last] + 1, image_digest(image.data))
        found.append(PromptImage(span, image.data))
        first = last + 1
    return tuple(found)


def where_is(text: str, given: Mapping[str, Any]) -> str | None:
    """The field that contains ``text``, such as ``messages[2].content[1].text``; None if there is none. Names count, too."""
    waiting: list[tuple[str, Any]] = list(given.items())
    while waiting:  # no recursion: a client chooses how deep it nests
        name, value = waiting.pop()
        if isinstance(value, str):
            if text in value:
                return name
        elif isinstance(value, Mapping):
            for key, one in value.items():
                if text in key:
                    return name
                waiting.append((f"{name}.{key}", one))
        elif isinstance(value, list | tuple):
            waiting += [(f"{name}[{index}]", one) for index, one in enumerate(value)]
    return None
