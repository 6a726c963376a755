"""The places of a checkpoint's tensors in the parameters, and which tensors stay stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from kvrelay.engine.weights.rounding import AnyWeight, RoundedWeight
from kvrelay.engine.weights.stored import StoredWeight


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """The target for one checkpoint tensor with the matrices or biases of all experts, whose last dimension is outputs."""

    target: AnyWeight  # [num_experts * num_parts * out, in], or biases without ``in``
    num_parts: int  # interleaved parts of each expert: gate, up, gate, up …

    def copy_(self, tensor: torch.Tensor, columns: slice | None) -> None:
        """``tensor``: ``[num_experts, in, out * num_parts]``, or without ``in``. ``columns``: see Place."""
        size, start = tensor.shape[-1] // self.num_parts, 0
        for expert in tensor:
            for part in range(self.num_parts):
                weight = expert[..., part :: self.num_parts].movedim(0, -1)
                _copy(self.target[start : start + size], weight, columns)
                start += size

    def copy_stored(self, weight: StoredWeight, num_experts: int) -> None:
        """``weight``: ``[num_experts * out * num_parts, in]`` in the target's form."""
        assert isinstance(self.target, StoredWeight), "stored experts into memory for full ones"
        of_expert = weight.shape[0] // num_experts
        size, start = of_expert // self.num_parts, 0
        for first in range(0, weight.shape[0], of_expert):
            for part in range(self.num_parts):
                rows = slice(first + part, first + of_expert, self.num_parts)
                self.target[start : start + size].copy_(weight[rows])
                start += size


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of the checkpoint belongs."""

    target: AnyWeight | FusedExperts
    shape: tuple[int, ...]  # of the tensor
    part: tuple[range, ...]  # the part that is read for the target, per dimension
    columns: slice | None = None  # of the inputs that are read: those that the target keeps; None: all
    is_optional: bool = False  # a checkpoint may lack the tensor; the target is then complete

    @property
    def is_stored(self) -> bool:
        """Whether the target keeps the stored form."""
        return isinstance(self.target.target if isinstance(self.target, FusedExperts) else self.target, StoredWeight)

    def put(self, tensor: torch.Tensor) -> None:
        """Copy the full part to its place."""
        if isinstance(self.target, FusedExperts):
            self.target.copy_(tensor, self.columns)
        else:
            _copy(self.target, tensor, self.columns)

    def put_stored(self, weight: StoredWeight) -> None:
        """Copy the stored part to its place."""
        if isinstance(self.target, FusedExperts):
            self.target.copy_stored(weight, len(self.part[0]))
        else:
            assert isinstance(self.target, StoredWeight), "a stored weight into memory for a full one"
            self.target.copy_(weight)


@dataclass(frozen=True, slots=True)
class Kept:
    """Which weights of a quantised checkpoint stay stored."""

    outlines: Mapping[str, StoredWeight]  # all weights that could
    keeps: Callable[[StoredWeight], bool]  # whether there is a product for this form

    def joined(
        self, parts: Sequence[tuple[str, range, range]], device: torch.device, *, in_order: bool = False
    ) -> StoredWeight | None:
        """Memory for stacked parts of weights, as (name, rows, columns); None if not all stay stored, or not in the same form.

        ``in_order``: their inputs must be in order.
        """
        found = []
        for name, rows, columns in parts:
            outline = self.outlines.get(name)
            part = None if outline is None else outline.part(rows, columns)
            if part is None or not self.keeps(part) or (in_order and part.order is not None):
                return None
            found.append(part)
        return StoredWeight.joined(found, device)


def _copy(target: AnyWeight, weight: torch.Tensor, columns: slice | None) -> None:
    """``columns``: if whole rows are rounded, the columns that the target keeps."""
    if isinstance(target, RoundedWeight):
        target.copy_(weight, slice(None) if columns is None else columns)
        return
    assert not isinstance(target, StoredWeight), "a full weight into memory for a stored one"
    assert columns is None, "nothing else is read of weights that are not rounded"
    target.copy_(weight)


NOTHING_KEPT = Kept({}, lambda _: False)
