"""Which elements of a stored weight's tensors hold given outputs and inputs. Pure: shapes in, ranges out.

Formats pack several numbers into a word, and groups and blocks share a scale. So the smallest part around the wanted one is read
that contains only whole entries of every tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

Shape = tuple[int, ...]

_IN_A_WORD = (4, 8)  # numbers of 8 and of 4 bits in a word


@dataclass(frozen=True, slots=True)
class FileParts:
    """The tensors of one stored matrix."""

    shape: tuple[int, int]  # of the matrix: outputs, inputs
    tensors: Mapping[str, Shape]  # by the last part of the name
    is_transposed: bool  # inputs come first
    block_size: tuple[int, int] | None  # (outputs, inputs) that share a scale, where blocks do
    is_in_order: bool  # False: any input may be in any group, so all are read

    def around(self, rows: range, columns: range) -> tuple[range, range]:
        """The smallest outputs and inputs that can be read and contain the given ones."""
        if not self.is_in_order:
            columns = range(self.shape[1])
        units = [1, 1]
        for role in self.tensors:
            for axis, entry_len in self._entries(role).values():
                units[axis] = math.lcm(units[axis], entry_len)
        found = [
            range(part.start // unit * unit, min(size, -(-part.stop // unit) * unit))
            for part, unit, size in zip((rows, columns), units, self.shape, strict=True)
        ]
        return found[0], found[1]

    def slices(self, role: str, rows: range, columns: range) -> tuple[slice, ...]:
        """The slices of a tensor for outputs and inputs that :meth:`around` returned."""
        entries = self._entries(role)
        found = [slice(None)] * len(self.tensors[role])
        for dim, (axis, entry_len) in entries.items():
            part = (rows, columns)[axis]
            if entry_len < self.shape[axis]:
                found[dim] = slice(part.start // entry_len, -(-part.stop // entry_len))
        return tuple(found)

    def _entries(self, role: str) -> dict[int, tuple[int, int]]:
        """For each dimension that can be cut: its axis (0 for outputs), and the number of outputs or inputs per entry.

        If the entries may be of unequal length, everything is read: then the number is that of all outputs or inputs.
        """
        shape = self.tensors[role]
        axes: dict[int, int] = {0: 0}
        if len(shape) == 2:
            axes = {0: 1, 1: 0} if self.is_transposed else {0: 0, 1: 1}
        elif len(shape) == 4:  # ModelOpt's [out blocks, 1, in blocks, 1]
            axes = {0: 0, 2: 1}
        found = {}
        for dim, axis in axes.items() if math.prod(shape) > 1 else ():
            size, count = self.shape[axis], shape[dim]
            block_len = size if self.block_size is None else self.block_size[axis]
            if count == 1:
                continue  # for all
            if count == -(-size // block_len):
                found[dim] = axis, block_len
            else:
                # Even if the size is a multiple, the entries may be words, the last of which is not full.
                is_unequal = size % count or any(count == -(-size // one) and size % one for one in _IN_A_WORD)
                found[dim] = axis, size if is_unequal else size // count
        return found
