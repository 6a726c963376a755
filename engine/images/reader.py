"""Reads images with a checkpoint's processor: what a prompt has in their place, and the inputs of the encoder.

Each image is processed alone, so that its numbers and its text depend on nothing else, and blocks of its K/V can be shared. Types
that process the images of a prompt together are refused when a reader is made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer

from kvrelay.common.errors import ModelError
from kvrelay.common.images import ImageText, ImageTexts, PromptImage
from kvrelay.engine.images.files import decoded
from kvrelay.engine.images.interface import ImageError, Numbers, ReadImages

_MAX_KNOWN = 1024  # sizes, or lists of sizes, whose texts are remembered
_TRIED = ((40, 28), (24, 48))  # sizes (width, height) of two images that are processed alone and together

_MARKS = ("image_placeholder_token", "image_token")  # names of what a chat template writes for an image

Rope = Callable[[torch.Tensor, torch.Tensor, Mapping[str, torch.Tensor]], tuple[torch.Tensor, int]]
"""(a prompt's token ids ``[n]``, which of them are placeholders ``[n]``, inputs of all its images) -> (positions ``[axes, n]``,
offset of what follows)"""


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a model takes images."""

    placeholder: int  # token id
    inputs: frozenset[str]  # names of what its encoder takes
    takes_whole: bool
    rope: Rope | None  # None: rotary positions are 0, 1, 2, …


