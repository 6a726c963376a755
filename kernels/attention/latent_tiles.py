"""A tile of queries in the kernels over latents: its sizes, and the pass over tiles of latents.

Do not launch these; `latent_attention` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl

from kvrelay.kernels.checks import (
    BLOCK_SIZES,
    FLOAT_DTYPES,
    next_power_of_2,
    require_dtype,
    require_shape,
    require_unit_stride,
)

# The smallest tile of a tensor core, and so the smallest padded size.
_MIN_DIM = 16
MAX_RANK = 512


@dataclass(frozen=True)
class Tile:
    """Launch parameters. The compile check requires DeepSeek's sizes not to spill. With 8 warps 1 KB spills on gfx942."""

    keys: int  # per iteration
    num_warps: int
    num_stages: int
    rows: int = 16  # heads of a token, or (token, head) pairs, of a program


def _tile(element_size: int) -> Tile:
    if element_size == 4:
        return Tile(keys=16, num_warps=8, num_stages=1)
    return Tile(keys=16, num_warps=4, num_stages=3)


@dataclass(frozen=True)
class LatentSizes:
    """The constants of a call."""

    num_q_heads: int
    rank: int
    rope: int
    row: int  # of the pool, which may have more behind the latent
    block_size: int
    tile: Tile

    @classmethod
    def of(cls, q: torch.Tensor, pool: torch.Tensor, layer: int, rank: int, out: torch.Tensor) -> LatentSizes:
        """Check the arguments, and return their sizes. Raises ValueError."""
        require_shape("pool", pool, ("num_blocks", "num_layers", 1, 1, "block_size", "size"))
        require_dtype("pool", pool, *FLOAT_DTYPES)
        _, num_layers, _, _, block_size, row = pool.shape
        if not pool.is_contiguous():
            raise ValueError(f"pool has strides {pool.stride()}, expected a contiguous tensor")
        if block_size not in (1, *BLOCK_SIZES):  # a list of single rows is a table of blocks of one token
            raise ValueError(f"block_size is {block_size}, expected 1 or one of {BLOCK_SIZES}")
        if not 0 <= layer < num_layers:
            raise ValueError(f"layer is {layer}, expected 0 <= layer < {num_layers}")
        require_shape("q", q, ("num_tokens", "num_q_heads", "size"))
        size = q.shape[2]
        if size > row:
            raise ValueError(f"q has size {size}, expected at most that of the pool's rows, {row}")
        if not 1 <= rank < size or rank > MAX_RANK:
            raise ValueError(f"rank is {rank}, expected less than the latents' {size}, and at most {MAX_RANK}")
        require_shape("out", out, (*q.shape[:2], rank))
        for name, tensor in (("q", q), ("out", out)):
            require_dtype(name, tensor, pool.dtype)
            require_unit_stride(name, tensor)
        return cls(q.shape[1], rank, size - rank, row, block_size, _tile(pool.element_size()))

    @property
    def constants(self) -> dict[str, int]:
        """The compile-time constants of both kernels."""
        return {
            "NUM_Q_HEADS": self.num_q_heads,
            "ROWS": self.tile.rows,
            "RANK": self.rank,
            "ROPE": self.rope,
            "ROW": self.row,
            "RANK_PAD": _padded(self.rank),
            "ROPE_PAD": _padded(self.rope),
            "BLOCK_SIZE": self.block_size,
            "KEYS": self.tile.keys,
            "num_warps": self.tile.num_warps,
            "num_stages": self.tile.num_stages,
        }


def _padded(size: int) -> int:
    return max(_MIN_DIM, next_power_of_2(size))


@triton.jit
@no_type_check
def load_queries(
    q_ptrs, present, RANK: tl.constexpr, ROPE: tl.constexpr, RANK_PAD: tl.constexpr, ROPE_PAD: tl.constexpr
):
    """Both parts of the queries, padded with zeros."""
    ranks, ropes = tl.arange(0, RANK_PAD), tl.arange(0, ROPE_PAD)
    plain = tl.load(q_ptrs[:, None] + ranks[None, :], mask=present[:, None] & (ranks < RANK)[None, :], other=0.0)
    rope = tl.load(q_ptrs[:, None] + RANK + ropes[None, :], mask=present[:, None] & (ropes < ROPE)[None, :], other=0.0)
    return plain, rope


@triton.jit
@no_type_check
def accumulate_latents(
    q,
    q_rope,
    acc,
    row_max,
    row_sum,
    query_positions,
    key_start,
    key_end,
    table_ptr,
    layer_ptr,
    scale_log2,
    pool_stride_block,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    ROW: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """The online softmax, in base 2, over the positions `[key_start, key_end)`. CAUSAL: only over positions up to a row's own."""
    ranks, ropes = tl.arange(0, RANK_PAD), tl.arange(0, ROPE_PAD)
    # A tile's block ids are loaded one iteration ahead, so that the loads of latents need not wait for their addresses.
    positions = key_start + tl.arange(0, KEYS)
    next_blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=positions < key_end, other=0)
    for tile_start in range(key_start, key_end, KEYS):
        positions = tile_start + tl.arange(0, KEYS)
        # Data past the end in the last block is stale, perhaps NaN: never load it.
        present = positions < key_end
        blocks = next_blocks
        next_positions = positions + KEYS
        next_blocks = tl.load(table_ptr + next_positions // BLOCK_SIZE, mask=next_positions < key_end, other=0)
        offsets = blocks.to(tl.int64) * pool_stride_block + (positions % BLOCK_SIZE) * ROW
        latents = tl.load(
            layer_ptr + offsets[:, None] + ranks[None, :], mask=present[:, None] & (ranks < RANK)[None, :], other=0.0
        )
        ropes_of_keys = tl.load(
            layer_ptr + offsets[:, None] + RANK + ropes[None, :],
            mask=present[:, None] & (ropes < ROPE)[None, :],
            other=0.0,
        )
        scores = tl.dot(q_rope, tl.trans(ropes_of_keys), input_precision="ieee")
        scores = tl.dot(q, tl.trans(latents), scores, input_precision="ieee") * scale_log2
        visible = present[None, :]
        if CAUSAL:
            visible = visible & (positions[None, :] <= query_positions[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        correction = tl.exp2(row_max - new_max)
        weights = tl.exp2(scores - new_max[:, None])
        row_sum = row_sum * correction + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(latents.dtype), latents, acc * correction[:, None], input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum
