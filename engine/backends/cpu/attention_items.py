"""How attention on the CPU cuts a step's queries and keys into items.

An item is a tile of queries with a chunk of keys. A long sequence has many items, a short one has one, and none is padded to the
longest. Items of one shape are computed in pieces, which bounds memory and keeps K/V and scores in cache. All of this depends only
on lengths and block tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.common.kv_geometry import Window, window_at
from kvrelay.engine.backends.cpu.pool_rows import PIECE_KV_BYTES, PoolRows
from kvrelay.engine.kv.views import GroupKv
from kvrelay.engine.step.batch import Batch
from kvrelay.engine.step.slots import Floats, Ints

# Half the lowest fp32: a row without visible keys in an item gets a vanishing weight, and differences do not overflow to -inf.
_MASKED = torch.finfo(torch.float32).min / 2
_CHUNK = 256  # keys per item
_CHUNK_STEP = 64  # shorter chunks are multiples of this
_MAX_TILE = 64  # queries per item
_MAX_PIECE_ITEMS = 24
_PIECE_SCORES = 2**19  # fp32 scores of one piece


@dataclass(frozen=True, slots=True)
class Piece:
    """n items that are computed at once, all of tiles ``[first_tile, end_tile)``. Items that need a mask come last."""

    pool_rows: torch.Tensor  # [num_kinds * n * num_kv_heads * blocks per chunk] of layer 0: keys, then values
    dead: torch.Tensor  # flat indices of the items' keys that no query of their tiles sees
    tiles: torch.Tensor  # [n] the item's tile, counted from first_tile
    first_tile: int
    end_tile: int
    num_unmasked: int
    mask: torch.Tensor  # [n - num_unmasked, 1, 1, tile, chunk] fp32, additive


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of one shape: T queries, chunks of C keys."""

    tile: int
    chunk: int
    num_tiles: int
    queries: torch.Tensor | None  # [num_tiles * T] token of each lane in the batch; None: tokens in order
    lanes: torch.Tensor | None  # [tokens of the group] lane of each token, in batch order; None as above
    tokens: slice  # the group's tokens in the batch
    pieces: list[Piece]
    is_split: bool  # whether some tile has more than one item


