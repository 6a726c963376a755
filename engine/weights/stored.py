"""A 4-bit or 8-bit matrix of a quantised checkpoint, in one form for all formats, and its dequantisation.

:mod:`kvrelay.engine.weights.formats` makes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

_MAX_ELEMENTS = 2**20  # elements converted at once: fits a processor's caches
_MAX_ON_GPU = 2**24  # the same on a GPU, where each operation is a launch
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_E8M0_BIAS = 127


@dataclass(frozen=True, slots=True)
class RoundedInputs:
    """How the inputs of a weight's product are rounded to e4m3."""

    group_size: int | None  # number of inputs in a row that share a scale; None: all
    scale: float | None  # one scale for all rows; None: the largest number of each group determines its scale


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A matrix ``[out, in]``: ``(values - zero) * scale``, with a zero and a scale for each output and group of inputs.

    With uint8 scales it is MXFP4: scales are exponents (e8m0), and values are e2m1 without zeros.
    """

    values: (
        torch.Tensor
    )  # [out, in] int8 or e4m3; or [out, in / 2] uint8, two numbers in each, the first in the low half
    scale: torch.Tensor  # [out, num_groups] fp32, fp16, bf16 or uint8
    zero: torch.Tensor | None  # [out, num_groups] int8, or uint8 where two values are in a byte; None: 0
    group_size: int  # columns per group
    order: torch.Tensor | None  # [in] the input feature of each column; None: in order
    dtype: torch.dtype  # the dtype of its product
    inputs: RoundedInputs | None = None  # None: inputs are not rounded

    @classmethod
    def joined(cls, parts: Sequence[StoredWeight], device: torch.device) -> StoredWeight | None:
        """Memory for stacked matrices, to be filled by :meth:`copy_`; None if they do not have the same form."""
        first, num_outs = parts[0], sum(part.shape[0] for part in parts)
        if not all(first._is_like(part) for part in parts):
            return None

        def memory(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty((num_outs, tensor.shape[1]), dtype=tensor.dtype, device=device)

        zero = None if first.zero is None else memory(first.zero)
        order = None if first.order is None else first.order.to(device)
        inputs = _joined_inputs([part.inputs for part in parts])
        return cls(memory(first.values), memory(first.scale), zero, first.group_size, order, first.dtype, inputs)

    @property
    def shape(self) -> torch.Size:
        """``[out, in]``"""
        num_outs, num_columns = self.values.shape
        return torch.Size((num_outs, self._per_column * num_columns))

    @property
    def is_mxfp4(self) -> bool:
        """Whether values are e2m1 and scales are powers of two."""
        return self.scale.dtype == torch.uint8

    def __getitem__(self, rows: slice) -> StoredWeight:
        """A view of some rows."""
        zero = None if self.zero is None else self.zero[rows]
        return replace(self, values=self.values[rows], scale=self.scale[rows], zero=zero)

    def part(self, rows: range, columns: range) -> StoredWeight | None:
        """Some outputs and inputs; None if this form has no such part.

        Permuted inputs cannot be split, and no part may begin or end within a byte. If a part begins or ends within a group, its
        groups are smaller, and scales and zeros are repeated.
        """
        outs = self[rows.start : rows.stop]
        num_ins, size = self.shape[1], self.group_size
        if len(columns) == num_ins:
            return outs
        if self.order is not None or not columns or columns.start % self._per_column or columns.stop % self._per_column:
            return None
        first = columns.start // size
        if first == (columns.stop - 1) // size:
            repeats, groups, size = 1, slice(first, first + 1), len(columns)
        else:
            smaller = math.gcd(size, columns.start, 0 if columns.stop == num_ins else columns.stop)
            repeats, groups = size // smaller, slice(columns.start // smaller, -(-columns.stop // smaller))
            size = smaller
        bytes_of = slice(columns.start // self._per_column, columns.stop // self._per_column)
        scale, zero = (
            None if one is None else one.repeat_interleave(repeats, dim=1)[:, groups] for one in (outs.scale, outs.zero)
        )
        assert scale is not None, "a weight without scales"
        return replace(self, values=outs.values[:, bytes_of], scale=scale, zero=zero, group_size=size)

    def copy_(self, other: StoredWeight) -> None:
        """Copy a matrix of the same form into this memory."""
        assert self._form == other._form, f"a weight of {other._form} into memory for {self._form}"
        self.values.copy_(other.values)
        self.scale.copy_(other.scale)
        if self.zero is not None and other.zero is not None:
            self.zero.copy_(other.zero)

    def dequantised(self) -> torch.Tensor:
        """``[out, in]``, computed in fp32 and rounded once to ``dtype``."""
        num_outs, num_ins = self.shape
        result = torch.empty(self.shape, dtype=self.dtype, device=self.values.device)
        num_groups = self.scale.shape[1]
        most = _MAX_ELEMENTS if self.values.device.type == "cpu" else _MAX_ON_GPU
        num_rows = max(1, most // num_ins)
        for start in range(0, num_outs, num_rows):
            rows = slice(start, start + num_rows)
            # The last group may be short.
            padded = torch.zeros((len(self.values[rows]), num_groups * self.group_size), device=result.device)
            wide = padded[:, :num_ins]
            wide.copy_(self._numbers(rows))
            by_groups = padded.view(len(wide), num_groups, self.group_size)
            if self.zero is not None:
                by_groups -= self.zero[rows].float()[:, :, None]
            by_groups *= self._factors(rows)[:, :, None]
            if self.order is None:
                result[rows] = wide
            else:
                result[rows, self.order] = wide.to(self.dtype)
        return result

    def _numbers(self, rows: slice) -> torch.Tensor:
        """The values, unpacked."""
        values = self.values[rows]
        if values.dtype != torch.uint8:
            return values
        numbers = halves(values)
        return torch.tensor(_E2M1, device=values.device)[numbers.int()] if self.is_mxfp4 else numbers

    def _factors(self, rows: slice) -> torch.Tensor:
        """Scales in fp32."""
        scale = self.scale[rows].float()
        return torch.ldexp(torch.ones_like(scale), scale - _E8M0_BIAS) if self.is_mxfp4 else scale

    def _is_like(self, other: StoredWeight) -> bool:
        """Whether rows of both can be in one matrix."""
        if (self.order is None) != (other.order is None):
            return False
        is_ordered_alike = self.order is None or other.order is None or torch.equal(self.order, other.order)
        are_inputs_alike = (self.inputs is None) == (other.inputs is None)
        return is_ordered_alike and are_inputs_alike and self._form == other._form

    @property
    def _per_column(self) -> int:
        return 2 if self.values.dtype == torch.uint8 else 1

    @property
    def _form(self) -> tuple[object, ...]:
        zero_dtype = None if self.zero is None else self.zero.dtype
        group_size = self.group_size if self.scale.shape[1] > 1 else None  # one group has all inputs, whatever its size
        return self.values.dtype, self.values.shape[1], self.scale.dtype, zero_dtype, group_size


def _joined_inputs(parts: Sequence[RoundedInputs | None]) -> RoundedInputs | None:
    """The rounding for matrices that multiply the same rows, with the largest of their scales, so that no number is clipped."""
    inputs = [part for part in parts if part is not None]
    if not inputs or inputs[0].scale is None:
        return inputs[0] if inputs else None
    return replace(inputs[0], scale=max(part.scale for part in inputs if part.scale is not None))


def halves(values: torch.Tensor) -> torch.Tensor:
    """``[n, m]`` bytes as ``[n, 2 * m]`` 4-bit numbers."""
    return torch.stack((values & 15, values >> 4), dim=-1).flatten(-2)
