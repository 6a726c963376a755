"""Where each group's keys and values are in the pool's memory.

A physical block holds its group's layers one after the other, and each layer exactly its own data: all heads' keys, then all heads'
values. Groups with layers of other sizes have other views of the same blocks. This module makes views and never copies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvrelay.engine.config.model import KvSizes
from kvrelay.engine.kv.geometry import LayerGroups


@dataclass(frozen=True, slots=True)
class GroupKv:
    """One group's part of every block. A group with fewer layers than fit a block leaves the end unused."""

    keys: torch.Tensor  # [num_blocks, num_layers, num_kv_heads, block_size, key_size]
    values: torch.Tensor  # [num_blocks, num_layers, num_kv_heads, block_size, value_size]; for latents value_size is 0

    @property
    def sizes(self) -> KvSizes:
        """The sizes of each layer."""
        return KvSizes(self.keys.shape[2], self.keys.shape[4], self.values.shape[4])

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.keys.shape[3]

    @property
    def block_stride(self) -> int:
        """Elements from block to block."""
        return self.keys.stride(0)

    @property
    def layer_stride(self) -> int:
        """Elements from layer to layer."""
        return self.block_size * self.sizes.count

    @property
    def unit(self) -> int:
        """The largest number of elements that divides the sizes and start offsets of all keys and values."""
        return math.gcd(self.sizes.key_size, self.sizes.value_size, self.block_stride)


def view_group(pool: torch.Tensor, sizes: KvSizes) -> GroupKv:
    """``pool``: as :attr:`kvrelay.engine.kv.pool.KvPool.tensor`."""
    num_blocks, block_size, stride = len(pool), pool.shape[4], pool.stride(0)
    heads, of_layer = sizes.num_kv_heads, block_size * sizes.count
    num_layers, start = stride // of_layer, pool.storage_offset()

    def view(size: int, first: int) -> torch.Tensor:
        shape = (num_blocks, num_layers, heads, block_size, size)
        return pool.as_strided(shape, (stride, of_layer, block_size * size, size, 1), start + first)

    return GroupKv(view(sizes.key_size, 0), view(sizes.value_size, heads * block_size * sizes.key_size))


def view_groups(pool: torch.Tensor, groups: LayerGroups) -> tuple[GroupKv, ...]:
    """The views of all groups that attention reads; see :func:`view_group`."""
    return tuple(view_group(pool, sizes) for sizes in groups.sizes[: groups.num_attention])
