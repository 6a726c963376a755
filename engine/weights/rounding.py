"""Weights rounded to 8 bits: which formats there are, and how a matrix comes to its own.

Symmetric, one scale per output: ``weight = values * scale[:, None]``, the largest of a row becomes the format's largest. The same
on all devices, bit by bit, so that two workers whose fingerprints name the same format compute with the same numbers.

Rounded are the layers' projections: nine tenths of what a decode step reads. Embeddings are looked up, a row at a time, so their
bytes cost nothing; norms and biases are small. The head is left as it is on a GPU: an eighth of what a step of Llama-3-8B then
reads, but its errors would be the logits', and no layer behind it evens them out. On a CPU, where the format is for the speed of a
single stream, the head's products are with rounded weights, too (:mod:`kvrelay.engine.torch_engine`). No K/V depends on it,
so it is no part of a fingerprint.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvrelay.engine.weights.stored import StoredWeight

_ALL = slice(None)
_MIN_SCALE = 1e-30  # of a row of zeros
_MAX_ELEMENTS = 2**24  # rounded at once: fp32 copies of a large matrix would need more room than its 8 bits save


class Rounding(enum.Enum):
    """A format of rounded weights, by the name that settings and fingerprints have for it."""

    INT8 = "int8"
    FP8 = "fp8"  # e4m3

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""
        return torch.int8 if self is Rounding.INT8 else torch.float8_e4m3fn

    @property
    def largest(self) -> float:
        """What the largest weight of a row becomes; the format is used symmetrically."""
        return 127.0 if self is Rounding.INT8 else 448.0


@dataclass(frozen=True, slots=True)
class RoundedWeight:
    """A matrix in 8 bits, or rows of one: ``values * scale[:, None]``. Stands where a tensor ``[out, in]`` would."""

    values: torch.Tensor  # [out, in] int8 or e4m3
    scale: torch.Tensor  # [out] fp32, each one that bf16 has
    rounding: Rounding
    dtype: torch.dtype  # what the weight is converted to before it is rounded: the model's

    @classmethod
    def empty(
        cls, shape: tuple[int, int], rounding: Rounding, dtype: torch.dtype, device: torch.device
    ) -> RoundedWeight:
        """Memory for one, to be filled by :meth:`copy_`."""
        values = torch.empty(shape, dtype=rounding.dtype, device=device)
        return cls(values, torch.empty(shape[0], dtype=torch.float32, device=device), rounding, dtype)

    @property
    def shape(self) -> torch.Size:
        """``[out, in]``"""
        return self.values.shape

    def __getitem__(self, rows: slice) -> RoundedWeight:
        """A view of some rows."""
        return RoundedWeight(self.values[rows], self.scale[rows], self.rounding, self.dtype)

    def copy_(self, weight: torch.Tensor, columns: slice = _ALL) -> None:
        """Round ``weight`` ``[out, in]``, of any float dtype and device, into this memory, or ``columns`` of it.

        Scales are those of whole rows: parts of a matrix are rounded as all of it is.
        """
        for part, source in self._parts(weight):
            wide = source.to(part.values.device).to(self.dtype).to(torch.float32, copy=True)
            # A number instead of this tensor would be multiplied with as its reciprocal on a GPU: another rounding than a CPU's.
            largest = torch.full((), self.rounding.largest, device=wide.device)
            # Rounded to bf16, as the CPU's product takes it, before the weights are divided by it: its rounding costs nothing then.
            scale = (wide.abs().amax(dim=1) / largest).clamp_(min=_MIN_SCALE).bfloat16().float()
            quotients = wide.div_(scale[:, None])[:, columns]
            if self.rounding is Rounding.INT8:
                quotients.round_()
            part.values.copy_(quotients.clamp_(-self.rounding.largest, self.rounding.largest))
            part.scale.copy_(scale)

    def dequantised(self) -> torch.Tensor:
        """``[out, in]`` fp32."""
        return self.values.float() * self.scale[:, None]

    def _parts(self, weight: torch.Tensor) -> Iterator[tuple[RoundedWeight, torch.Tensor]]:
        num_rows = max(1, _MAX_ELEMENTS // weight.shape[1])
        for start in range(0, weight.shape[0], num_rows):
            rows = slice(start, start + num_rows)
            yield self[rows], weight[rows]


def rounded(weight: torch.Tensor, rounding: Rounding) -> RoundedWeight:
    """``weight`` ``[out, in]``, rounded into memory of its own on its device."""
    result = RoundedWeight.empty((weight.shape[0], weight.shape[1]), rounding, weight.dtype, weight.device)
    result.copy_(weight)
    return result


Weight = torch.Tensor | RoundedWeight
"""A matrix ``[out, in]``, as it is or rounded."""

AnyWeight = Weight | StoredWeight
"""A matrix ``[out, in]``; it may be as a quantised checkpoint stores it."""
