"""Products with 8-bit weights on a GPU. Those with full ones are cuBLAS's, as they are.

A decode step reads all weights for a few rows, so halving their bytes nearly halves its time: those rows go to our kernel, which
multiplies what is stored. A chunk of a prompt is bound by arithmetic, which 8-bit weights spare nothing of: its weights are
written in 16 bits, a slab of output channels at a time, and multiplied by cuBLAS. That costs 5 bytes of traffic per weight, for
Llama-3-8B by estimate a tenth of the time of 2048 rows and a fortieth of 8192; a kernel of ours that converts on the
way would have to come within that of cuBLAS's speed.
"""

from __future__ import annotations

import torch

from kvrelay.engine.weights.rounding import RoundedWeight
from kvrelay.kernels.weight_only_linear import (
    MAX_ROWS,
    ROW_TILES,
    dequantise_weight,
    linear_splits,
    weight_only_linear,
)

_SLAB_OUTS = (
    8192  # output channels of a slab at most: bounds the scratch memory, and is enough work for every multiprocessor
)


class RoundedLinear:
    """``hidden @ (values * scale).T + bias``. Implements ``Linear`` (:mod:`kvrelay.engine.models.ops`)."""

    def __init__(self, weight: RoundedWeight, bias: torch.Tensor | None, num_multiprocessors: int) -> None:
        """Keeps ``weight`` and ``bias`` ``[out]``, in the dtype of the activations, as they are."""
        self._weight = weight
        self._bias = bias
        num_outs, num_ins = weight.shape
        self._num_splits = linear_splits(num_multiprocessors, num_outs, num_ins)
        num_slabs = -(-num_outs // _SLAB_OUTS)
        self._slab_outs = -(-num_outs // num_slabs)

    def compile(self) -> None:
        """Multiply once with each number of rows that has a kernel of its own: compiled later, it would stall running streams."""
        weight = self._weight
        for num_rows in (*ROW_TILES, MAX_ROWS + 1):
            self(torch.zeros(num_rows, weight.shape[1], dtype=weight.dtype, device=weight.values.device))

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        weight = self._weight
        if len(hidden) <= MAX_ROWS:
            return weight_only_linear(hidden, weight.values, weight.scale, self._bias, self._num_splits)
        num_outs = weight.shape[0]
        out = torch.empty((len(hidden), num_outs), dtype=hidden.dtype, device=hidden.device)
        for start in range(0, num_outs, self._slab_outs):
            end = min(start + self._slab_outs, num_outs)
            slab = dequantise_weight(weight.values[start:end], weight.scale[start:end], hidden.dtype).T
            if self._bias is None:
                torch.mm(hidden, slab, out=out[:, start:end])
            else:
                torch.addmm(self._bias[start:end], hidden, slab, out=out[:, start:end])
        return out
