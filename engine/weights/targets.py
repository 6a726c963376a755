"""The places of a checkpoint's tensors in the parameters, and which tensors stay stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from kvrelay.engine.weights.rounding import AnyWeight, RoundedWeight
from kvrelay.engine.weights.stored import StoredWeight


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """The target for one checkpoint tensor with the matrices or biases of all experts."""

    target: AnyWeight  # [num_experts * outs, in], or biases without ``in``
    num_parts: int  # interleaved outputs of each expert in the checkpoint: gate, up, gate, up …; here gate is before up
    is_transposed: bool  # in the checkpoint outputs are the last dimension

    @property
    def shape(self) -> torch.Size:
        """Of the memory."""
        return self.target.shape

    def copy_(self, tensor: torch.Tensor, columns: slice | None, piece: int) -> None:
        """``tensor``: ``[num_experts, outs, in]``, or transposed, or without ``in``. ``columns``, ``piece``: see Place."""
        experts = tensor.movedim(1, -1) if self.is_transposed else tensor
        for number, expert in enumerate(experts):
            for part in range(self.num_parts):
                weight = expert[part :: self.num_parts]
                _copy(self.target[self._rows(number, len(experts), piece + part, len(weight))], weight, columns)

    def copy_stored(self, weight: StoredWeight, num_experts: int, piece: int) -> None:
        """``weight``: ``[num_experts * outs, in]`` in the target's form. ``piece``: see Place."""
        assert isinstance(self.target, StoredWeight), "stored experts into memory for full ones"
        num_outs = weight.shape[0] // num_experts
        for number in range(num_experts):
            for part in range(self.num_parts):
                own = weight[slice(number * num_outs + part, (number + 1) * num_outs, self.num_parts)]
                self.target[self._rows(number, num_experts, piece + part, own.shape[0])].copy_(own)

    def _rows(self, expert: int, num_experts: int, part: int, num_outs: int) -> slice:
        """The rows of one of an expert's parts, all of which have ``num_outs``."""
        start = expert * (self.target.shape[0] // num_experts) + part * num_outs
        return slice(start, start + num_outs)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of the checkpoint belongs."""

    target: AnyWeight | FusedExperts
    shape: tuple[int, ...]  # of the tensor
    # The part that is read for the target, per dimension; the first of them if there are several.
    part: tuple[range, ...]
    columns: slice | None = None  # of the inputs that are read: those that the target keeps; None: all
    others: tuple[tuple[range, ...], ...] = ()  # parts of each expert that follow in the target, all of one size
    is_optional: bool = False  # a checkpoint may lack the tensor; the target is then complete

    @property
    def is_stored(self) -> bool:
        """Whether the target keeps the stored form."""
        return isinstance(self.target.target if isinstance(self.target, FusedExperts) else self.target, StoredWeight)

    @property
    def pieces(self) -> tuple[tuple[range, ...], ...]:
        """All parts that are read."""
        return self.part, *self.others

    def put(self, tensor: torch.Tensor, piece: int) -> None:
        """Copy a full piece to its place."""
        if isinstance(self.target, FusedExperts):
            self.target.copy_(tensor, self.columns, piece)
        else:
            _copy(self.target, tensor, self.columns)

    def put_stored(self, weight: StoredWeight, piece: int) -> None:
        """Copy a stored piece to its place."""
        if isinstance(self.target, FusedExperts):
            self.target.copy_stored(weight, len(self.part[0]), piece)
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
