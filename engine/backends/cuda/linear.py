"""Products with 4-bit and 8-bit weights on a GPU, and of one row with full weights, which are else left to cuBLAS.

A decode step reads all weights for a few rows, so halving the weights' bytes nearly halves its time. Our kernel multiplies these
rows with the stored weights. A chunk of a prompt is bound by arithmetic, which 8-bit weights do not reduce. There the weights are
expanded to 16 bits, one slab of output channels at a time, and cuBLAS multiplies. That costs 5 bytes of traffic per weight: for
Llama-3-8B an estimated tenth of the time of 2048 rows and a fortieth of 8192. A kernel that converts on the fly would have to come
that close to cuBLAS's speed.

One row, a step of a single stream, is multiplied without tensor cores (:mod:`kvrelay.kernels.linear.vector`). So its last bits
differ from those of the same row among others.

If activations are rounded to fp8, too, our kernel multiplies fp8 with fp8 for every number of rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F

from kvrelay.engine.weights.rounding import RoundedWeight
from kvrelay.engine.weights.stored import StoredWeight
from kvrelay.kernels.linear.fp8 import fp8_linear, round_rows
from kvrelay.kernels.linear.group_scaled import MIN_GROUP, dequantise_groups, group_scaled_linear
from kvrelay.kernels.linear.vector import (
    is_full_vector_product,
    is_vector_product,
    vector_linear,
    vector_rounded_linear,
    vector_stored_linear,
)
from kvrelay.kernels.linear.weight_only import (
    COMPUTE_DTYPES,
    MAX_ROWS,
    ROW_TILES,
    dequantise_weight,
    linear_splits,
    weight_only_linear,
)

_SLAB_OUTS = 8192  # most output channels of a slab: bounds the scratch memory, and still fills every multiprocessor


class FullLinear:
    """``hidden @ weight.T + bias`` with a weight that :func:`is_for_vectors` accepts. Implements ``Linear``."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Keeps both."""
        self._weight, self._bias = weight, bias

    def compile(self) -> None:
        """Multiply one row."""
        self(torch.zeros(1, self._weight.shape[1], dtype=self._weight.dtype, device=self._weight.device))

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        if hidden.shape == (1, self._weight.shape[1]) and hidden.stride(1) == 1:
            return vector_linear(hidden, self._weight, self._bias)
        return F.linear(hidden, self._weight, self._bias)


class _WeightOnlyLinear(ABC):
    """``hidden @ weight.T + bias`` with a weight of 4 or 8 bits. Implements ``Linear`` (:mod:`kvrelay.engine.models.ops`)."""

    def __init__(
        self, weight: RoundedWeight | StoredWeight, bias: torch.Tensor | None, num_multiprocessors: int
    ) -> None:
        """Keeps ``bias`` ``[out]``, in the dtype of the activations."""
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
    def _multiply_one(self, hidden: torch.Tensor) -> torch.Tensor:
        """The product of one row."""

    @abstractmethod
    def _slab(self, outs: slice) -> torch.Tensor:
        """The weight's rows ``outs`` in full precision."""

    def compile(self) -> None:
        """Multiply once with each number of rows that has its own kernel. Compiling one later would stall running streams."""
        for num_rows in (1, *ROW_TILES, MAX_ROWS + 1):
            self(torch.zeros(num_rows, self._num_ins, dtype=self._dtype, device=self._device))

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        if len(hidden) == 1 and is_vector_product(self._num_ins):
            return self._multiply_one(hidden)
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
        """Keeps ``weight`` unchanged."""
        super().__init__(weight, bias, num_multiprocessors)
        self._weight = weight

    def _multiply(self, hidden: torch.Tensor) -> torch.Tensor:
        return weight_only_linear(hidden, self._weight.values, self._weight.scale, self._bias, self._num_splits)

    def _multiply_one(self, hidden: torch.Tensor) -> torch.Tensor:
        return vector_rounded_linear(hidden, self._weight.values, self._weight.scale, self._bias)

    def _slab(self, outs: slice) -> torch.Tensor:
        return dequantise_weight(self._weight.values[outs], self._weight.scale[outs], self._dtype)


class StoredLinear(_WeightOnlyLinear):
    """``hidden @ ((values - zero) * scale).T + bias``: the kernel expands weights to full precision tile by tile."""

    def __init__(self, weight: StoredWeight, bias: torch.Tensor | None, num_multiprocessors: int) -> None:
        """Keeps ``weight``, which :func:`can_multiply` must accept."""
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

    def _multiply_one(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self._weight
        return vector_stored_linear(hidden, weight.values, weight.scale, weight.zero, weight.group_size, self._bias)

    def _slab(self, outs: slice) -> torch.Tensor:
        weight = self._weight[outs]
        return dequantise_groups(weight.values, weight.scale, weight.zero, weight.group_size, self._dtype)


class Fp8Linear:
    """``hidden @ (values * scale).T + bias`` with rows of ``hidden`` in fp8. Implements ``Linear``.

    Rows are rounded the same way whatever their number, so that prefill and decode workers compute the same K/V.
    """

    def __init__(self, weight: StoredWeight, bias: torch.Tensor | None, num_multiprocessors: int) -> None:
        """Keeps ``weight`` (e4m3, with rounding of its inputs) and ``bias`` (in the dtype of the activations)."""
        assert weight.inputs is not None, "a product whose inputs stay as they are"
        self._weight, self._bias, self._inputs = weight, bias, weight.inputs
        self._num_splits = linear_splits(num_multiprocessors, *weight.shape)

    def compile(self) -> None:
        """Like :meth:`_WeightOnlyLinear.compile`."""
        weight = self._weight
        for num_rows in (*ROW_TILES, MAX_ROWS + 1):
            self(torch.zeros(num_rows, weight.shape[1], dtype=weight.dtype, device=weight.values.device))

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        weight, inputs = self._weight, self._inputs
        rows = round_rows(hidden, inputs.group_size or weight.shape[1], inputs.scale)
        num_splits = self._num_splits if len(hidden) <= MAX_ROWS else 1
        return fp8_linear(rows, weight.values, weight.scale, weight.group_size, self._bias, num_splits)


def is_for_vectors(weight: torch.Tensor) -> bool:
    """Whether one row is multiplied with this full weight by our kernel, not by cuBLAS. Does not look at its numbers."""
    return weight.dtype in COMPUTE_DTYPES and weight.is_contiguous() and is_full_vector_product(*weight.shape)


def can_multiply(weight: StoredWeight, *, has_e4m3: bool) -> bool:
    """Whether there is a product with the stored weight, on a GPU with or without e4m3. Does not look at the weight's numbers."""
    has_type = has_e4m3 or weight.values.dtype != torch.float8_e4m3fn
    has_groups = weight.scale.shape[1] == 1 or weight.group_size % MIN_GROUP == 0
    return has_type and has_groups and weight.dtype in COMPUTE_DTYPES