class ItemPlanner:
    """Cuts the queries and keys of one group of layers."""

    def __init__(self, kv: GroupKv, rows: PoolRows, tables: Ints, num_q_heads: int, window: Window | None) -> None:
        """``rows``: of ``kv``. ``tables`` ``[rows of the batch, blocks]``: the group's."""
        self._rows = rows
        self._block_size = kv.block_size
        self._num_kv_heads = kv.sizes.num_kv_heads
        self._row_nbytes = kv.sizes.count * kv.keys.element_size()
        self._num_q_heads = num_q_heads
        self._window = window
        self._tables = tables

    def plan(self, batch: Batch, start: int, end: int, tile: int, last_seen: Ints | None = None) -> Tiles:
        """The items of rows ``[start, end)`` of the batch, in tiles of ``tile`` queries.

        ``last_seen``: per token of the batch, the last position that it sees; None: its own.
        """
        # All arrays below are indexed by tile or by item.
        counts = np.diff(batch.query_start_loc)[start:end]
        seq_lens = batch.seq_lens[start:end]
        chunk = self._chunk_for(int(seq_lens.max()))

        tiles_per_row = -(-counts // tile)
        row_of_tile = np.repeat(np.arange(len(counts)), tiles_per_row)
        first_query = _ramp(tiles_per_row) * tile  # within the row's queries
        num_lanes = np.minimum(tile, counts[row_of_tile] - first_query)
        first_position = (seq_lens - counts)[row_of_tile] + first_query
        last_position = first_position + num_lanes - 1
        first_token = batch.query_start_loc[start:end][row_of_tile] + first_query
        # With keys ahead, a tile's tokens reach up to the next one's first token, and the last one's to the end of the batch.
        last_key = last_position if last_seen is None else np.maximum.reduceat(last_seen, first_token)

        first_key = np.zeros_like(first_position)
        if self._window is not None:
            first_key = np.maximum(0, first_position - window_at(self._window, first_position) + 1)
        first_chunk = first_key // chunk
        chunks_per_tile = last_key // chunk - first_chunk + 1
        tile_of_item = np.repeat(np.arange(len(row_of_tile)), chunks_per_tile)
        item_key = (first_chunk[tile_of_item] + _ramp(chunks_per_tile)) * chunk  # first position of the chunk

        # An item needs no mask if its first query sees its last key, and its last query its first key.
        is_masked = item_key + chunk - 1 > first_position[tile_of_item]
        if self._window is not None:
            is_masked |= (last_position - window_at(self._window, last_position))[tile_of_item] >= item_key
        is_split = bool((chunks_per_tile > 1).any())
        is_masked |= not is_split  # keeps items in the order of tiles if each tile has one item
        piece_len = self._items_per_piece(tile, chunk)
        order = np.lexsort((is_masked, np.arange(len(tile_of_item)) // piece_len))
        tiles, keys, masked = tile_of_item[order], item_key[order], is_masked[order]
        pool_rows = self._pool_rows(self._tables[start:end], chunk, keys, row_of_tile[tiles], first_key[tiles])
        is_dead = self._is_dead(chunk, keys, first_key[tiles], last_key[tiles])
        # Unused lanes repeat the tile's last query.
        lane = np.arange(tile)
        tokens = first_token[:, None] + np.minimum(lane[None, :], num_lanes[:, None] - 1)
        of_masked = tiles[masked]
        seen = None if last_seen is None else last_seen[tokens[of_masked]]
        mask = self._mask(chunk, tile, keys[masked], first_position[of_masked], seen)
        num_masked = np.concatenate(([0], np.cumsum(masked)))
        starts = np.arange(0, len(order), piece_len)
        # Arrays are made for all pieces at once: a step of many long contexts has a hundred pieces.
        of_pieces = zip(
            starts.tolist(),
            [*starts[1:].tolist(), len(order)],
            np.minimum.reduceat(tiles, starts).tolist(),
            np.maximum.reduceat(tiles, starts).tolist(),
            strict=True,
        )
        pieces = [
            Piece(
                pool_rows=torch.from_numpy(pool_rows[:, first:stop].reshape(-1)),
                dead=torch.from_numpy(self._dead_rows(is_dead[first:stop])),
                tiles=torch.from_numpy(tiles[first:stop] - first_tile),
                first_tile=first_tile,
                end_tile=last_tile + 1,
                num_unmasked=stop - first - int(num_masked[stop] - num_masked[first]),
                mask=torch.from_numpy(mask[num_masked[first] : num_masked[stop]]),
            )
            for first, stop, first_tile, last_tile in of_pieces
        ]
        queries, lanes = None, None
        if tile > 1:
            queries, lanes = tokens.reshape(-1), np.flatnonzero(lane[None, :] < num_lanes[:, None])
        return Tiles(
            tile=tile,
            chunk=chunk,
            num_tiles=len(row_of_tile),
            queries=None if queries is None else torch.from_numpy(queries),
            lanes=None if lanes is None else torch.from_numpy(lanes),
            tokens=slice(int(batch.query_start_loc[start]), int(batch.query_start_loc[end])),
            pieces=pieces,
            is_split=is_split,
        )

    def _pool_rows(self, tables: Ints, chunk: int, keys: Ints, rows: Ints, first_keys: Ints) -> Ints:
        """The rows of items' keys and values in layer 0, ``[num_kinds, num_items, num_kv_heads, blocks of a chunk]``; see PoolRows.

        ``first_keys``: per item, the first position that a query of its tile sees.
        """
        block_index = keys[:, None] // self._block_size + np.arange(chunk // self._block_size)[None, :]
        # Places after the last block, or before the window, read some block of the table, and the mask hides them. Blocks before
        # the window may belong to others and hold NaN, so they are not read.
        block_index = np.maximum(block_index, first_keys[:, None] // self._block_size)
        block_ids = tables[rows[:, None], np.minimum(block_index, tables.shape[1] - 1)]
        return self._rows.of_blocks(block_ids[:, None, :], np.arange(self._num_kv_heads)[:, None])

    def _is_dead(self, chunk: int, keys: Ints, first_keys: Ints, last_keys: Ints) -> npt.NDArray[np.bool_]:
        """Whether no query of an item's tile sees a key, ``[num_items, chunk]``."""
        key = keys[:, None] + np.arange(chunk)
        dead: npt.NDArray[np.bool_] = (key > last_keys[:, None]) | (key < first_keys[:, None])
        return dead

    def _dead_rows(self, is_dead: npt.NDArray[np.bool_]) -> Ints:
        """Indices of dead keys among the gathered keys ``[num_items * num_kv_heads * chunk, key_size]``; the same for values."""
        num_items, chunk = is_dead.shape
        of_heads = np.broadcast_to(is_dead[:, None], (num_items, self._num_kv_heads, chunk))
        return np.flatnonzero(of_heads)

    def _mask(self, chunk: int, tile: int, keys: Ints, positions: Ints, seen: Ints | None) -> Floats:
        """The additive mask ``[num_items, 1, 1, tile, chunk]``.

        ``positions``: of each item's first query. ``seen`` ``[num_items, tile]``: the last position that each query sees; None: its
        own.
        """
        key = (keys[:, None] + np.arange(chunk))[:, None, :]  # [num_items, 1, chunk]
        query = (positions[:, None] + np.arange(tile))[:, :, None]  # [num_items, tile, 1]
        hidden = key > (query if seen is None else seen[:, :, None])
        if self._window is not None:
            hidden |= query - key >= window_at(self._window, query)
        return np.where(hidden, np.float32(_MASKED), np.float32(0.0))[:, None, None]

    def _chunk_for(self, longest: int) -> int:
        """Keys per item: whole blocks, fewer than usual if all contexts are short, and only few different lengths.

        oneDNN compiles a kernel for every new shape, which takes a millisecond or two.
        """
        step = min(_CHUNK_STEP, 1 << (longest - 1).bit_length())
        wanted = min(_CHUNK, -(-longest // step) * step)
        return max(1, wanted // self._block_size) * self._block_size

    def _items_per_piece(self, tile: int, chunk: int) -> int:
        kv_bytes = chunk * self._row_nbytes
        scores = self._num_q_heads * tile * chunk
        return max(1, min(_MAX_PIECE_ITEMS, PIECE_KV_BYTES // kv_bytes, _PIECE_SCORES // scores))


def tile_for(max_query_len: int) -> int:
    """Queries per tile: a power of two, so that short prompts waste little."""
    return min(_MAX_TILE, 1 << (max_query_len - 1).bit_length())


def _ramp(counts: Ints) -> Ints:
    """``[0..counts[0]-1, 0..counts[1]-1, …]``"""
    total = int(counts.sum())
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    ramp: Ints = np.arange(total) - starts
    return ramp
