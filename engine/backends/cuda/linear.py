"""Products with weights of 4 and 8 bits on a GPU. Those with full ones are cuBLAS's, as they are.

A decode step reads all weights for a few rows, so halving their bytes nearly halves its time: those rows go to our kernel, which
multiplies what is stored. A chunk of a prompt is bound by arithmetic, which 8-bit weights spare nothing of: its weights are
written in 16 bits, a slab of output channels at a time, and multiplied by cuBLAS. That costs 5 bytes of traffic per weight, for
Llama-3-8B by estimate a tenth of the time of 2048 rows and a fortieth of 8192; a kernel of ours that converts on the
way would have to come within that of cuBLAS's speed.

Where activations are rounded to fp8, too, our kernel multiplies every number of rows: fp8 with fp8.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from kvrelay.engine.weights.rounding import RoundedWeight
from kvrelay.engine.weights.stored import StoredWeight
from kvrelay.kernels.linear.fp8 import fp8_linear, round_rows
from kvrelay.kernels.linear.group_scaled import MIN_GROUP, dequantise_groups, group_scaled_linear
from kvrelay.kernels.linear.weight_only import (
    COMPUTE_DTYPES,
    MAX_ROWS,
    ROW_TILES,
    dequantise_weight,
    linear_splits,
    weight_only_linear,
)

_SLAB_OUTS = (
    8192  # output channels of a slab at most: bounds the scratch memory, and is enough work for every multiprocessor
)


class _WeightOnlyLinear(ABC):
    """``hidden @ weight.T + bias`` with a weight of 4 or 8 bits. Implements ``Linear`` (:mod:`kvrelay.engine.models.ops`)."""

    def __init__(
        self, weight: RoundedWeight | StoredWeight, bias: torch.Tensor | None, num_multiprocessors: int
    ) -> None:
        """Keeps ``bias`` ``[out]``, in the dtype of the activations, as it is."""
        self._bias = bias
        self._num_outs, self._num_ins = weight.shape
        self._dtype, self._device = weight.dtype, weight.values.device
        self._num_splits = linear_splits(num_multiprocessors, self._num_outs, self._num_ins)
        num_slabs = -(-self._num_outs // _SLAB_OUTS)
        self._slab_outs = -(-self._num_outs // num_slabs)

    @abstractmethod
    def _multiply(self, hidden: torch.Tensor) -> torch.Tensor:
        """The product of at most ``MAX_ROWS`` rows."""

    @abstractmethod
    def _slab(self, outs: slice) -> torch.Tensor:
        """Some rows of the weight in full."""

    def compile(self) -> None:
        """Multiply once with each number of rows that has a kernel of its own: compiled later, it would stall running streams."""
        for num_rows in (*ROW_TILES, MAX_ROWS + 1):
            self(torch.zeros(num_rows, self._num_ins, dtype=self._dtype, device=self._device))

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        if len(hidden) <= MAX_ROWS:
            return self._multiply(hidden)
        out = torch.empty((len(hidden), self._num_outs), dtype=hidden.dtype, device=hidden.device)
        for start in range(0, self._num_outs, self._slab_outs):
            outs = slice(start, min(start + self._slab_outs, self._num_outs))
            slab = self._slab(outs).T
            if self._bias is None:
                torch.mm(hidden, slab, out=out[:, outs])
            else:
                torch.addmm(self._bias[outs], hidden, slab, out=out[:, outs])
        return out


class RoundedLinear(_WeightOnlyLinear):
    """``hidden @ (values * scale).T + bias``: the scale is applied to the sums."""

    def __init__(self, weight: RoundedWeight, bias: torch.Tensor | None, num_multiprocessors: int) -> None:
        """Keeps ``weight`` as it is."""
        super().__init__(weight, bias, num_multiprocessors)
        self._weight = weight

    def _multiply(self, hidden: torch.Tensor) -> torch.Tensor:
        return weight_only_linear(hidden, self._weight.values, self._weight.scale, self._bias, self._num_splits)

    def _slab(self, outs: slice) -> torch.Tensor:
        return dequantise_weight(self._weight.values[outs], self._weight.scale[outs], self._dtype)


class StoredLinear(_WeightOnlyLinear):
    """``hidden @ ((values - zero) * scale).T + bias``: weights become what they would be in full, tile by tile."""

    def __init__(self, weight: StoredWeight, bias: torch.Tensor | None, num_multiprocessors: int) -> None:
        """Keeps ``weight``, which :func:`can_multiply`, as it is."""
        super().__init__(weight, bias, num_multiprocessors)
        self._weight = weight

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        order = self._weight.order
        return super().__call__(hidden if order is None else hidden.index_select(1, order))

    def _multiply(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self._weight
        return group_scaled_linear(
            hidden, weight.values, weight.scale, weight.zero, weight.group_size, self._bias, self._num_splits
        )

    def _slab(self, outs: slice) -> torch.Tensor:
        weight = self._weight[outs]
        return dequantise_groups(weight.values, weight.scale, weight.zero, weight.group_size, self._dtype)


class Fp8Linear:
    """``hidden @ (values * scale).T + bias``, with rows of ``hidden`` in fp8. Implements ``Linear``.

    Many rows and few are rounded alike, so that two pools compute the same K/V.
    """

    def __init__(self, weight: StoredWeight, bias: torch.Tensor | None, num_multiprocessors: int) -> None:
        """Keeps ``weight``, in e4m3, whose inputs are rounded, and ``bias``, in the dtype of the activations, as they are."""
        assert weight.inputs is not None, "a product whose inputs stay as they are"
        self._weight, self._bias, self._inputs = weight, bias, weight.inputs
        self._num_splits = linear_splits(num_multiprocessors, *weight.shape)

    def compile(self) -> None:
        """As that of weights alone."""
        weight = self._weight
        for num_rows in (*ROW_TILES, MAX_ROWS + 1):
            self(torch.zeros(num_rows, weight.shape[1], dtype=weight.dtype, device=weight.values.device))

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        weight, inputs = self._weight, self._inputs
        rows = round_rows(hidden, inputs.group_size or weight.shape[1], inputs.scale)
        num_splits = self._num_splits if len(hidden) <= MAX_ROWS else 1
        return fp8_linear(rows, weight.values, weight.scale, weight.group_size, self._bias, num_splits)


def can_multiply(weight: StoredWeight, *, has_e4m3: bool) -> bool:
    """Whether there is a product with it as it is, on a GPU that has e4m3 or not; its numbers are not looked at."""
    has_type = has_e4m3 or weight.values.dtype != torch.float8_e4m3fn
    has_groups = weight.scale.shape[1] == 1 or weight.group_size % MIN_GROUP == 0
    return has_type and has_groups and weight.dtype in COMPUTE_DTYPES
