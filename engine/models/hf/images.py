"""Images in steps of a transformers model: encodes them, and says what a step has in the place of their tokens' embeddings.

An image is encoded by the step that first computes one of its tokens. Its rows are kept until its last token is computed, or its
sequence leaves the slot. Engines without an encoder, as on decode workers, use only rotary positions from here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import PreTrainedModel

from kvrelay.common.images import ImageSpan
from kvrelay.engine.images.interface import ImageError, Numbers
from kvrelay.engine.images.reader import tensor_of
from kvrelay.engine.models.ops import Upload
from kvrelay.engine.step.batch import Batch
from kvrelay.engine.step.slots import Slots, SlotSequence

_FEATURES = "get_image_features"


@dataclass(frozen=True, slots=True)
class Encoded:
    """An image's rows, one for each placeholder."""

    rows: torch.Tensor  # [num_placeholders, hidden], in the place of embeddings
    deep: tuple[torch.Tensor, ...]  # each the same shape, added to the hidden states after the first layers (DeepStack)

    def part(self, rows: slice) -> Encoded:
        """Some of the rows."""
        return Encoded(self.rows[rows], tuple(one[rows] for one in self.deep))


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a step has besides token ids."""

    rotary_positions: torch.Tensor | None = None  # [axes, num_tokens]
    places: torch.Tensor | None = None  # [num_rows] indices of the step's tokens that are parts of images, ascending
    encoded: Encoded | None = None  # the rows for these


class ImageEncoder:
    """The towers of a model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._features = getattr(encoding_part(model), _FEATURES)
        self._device, self._dtype = model.device, model.dtype

    def encode(self, inputs: Mapping[str, Numbers], num_rows: int) -> Encoded:
        """One image, which should become ``num_rows`` rows."""
        tensors = {name: tensor_of(numbers) for name, numbers in inputs.items()}
        if num_rows > 1:
            return self.encode_tensors(tensors)
        # A single row in all loses its dimension in the code of Mistral 3, which then fails.
        twice = self.encode_tensors({name: torch.cat((tensor, tensor)) for name, tensor in tensors.items()})
        return twice.part(slice(len(twice.rows) // 2))

    def encode_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Encoded:
        """One image, or several behind one another."""
        there = {
            name: tensor.to(self._device, self._dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in tensors.items()
        }
        output = self._features(**there, return_dict=True)
        deep = getattr(output, "deepstack_features", None) or ()
        return Encoded(_rows(output.pooler_output), tuple(map(_rows, deep)))


def encoding_part(model: PreTrainedModel) -> nn.Module:
    """The part of a model that encodes images. Raises LookupError if there is none."""
    parts: list[Any] = [getattr(model, model.base_model_prefix, None), model]
    found = next((one for one in parts if callable(getattr(one, _FEATURES, None))), None)
    if found is None:
        raise LookupError(f"{type(model).__name__} has no {_FEATURES}")
    part: nn.Module = found
    return part


def encoder_inputs(model: PreTrainedModel) -> frozenset[str]:
    """The names of what the encoder takes."""
    return frozenset(inspect.signature(getattr(encoding_part(model), _FEATURES)).parameters)


def _rows(features: torch.Tensor | Seq[torch.Tensor]) -> torch.Tensor:
    tensor = features if isinstance(features, torch.Tensor) else torch.cat(list(features))
    return tensor.reshape(-1, tensor.shape[-1])


class StepImages:
    """Prepares steps, one after another. Use it on the model thread only."""

    def __init__(self, encoder: ImageEncoder | None, placeholder: int) -> None:
        """``encoder``: None for an engine that reads no images. ``placeholder``: the token id in the place of image parts."""
        self._encoder = encoder
        self._placeholder = placeholder
        self._encoded: dict[SlotSequence, dict[int, Encoded]] = {}  # images by number

    def begin_step(self, batch: Batch, slots: Slots, upload: Upload) -> StepInputs:
        """What the step has; encodes images. Raises ValueError if an image does not fit its prompt."""
        is_special = slots.is_special[batch.slots].any()
        if not is_special and not self._encoded:
            return StepInputs()
        if self._encoded:
            here = set(slots.sequences)
            self._encoded = {one: encoded for one, encoded in self._encoded.items() if one in here}
        positions = None
        if batch.rotary_positions is not None:
            (positions,) = upload((batch.rotary_positions,))
        found = list(self._found(batch, slots)) if is_special else []
        if not found:
            return StepInputs(positions)
        (places,) = upload((np.concatenate([places for places, _ in found]),))
        rows = torch.cat([encoded.rows for _, encoded in found])
        deep = tuple(map(torch.cat, zip(*(encoded.deep for _, encoded in found), strict=True)))
        return StepInputs(positions, places, Encoded(rows, deep))

    def _found(self, batch: Batch, slots: Slots) -> Iterator[tuple[npt.NDArray[np.int64], Encoded]]:
        """The parts of images in the step: places of tokens, and the rows for them."""
        for row, first in zip(batch.rows, batch.query_start_loc.tolist(), strict=False):
            sequence, end = slots.sequences[row.slot], row.start + row.num_tokens
            if sequence.images is None or row.draft_tokens:
                continue
            for number, span in enumerate(sequence.images.spans):
                if span.start < end and row.start < span.stop:
                    places = self._places(sequence, span)
                    encoded = self._encode(sequence, number, len(places))
                    lower, upper = np.searchsorted(places, (row.start, end))
                    part = slice(lower, upper)
                    yield places[part] - row.start + first, encoded.part(part)
                    if span.stop <= end:
                        del self._encoded[sequence][number]

    def _places(self, sequence: SlotSequence, span: ImageSpan) -> npt.NDArray[np.int64]:
        """The positions of an image's placeholders."""
        ids = np.array(sequence.token_ids[span.start : span.stop])
        return np.flatnonzero(ids == self._placeholder) + span.start

    def _encode(self, sequence: SlotSequence, number: int, num_placeholders: int) -> Encoded:
        """The rows of an image, encoded now or by an earlier step."""
        images = self._encoded.setdefault(sequence, {})
        if number not in images:
            if self._encoder is None:
                raise ValueError(f"sequence {sequence.name}: has tokens of an image to compute; this engine reads none")
            assert sequence.images is not None, f"sequence {sequence.name} lost its images"
            try:
                encoded = self._encoder.encode(sequence.images.inputs[number], num_placeholders)
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise  # not the image's fault
            except Exception as error:  # a model's own code, which an image of an extreme shape may break
                raise ImageError(
                    f"image {number} cannot be encoded by this model ({type(error).__name__}: {error}); scale it to another shape"
                ) from error
            if len(encoded.rows) != num_placeholders:
                raise ValueError(
                    f"sequence {sequence.name}: image {number} became {len(encoded.rows)} rows, and has {num_placeholders} "
                    "placeholders"
                )
            images[number] = encoded
        return images[number]
