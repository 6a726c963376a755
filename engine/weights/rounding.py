"""Weights rounded to 8 bits: the formats, and how a matrix is rounded.

Rounding is symmetric with one scale per output: ``weight = values * scale[:, None]``. The largest weight of a row becomes the
format's largest number. All devices give the same bits, so two workers whose fingerprints name the same format compute with the
same numbers.

The layers' projections are rounded: nine tenths of what a decode step reads. Embeddings are looked up row by row, so their bytes
cost nothing; norms and biases are small. On a GPU the head is not rounded. It is an eighth of what a step of Llama-3-8B then reads,
but its errors would go directly into the logits. On a CPU, where the format serves a single stream's speed, the head is rounded,
too (:mod:`kvrelay.engine.torch_engine`). No K/V depends on the head, so that is not part of a fingerprint.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvrelay.engine.weights.stored import StoredWeight

_ALL = slice(None)
_MIN_SCALE = 1e-30  # for a row of zeros
_MAX_ELEMENTS = 2**24  # elements rounded at once: fp32 copies of a large matrix would need more room than 8 bits save


class Rounding(enum.Enum):
    """A format of rounded weights, by its name in settings and fingerprints."""

    INT8 = "int8"
    FP8 = "fp8"  # e4m3

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return torch.int8 if self is Rounding.INT8 else torch.float8_e4m3fn

    @property
    def largest(self) -> float:
        """The number that the largest weight of a row becomes; the format is used symmetrically."""
        return 127.0 if self is Rounding.INT8 else 448.0


@dataclass(frozen=True, slots=True)
class RoundedWeight:
    """A matrix in 8 bits, or rows of one: ``values * scale[:, None]``. It takes the place of a tensor ``[out, in]``."""

    values: torch.Tensor  # [out, in] int8 or e4m3
    scale: torch.Tensor  # [out] fp32 with values that bf16 can represent
    rounding: Rounding
    dtype: torch.dtype  # dtype of the weight before rounding: the model's

    @classmethod
    def empty(
        cls, shape: tuple[int, int], rounding: Rounding, dtype: torch.dtype, device: torch.device
    ) -> RoundedWeight:
        """Memory to be filled by :meth:`copy_`."""
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
        """Round ``weight`` ``[out, in]``, of any float dtype and device, into this memory; with ``columns``, only these.

        Scales are those of whole rows, so a part of a matrix is rounded like the whole.
        """
        for part, source in self._parts(weight):
            wide = source.to(part.values.device).to(self.dtype).to(torch.float32, copy=True)
            # With a Python number, a GPU would multiply by the reciprocal, which rounds differently from a CPU.
            largest = torch.full((), self.rounding.largest, device=wide.device)
            # The scale is rounded to bf16, which the CPU's product uses, before weights are divided by it. So its rounding
            # adds no error.
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
    """``weight`` ``[out, in]`` rounded into new memory on its device."""
    result = RoundedWeight.empty((weight.shape[0], weight.shape[1]), rounding, weight.dtype, weight.device)
    result.copy_(weight)
    return result


Weight = torch.Tensor | RoundedWeight
"""A matrix ``[out, in]``, full or rounded."""

AnyWeight = Weight | StoredWeight
"""A matrix ``[out, in]``: full, rounded, or as a quantised checkpoint stores it."""
