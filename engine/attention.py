"""Paged attention on the CPU: ragged queries over paged K/V, vectorised, no loop over sequences or blocks.

Work is cut into items of (query tile, chunk of keys), as split-KV kernels on a GPU do it: a sequence of many keys is many items, one
of few keys is one, and nobody is padded to the longest. The items of a step depend on lengths and block tables alone, so they are
planned once per step and used by every layer. Each item's partial result comes with its log-sum-exp; partials of one tile are
combined by the usual rescaling (Dao et al., "FlashAttention", 2022, and "Flash-Decoding", 2023).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from kvrelay.engine.batch import Batch, Ints

_MASKED = -1e30  # finite: a row that sees nothing in an item must give a tiny weight, not a NaN
_MAX_TILE = 64
_DECODE_CHUNK = 256  # keys per item
_PREFILL_CHUNK = 512


@dataclass(frozen=True, slots=True)
class _Group:
    """Items of one shape. T queries per tile, C keys per chunk, I items, N tiles."""

    tile_tokens: torch.Tensor  # [N, T] packed token index of each query, clamped for lanes that are not used
    lane_valid: torch.Tensor  # [N, T] bool
    tile_of_item: torch.Tensor  # [I]
    pool_rows: torch.Tensor  # [I * num_kv_heads * blocks per chunk] rows of the flat pool for layer 0 keys
    mask: torch.Tensor  # [I, 1, group * T, C] additive
    is_split: bool  # some tile has more than one item
    chunk: int


class AttentionPlan:
    """The items of one step for one sliding window."""

    def __init__(self, batch: Batch, pool: torch.Tensor, num_q_heads: int, sliding_window: int | None) -> None:
        # pool: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
        _, self._num_layers, _, self._num_kv_heads, self._block_size, self._head_dim = pool.shape
        self._flat_pool = pool.view(-1, self._block_size * self._head_dim)
        self._group_size = num_q_heads // self._num_kv_heads
        self._scale = self._head_dim**-0.5
        self._window = sliding_window
        self._dtype = pool.dtype
        split = batch.num_decode_rows
        counts = np.diff(batch.query_start_loc)
        rows = np.arange(len(batch.rows))
        self._groups = [
            self._plan(batch, rows[:split], 1, _DECODE_CHUNK),
            self._plan(batch, rows[split:], _tile_for(int(counts[split:].max(initial=1))), _PREFILL_CHUNK),
        ]

    def _plan(self, batch: Batch, rows: Ints, tile: int, chunk: int) -> _Group | None:
        if len(rows) == 0:
            return None
        counts = np.diff(batch.query_start_loc)[rows]
        seq_lens = batch.seq_lens[rows]
        # Chunks are whole blocks, and never longer than the longest context asks for.
        longest = int(seq_lens.max())
        chunk = min(max(1, chunk // self._block_size), -(-longest // self._block_size)) * self._block_size

        tiles_per_row = -(-counts // tile)
        row_of_tile = np.repeat(np.arange(len(rows)), tiles_per_row)
        tile_in_row = _ramp(tiles_per_row)
        first_query = tile_in_row * tile  # within the row's queries
        num_lanes = np.minimum(tile, counts[row_of_tile] - first_query)
        first_position = (seq_lens - counts)[row_of_tile] + first_query
        last_position = first_position + num_lanes - 1
        lane = np.arange(tile)
        lane_valid = lane[None, :] < num_lanes[:, None]
        tile_tokens = (batch.query_start_loc[rows][row_of_tile] + first_query)[:, None] + np.minimum(
            lane[None, :], num_lanes[:, None] - 1
        )

        first_key = np.zeros_like(first_position)
        if self._window is not None:
            first_key = np.maximum(0, first_position - self._window + 1)
        first_chunk = first_key // chunk
        chunks_per_tile = last_position // chunk - first_chunk + 1
        tile_of_item = np.repeat(np.arange(len(row_of_tile)), chunks_per_tile)
        chunk_of_item = first_chunk[tile_of_item] + _ramp(chunks_per_tile)

        blocks_per_chunk = chunk // self._block_size
        block_index = chunk_of_item[:, None] * blocks_per_chunk + np.arange(blocks_per_chunk)[None, :]
        tables = batch.block_tables[rows]
        # Lanes behind the last block read any block; the mask hides them.
        block_ids = tables[row_of_tile[tile_of_item][:, None], np.minimum(block_index, tables.shape[1] - 1)]
        heads = np.arange(self._num_kv_heads)
        rows_per_block = self._num_layers * 2 * self._num_kv_heads
        pool_rows = block_ids[:, None, :] * rows_per_block + heads[None, :, None]

        key = chunk_of_item[:, None] * chunk + np.arange(chunk)[None, :]  # [I, C]
        query = (first_position[:, None] + lane[None, :])[tile_of_item]  # [I, T]
        visible = key[:, None, :] <= query[:, :, None]
        if self._window is not None:
            visible &= query[:, :, None] - key[:, None, :] < self._window
        mask = torch.zeros(visible.shape, dtype=self._dtype)
        mask.masked_fill_(~torch.from_numpy(visible), _MASKED)
        mask = mask[:, None].expand(-1, self._group_size, -1, -1).reshape(len(tile_of_item), 1, -1, chunk)
        return _Group(
            tile_tokens=torch.from_numpy(tile_tokens),
            lane_valid=torch.from_numpy(lane_valid),
            tile_of_item=torch.from_numpy(tile_of_item),
            pool_rows=torch.from_numpy(pool_rows.reshape(-1)),
            mask=mask,
            is_split=bool((chunks_per_tile > 1).any()),
            chunk=chunk,
        )

    def run(self, query: torch.Tensor, layer: int, out: torch.Tensor) -> None:
        """Attend with ``query`` ``[num_tokens, num_q_heads, head_dim]``, K/V of all positions already in the pool.

        Writes every row of ``out``, of the same shape.
        """
        for group in self._groups:
            if group is not None:
                self._run_group(group, query, layer, out)

    def _run_group(self, group: _Group, query: torch.Tensor, layer: int, out: torch.Tensor) -> None:
        num_items = len(group.tile_of_item)
        num_tiles, tile = group.tile_tokens.shape
        heads, head_dim = self._num_kv_heads, self._head_dim
        rows = group.pool_rows + layer * 2 * heads
        keys = self._flat_pool.index_select(0, rows).view(num_items, heads, group.chunk, head_dim)
        values = self._flat_pool.index_select(0, rows + heads).view(num_items, heads, group.chunk, head_dim)
        # Query heads of one kv head are rows of one matrix: [N, kv_heads, group * T, head_dim]
        tiles = query[group.tile_tokens].view(num_tiles, tile, heads, self._group_size, head_dim)
        tiles = tiles.permute(0, 2, 3, 1, 4).reshape(num_tiles, heads, self._group_size * tile, head_dim)
        items = tiles[group.tile_of_item] if group.is_split else tiles
        partial, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            items, keys, values, attn_mask=group.mask, scale=self._scale
        )
        if group.is_split:
            partial = _combine(partial, lse, group.tile_of_item, num_tiles)
        # [N, kv_heads, group, T, head_dim] -> [N, T, q_heads, head_dim]
        result = partial.view(num_tiles, heads, self._group_size, tile, head_dim).permute(0, 3, 1, 2, 4)
        result = result.reshape(num_tiles, tile, heads * self._group_size, head_dim)
        if tile == 1:
            out[group.tile_tokens[:, 0]] = result[:, 0]
        else:
            out[group.tile_tokens[group.lane_valid]] = result[group.lane_valid]


def _combine(partial: torch.Tensor, lse: torch.Tensor, tile_of_item: torch.Tensor, num_tiles: int) -> torch.Tensor:
    # partial [I, heads, rows, head_dim], lse [I, heads, rows] -> [N, heads, rows, head_dim]
    shape = (num_tiles, *lse.shape[1:])
    index = tile_of_item[:, None, None].expand_as(lse)
    highest = torch.full(shape, -math.inf, dtype=lse.dtype).scatter_reduce_(0, index, lse, "amax")
    weights = (lse - highest[tile_of_item]).exp_()
    total = torch.zeros(shape, dtype=lse.dtype).index_add_(0, tile_of_item, weights)
    weighted = partial.float().mul_(weights[..., None])
    combined = torch.zeros((*shape, partial.shape[-1]), dtype=torch.float32).index_add_(0, tile_of_item, weighted)
    return combined.div_(total[..., None]).to(partial.dtype)


def _tile_for(max_query_len: int) -> int:
    """Queries per tile: the next power of two, so that short prompts waste little."""
    return min(_MAX_TILE, 1 << (max_query_len - 1).bit_length())


def _ramp(counts: Ints) -> Ints:
    """``[0..counts[0]-1, 0..counts[1]-1, …]``"""
    total = int(counts.sum())
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    ramp: Ints = np.arange(total) - starts
    return ramp
