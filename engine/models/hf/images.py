"""Images in steps of a transformers model: encodes them, and says what a step has in the place of their tokens' embeddings.

An image is encoded by the step that first computes one of its tokens. Its rows are kept until its last token is computed, or its
sequence leaves the slot. Engines without an encoder, as on decode workers beside prefill workers, use only rotary positions from
here.

Of several ranks the first one has the encoder. The others get the rows of each step within the step, and keep none.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import PreTrainedModel

from kvrelay.common.images import ImageSpan
from kvrelay.engine.images.interface import ImageError, Numbers, ReadImages
from kvrelay.engine.images.reader import tensor_of
from kvrelay.engine.models.ops import Upload
from kvrelay.engine.models.ranks import Collectives
from kvrelay.engine.step.batch import Batch
from kvrelay.engine.step.plan import SlotJoin, StepPlan
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
class SharedRows:
    """Gives rows that the first rank has encoded to all ranks, with the same bits. All have the same sizes here."""

    collectives: Collectives
    width: int  # of a row
    num_deep: int  # as many as ``Encoded.deep`` has
    dtype: torch.dtype
    device: torch.device

    def send(self, encoded: Encoded) -> Encoded:
        """On the first rank. Returns what the others get."""
        return self._apart(self.collectives.spread(torch.stack((encoded.rows, *encoded.deep)).to(self.dtype)))

    def receive(self, num_rows: int) -> Encoded:
        """On the other ranks."""
        shape = (1 + self.num_deep, num_rows, self.width)
        return self._apart(self.collectives.spread(torch.empty(shape, dtype=self.dtype, device=self.device)))

    @staticmethod
    def _apart(together: torch.Tensor) -> Encoded:
        rows, *deep = together
        return Encoded(rows, tuple(deep))


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


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of an image that a step computes."""

    sequence: SlotSequence
    number: int  # of the image in its prompt
    rows: slice  # of the image's rows
    num_rows: int  # of the image
    places: npt.NDArray[np.int64]  # of the part's tokens in the step
    is_last: bool  # whether the image's last token is in it


@dataclass(frozen=True, slots=True)
class _Held:
    """The images of a prompt that are encoded, and have tokens left to compute."""

    images: ReadImages
    encoded: dict[int, Encoded] = field(default_factory=dict)  # by number


class StepImages:
    """Prepares steps, one after another. Use it on the model thread only."""

    def __init__(self, encoder: ImageEncoder | None, placeholder: int, shared: SharedRows | None = None) -> None:
        """``encoder``: None for an engine that encodes no images. ``placeholder``: the token id in the place of image parts.

        ``shared``: to the other ranks, or without an encoder from the first one; None: one rank.
        """
        self._encoder = encoder
        self._placeholder = placeholder
        self._shared = shared
        # By the identity of ReadImages: to compare these would be to read all pixels.
        self._held: dict[int, _Held] = {}

    def share(self, shared: SharedRows) -> None:
        """Give rows to the other ranks from now on."""
        self._shared = shared

    def encode(self, plan: StepPlan, slots: Slots) -> None:
        """See Model."""
        if self._encoder is None:
            return
        joins = {join.slot: join for join in plan.joins}
        for row in plan.rows:
            one: SlotJoin | SlotSequence = joins.get(row.slot) or slots.sequences[row.slot]
            for number, span in enumerate(one.images.spans if one.images is not None and not row.draft_tokens else ()):
                if span.start < row.start + row.num_tokens and row.start < span.stop:
                    self.encoded(one, number, len(self._places(one, span)))

    def begin_step(self, batch: Batch, slots: Slots, upload: Upload) -> StepInputs:
        """What the step has; encodes images. Raises ValueError if an image does not fit its prompt."""
        is_special = slots.is_special[batch.slots].any()
        if not is_special and not self._held:
            return StepInputs()
        if self._held:
            here = {id(one.images) for one in slots.sequences if one.images is not None}
            self._held = {name: held for name, held in self._held.items() if name in here}
        positions = None
        if batch.rotary_positions is not None:
            (positions,) = upload((batch.rotary_positions,))
        parts = list(self._parts(batch, slots)) if is_special else []
        if not parts:
            return StepInputs(positions)
        (places,) = upload((np.concatenate([part.places for part in parts]),))
        return StepInputs(positions, places, self._rows(parts))

    def encoded(self, one: SlotJoin | SlotSequence, number: int, num_placeholders: int) -> Encoded:
        """The rows of a prompt's image, encoded now or earlier.

        Raises ImageError if the encoder fails, and ValueError if the image has another number of placeholders.
        """
        assert one.images is not None, f"sequence {one.name} lost its images"
        if self._encoder is None:
            raise ValueError(f"sequence {one.name}: has tokens of an image to compute; this engine reads none")
        held = self._held.setdefault(id(one.images), _Held(one.images)).encoded
        encoded = held.get(number)
        if encoded is None:
            try:
                encoded = self._encoder.encode(one.images.inputs[number], num_placeholders)
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise  # not the image's fault
            except Exception as error:  # a model's own code, which an image of an extreme shape may break
                raise ImageError(
                    f"image {number} cannot be encoded by this model ({type(error).__name__}: {error}); scale it to another shape"
                ) from error
        if len(encoded.rows) != num_placeholders:
            raise ValueError(
                f"sequence {one.name}: image {number} became {len(encoded.rows)} rows, and has {num_placeholders} placeholders"
            )
        held[number] = encoded
        return encoded

    def _rows(self, parts: Seq[_Part]) -> Encoded:
        """The rows of all parts. Ranks meet here."""
        if self._shared is not None and self._encoder is None:
            return self._shared.receive(sum(len(part.places) for part in parts))
        found = [self.encoded(part.sequence, part.number, part.num_rows).part(part.rows) for part in parts]
        for part in parts:
            if part.is_last:
                self._held[id(part.sequence.images)].encoded.pop(part.number, None)
        rows = torch.cat([one.rows for one in found])
        encoded = Encoded(rows, tuple(map(torch.cat, zip(*(one.deep for one in found), strict=True))))
        return encoded if self._shared is None else self._shared.send(encoded)

    def _parts(self, batch: Batch, slots: Slots) -> Iterator[_Part]:
        """The parts of images in the step."""
        for row, first in zip(batch.rows, batch.query_start_loc.tolist(), strict=False):
            sequence, end = slots.sequences[row.slot], row.start + row.num_tokens
            if sequence.images is None or row.draft_tokens:
                continue
            for number, span in enumerate(sequence.images.spans):
                if span.start < end and row.start < span.stop:
                    places = self._places(sequence, span)
                    lower, upper = np.searchsorted(places, (row.start, end)).tolist()
                    there = places[lower:upper] - row.start + first
                    yield _Part(sequence, number, slice(lower, upper), len(places), there, span.stop <= end)

    def _places(self, one: SlotJoin | SlotSequence, span: ImageSpan) -> npt.NDArray[np.int64]:
        """The positions of an image's placeholders."""
        ids = np.array(one.token_ids[span.start : span.stop])
        return np.flatnonzero(ids == self._placeholder) + span.start