class ProcessorReader:
    """Implements ImageReader with a processor of transformers."""

    def __init__(self, processor: Any, tokenizer: Tokenizer, encoding: Encoding) -> None:
        """``tokenizer``: the one that gateways use. Raises ModelError if images cannot be read so."""
        self._processor = processor
        self._tokenizer = tokenizer
        self._encoding = encoding
        marks = (getattr(processor, name, None) for name in _MARKS)
        self._mark = next((mark for mark in marks if isinstance(mark, str)), "")
        if not self._mark:
            raise ModelError("its processor does not say what stands for an image")
        self._texts_of = functools.lru_cache(_MAX_KNOWN)(self._texts_of_sizes)
        self._are_numbered = self._compare_apart()

    @property
    def takes_whole(self) -> bool:
        """See ImageReader."""
        return self._encoding.takes_whole

    def texts(self, sizes: Seq[tuple[int, int]]) -> ImageTexts:
        """See ImageReader."""
        together = [tuple(sizes)] if self._are_numbered else [(size,) for size in sizes]
        texts = [text for ones in together for text in self._texts_of(ones)]
        for (width, height), text in zip(sizes, texts, strict=True):
            if text.num_placeholders == 0:
                raise ImageError(f"an image of {width} x {height} pixels has no tokens: it is too small for this model")
        return ImageTexts(mark=self._mark, placeholder=self._encoding.placeholder, texts=texts)

    def read(self, token_ids: Seq[int], num_prompt_tokens: int, images: Seq[PromptImage]) -> ReadImages:
        """See ImageReader."""
        prompt = torch.tensor(token_ids[:num_prompt_tokens])
        is_placeholder = torch.zeros(num_prompt_tokens, dtype=torch.bool)
        inputs: list[dict[str, torch.Tensor]] = []
        for number, image in enumerate(images):
            span = slice(image.span.start, image.span.stop)
            is_placeholder[span] = prompt[span] == self._encoding.placeholder
            picture = decoded(image.data, number)
            taken, text = self.process([picture])
            self._require_fit(number, picture.size, self._told(text[0]).num_placeholders, is_placeholder[span])
            inputs.append(taken)
        positions, offset = None, 0
        if self._encoding.rope is not None and images:
            positions, offset = self._rotary_positions(self._encoding.rope, prompt, is_placeholder, joined(inputs))
            end = images[-1].span.stop
            follow = torch.arange(end, num_prompt_tokens) + offset
            assert (positions[:, end:] == follow).all(), f"positions behind the last image do not follow {offset}"
        return ReadImages(
            spans=tuple(image.span for image in images),
            inputs=tuple({name: numbers_of(value) for name, value in one.items()} for one in inputs),
            positions=None if positions is None else numbers_of(positions),
            position_offset=offset,
            takes_whole=self.takes_whole,
        )

    def process(self, pictures: Seq[Image.Image]) -> tuple[dict[str, torch.Tensor], list[str]]:
        """What the encoder takes of pictures of one prompt, and the text of each. Raises ImageError."""
        try:
            made = self._processor(
                images=list(pictures),
                text=self._mark * len(pictures),
                images_kwargs={"return_tensors": "pt"},
                return_text_replacement_offsets=True,
            )
        except Exception as error:  # such as: too small, or too long for its width
            raise ImageError(f"an image cannot be prepared for this model: {error}") from error
        inputs = {name: torch.as_tensor(made[name]) for name in self._encoding.inputs if name in made}
        return inputs, [one["replacement"] for one in made["text_replacement_offsets"][0]]

    def tokens_of(self, text: str) -> list[int]:
        """The tokens of a text, as gateways have them."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    @staticmethod
    def _rotary_positions(
        rope: Rope, prompt: torch.Tensor, is_placeholder: torch.Tensor, inputs: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, int]:
        try:
            return rope(prompt, is_placeholder, inputs)
        except Exception as error:  # a model's own code, which takes images that touch for one
            raise ImageError(
                f"the model finds no positions for the images of this prompt ({type(error).__name__}: {error}); put text between "
                "images"
            ) from error

    def _texts_of_sizes(self, sizes: tuple[tuple[int, int], ...]) -> tuple[ImageText, ...]:
        pictures = [Image.new("RGB", size) for size in sizes]
        return tuple(map(self._told, self.process(pictures)[1])) if pictures else ()

    def _told(self, text: str) -> ImageText:
        return ImageText(text, self.tokens_of(text).count(self._encoding.placeholder))

    def _require_fit(self, number: int, size: tuple[int, int], needed: int, is_placeholder: torch.Tensor) -> None:
        """Raise ImageError unless a span has as many placeholders as its image needs."""
        count = int(is_placeholder.sum())
        if count != needed:
            raise ImageError(
                f"image {number} of {size[0]} x {size[1]} pixels takes {needed} placeholders (token "
                f"{self._encoding.placeholder}); its place in the prompt has {count}"
            )
        if self.takes_whole and count != len(is_placeholder):
            raise ImageError(f"image {number} has text between its placeholders, which this model cannot take")

    def _compare_apart(self) -> bool:
        """Process two images together and each alone. Whether their texts differ in more than that: some processors number them.

        Raises ModelError if what an image needs depends on the other one, or if it has no placeholders.
        """
        try:
            alone = [self._texts_of_sizes((size,))[0] for size in _TRIED]
            together = list(self._texts_of_sizes(_TRIED))
        except (ImageError, KeyError, TypeError) as error:
            raise ModelError(f"its processor does not say what stands for an image ({error!r})") from error
        counts = [one.num_placeholders for one in alone]
        if counts != [one.num_placeholders for one in together]:
            raise ModelError("what stands for an image depends on the other images of its prompt")
        if 0 in counts:
            raise ModelError(
                f"an image has no placeholders: its tokenizer.json makes none of its text into token {self._encoding.placeholder}"
            )
        return alone != together


def joined(inputs: Seq[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The tensors of several images behind one another, where their shapes allow it."""
    names = inputs[0] if inputs else ()
    tensors = {name: [one[name] for one in inputs] for name in names}
    return {name: torch.cat(ones) for name, ones in tensors.items() if len({one.shape[1:] for one in ones}) == 1}


def numbers_of(tensor: torch.Tensor) -> Numbers:
    """Floats in float32, integers in int64, and truth values as they are."""
    if tensor.is_floating_point():
        tensor = tensor.float()
    elif tensor.dtype != torch.bool:
        tensor = tensor.long()
    array = np.ascontiguousarray(tensor.cpu().numpy())
    return Numbers(str(array.dtype), array.shape, array.tobytes())


def tensor_of(numbers: Numbers) -> torch.Tensor:
    """The numbers again, in memory of their own."""
    array = np.frombuffer(numbers.data, dtype=numbers.dtype).reshape(numbers.shape)
    return torch.from_numpy(array.copy())
