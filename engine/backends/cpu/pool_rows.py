"""The K/V of a group of layers as rows of its pool, which attention on the CPU gathers."""

from __future__ import annotations

import math

import numpy as np
import torch

from kvrelay.engine.kv.views import GroupKv
from kvrelay.engine.step.slots import Ints

PIECE_KV_BYTES = 2**22  # keys and values that are gathered at once


class GatherScratch:
    """A buffer in which pieces gather K/V. One per model, because the page faults of new memory cost more than the copy."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._buffer = torch.empty(PIECE_KV_BYTES // dtype.itemsize, dtype=dtype)

    def flat(self, count: int) -> torch.Tensor:
        """A buffer of ``count`` numbers, valid until the next call."""
        if self._buffer.numel() < count:  # a single item may exceed the size of a piece
            self._buffer = torch.empty(count, dtype=self._buffer.dtype)
        return self._buffer[:count]


class PoolRows:
    """A group's pool as rows to gather. A row is all keys, or all values, of one head in one block.

    Rows of keys and values may differ in length, and other groups use the same memory. So a row's number is its start, counted in
    the largest unit that divides all starts.
    """

    def __init__(self, kv: GroupKv, scratch: GatherScratch) -> None:
        self._kv = kv
        self._scratch = scratch
        sizes, block_size = kv.sizes, kv.block_size
        self._lens = (block_size * sizes.key_size, block_size * sizes.value_size)
        first_value = sizes.num_kv_heads * self._lens[0]
        self._unit = math.gcd(kv.block_stride, *self._lens)
        # For keys, and for values if there are any: the start of the first head in a layer, and the step to the next head.
        self._kinds = [(0, self._lens[0] // self._unit), (first_value // self._unit, self._lens[1] // self._unit)]
        self._num_kinds = 2 if sizes.value_size else 1
        self._keys = self._view(kv.keys, self._lens[0])
        self._values = self._view(kv.keys, self._lens[1])

    def _view(self, keys: torch.Tensor, row_len: int) -> torch.Tensor:
        end = keys.shape[0] * keys.stride(0)
        return keys.as_strided(((end - row_len) // self._unit + 1, row_len), (self._unit, 1))

    def of_blocks(self, block_ids: Ints, heads: Ints) -> Ints:
        """``[num_kinds, *shape]``: rows of keys and values in layer 0. ``block_ids`` and ``heads`` broadcast to the shape."""
        first = block_ids * (self._kv.block_stride // self._unit)
        rows: Ints = np.stack([first + start + heads * step for start, step in self._kinds[: self._num_kinds]])
        return rows

    def gather(self, rows: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[num_rows, block_size * size]``, one tensor for latents. Valid until the scratch is used again.

        ``rows``: of keys, then of values, in layer 0; see ``of_blocks``.
        """
        rows = rows + layer * (self._kv.layer_stride // self._unit)
        key_len, value_len = self._lens
        if key_len == value_len or not value_len:
            gathered = self._scratch.flat(len(rows) * key_len).view(len(rows), key_len)
            torch.index_select(self._keys, 0, rows, out=gathered)
            keys, *values = gathered.chunk(2 if value_len else 1)
            return keys, values[0] if values else keys
        num_rows = len(rows) // 2
        scratch = self._scratch.flat(num_rows * (key_len + value_len))
        keys = scratch[: num_rows * key_len].view(num_rows, key_len)
        flat_values = scratch[num_rows * key_len :].view(num_rows, value_len)
        torch.index_select(self._keys, 0, rows[:num_rows], out=keys)
        torch.index_select(self._values, 0, rows[num_rows:], out=flat_values)
        return keys, flat_values
