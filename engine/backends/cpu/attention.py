"""Paged attention on the CPU: ragged queries over paged K/V, vectorised, without a loop over sequences or blocks.

Work is cut into items of (query tile, chunk of keys), like split-KV kernels on a GPU. A long sequence has many items, a short one
has one, and none is padded to the longest. The items depend only on lengths and block tables, so all layers use one
``AttentionPlan`` per step. Items are computed in pieces, which bounds memory and keeps K/V and scores in cache. A tile's partial
results are combined by their log-sum-exp (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao,
"Flash-Decoding", 2023).

Why not ``scaled_dot_product_attention``: on Zen 4 its flash kernel takes five times as long as two ``bmm`` for bf16 decode, twice
as long for bf16 prefill, and the same for fp32 prefill. It is faster only for a lone decode step, where the number of calls
dominates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from kvrelay.common.kv_geometry import Window, window_at
from kvrelay.engine.kv.views import GroupKv
from kvrelay.engine.models.ops import PLAIN, Scores
from kvrelay.engine.step.batch import Batch
from kvrelay.engine.step.slots import Floats, Ints

# Half the lowest fp32: a row without visible keys in an item gets a vanishing weight, and differences do not overflow to -inf.
_MASKED = torch.finfo(torch.float32).min / 2
_CHUNK = 256  # keys per item
_CHUNK_STEP = 64  # shorter chunks are multiples of this
_MAX_TILE = 64  # queries per item
_PIECE_KV_BYTES = 2**22  # keys and values of one piece
_MAX_PIECE_ITEMS = 24
_PIECE_SCORES = 2**19  # fp32 scores of one piece


class AttentionScratch:
    """A buffer in which pieces gather K/V. One per model, because the page faults of new memory cost more than the copy."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._buffer = torch.empty(_PIECE_KV_BYTES // dtype.itemsize, dtype=dtype)

    def flat(self, count: int) -> torch.Tensor:
        """A buffer of ``count`` numbers, valid until the next call."""
        if self._buffer.numel() < count:  # a single item may exceed the size of a piece
            self._buffer = torch.empty(count, dtype=self._buffer.dtype)
        return self._buffer[:count]


class _Rows:
    """A group's pool as rows to gather. A row is all keys, or all values, of one head in one block.

    Rows of keys and values may differ in length, and other groups use the same memory. So a row's number is its start, counted in
    the largest unit that divides all starts.
    """

    def __init__(self, kv: GroupKv) -> None:
        self._kv = kv
        sizes, block_size = kv.sizes, kv.block_size
        self.lens = (block_size * sizes.key_size, block_size * sizes.value_size)
        first_value = sizes.num_kv_heads * self.lens[0]
        self._unit = math.gcd(kv.block_stride, *self.lens)
        # For keys, and for values if there are any: the start of the first head in a layer, and the step to the next head.
        self._kinds = [(0, self.lens[0] // self._unit), (first_value // self._unit, self.lens[1] // self._unit)]
        self._num_kinds = 2 if sizes.value_size else 1
        self.keys = self._view(kv.keys, self.lens[0])
        self.values = self._view(kv.keys, self.lens[1])

    def _view(self, keys: torch.Tensor, row_len: int) -> torch.Tensor:
        end = keys.shape[0] * keys.stride(0)
        return keys.as_strided(((end - row_len) // self._unit + 1, row_len), (self._unit, 1))

    def of_blocks(self, block_ids: Ints, heads: Ints) -> Ints:
        """``[num_kinds, *shape]``: rows of keys and values in layer 0. ``block_ids`` and ``heads`` broadcast to the shape."""
        first = block_ids * (self._kv.block_stride // self._unit)
        rows: Ints = np.stack([first + start + heads * step for start, step in self._kinds[: self._num_kinds]])
        return rows

    def of_layer(self, layer: int) -> int:
        """The offset from layer 0's rows to those of ``layer``."""
        return layer * (self._kv.layer_stride // self._unit)


@dataclass(frozen=True, slots=True)
class _Piece:
    """n items that are computed at once, all of tiles ``[first_tile, end_tile)``. Items that need a mask come last."""

    pool_rows: (
        torch.Tensor
    )  # [num_kinds * n * num_kv_heads * blocks per chunk] of layer 0: keys, then values; see _Rows
    dead: torch.Tensor  # flat indices of the items' keys that no query of their tiles sees
    tiles: torch.Tensor  # [n] the item's tile, counted from first_tile
    first_tile: int
    end_tile: int
    num_unmasked: int
    mask: torch.Tensor  # [n - num_unmasked, 1, 1, tile, chunk] fp32, additive


@dataclass(frozen=True, slots=True)
class _LoneQuery:
    """One sequence's decode step, alone in the batch."""

    pool_rows: torch.Tensor  # [num_kinds * num_kv_heads * blocks] of layer 0: keys, then values; see _Rows
    seq_len: int


@dataclass(frozen=True, slots=True)
class _Group:
    """Tiles of one shape: T queries, chunks of C keys."""

    tile: int
    chunk: int
    num_tiles: int
    queries: torch.Tensor | None  # [num_tiles * T] token of each lane in the batch; None: tokens in order
    lanes: torch.Tensor | None  # [tokens of the group] lane of each token, in batch order; None as above
    tokens: slice  # the group's tokens in the batch
    pieces: list[_Piece]
    is_split: bool  # whether some tile has more than one item


class AttentionPlan:
    """The items of one step for one group of layers."""

    def __init__(
        self,
        batch: Batch,
        kv: GroupKv,
        num_q_heads: int,
        window: Window | None,
        scratch: AttentionScratch,
        *,
        group: int = 0,
        has_plain_scores: bool = True,
        latent_rank: int | None = None,
        sees_ahead: bool = True,
    ) -> None:
        """``group``: whose block tables to read. ``has_plain_scores``: ``run`` gets no ``Scores`` with a softcap or sinks.

        ``latent_rank``: the group keeps only keys, and the first ``latent_rank`` numbers of each are the value. ``sees_ahead``: see
        :meth:`ModelShape.sees_ahead`; if not, tokens see none behind their own position.
        """
        self._rows = _Rows(kv)
        sizes, self._block_size = kv.sizes, kv.block_size
        self._num_kv_heads, self._head_dim = sizes.num_kv_heads, sizes.key_size
        self._value_dim = sizes.value_size if latent_rank is None else latent_rank
        self._has_values = latent_rank is None
        self._row_nbytes = sizes.count * kv.keys.element_size()
        self._group_size = num_q_heads // self._num_kv_heads
        self._window = window
        self._tables = batch.block_tables(group)
        self._scratch = scratch
        split, end = batch.num_decode_rows, len(batch.rows)
        self._groups = []
        self._lone_query: _LoneQuery | None = None
        sees_all = window is None or batch.seq_lens[0] <= window_at(window, batch.seq_lens[0] - 1)
        if has_plain_scores and split == 1 and end == 1 and sees_all:
            self._lone_query = self._plan_lone_query(batch)
        elif split > 0:
            self._groups.append(self._plan(batch, 0, split, 1, None))
        if split < end:
            last_seen = batch.last_seen if sees_ahead else None
            self._groups.append(self._plan(batch, split, end, _tile_for(batch.max_query_len), last_seen))

    def _plan(self, batch: Batch, start: int, end: int, tile: int, last_seen: Ints | None) -> _Group:
        # Rows [start, end) of the batch; all arrays below are indexed by tile or by item.
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
            _Piece(
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
        return _Group(
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
        """The rows of items' keys and values in layer 0, ``[num_kinds, num_items, num_kv_heads, blocks of a chunk]``; see _Rows.

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
        scores = self._num_kv_heads * self._group_size * tile * chunk
        return max(1, min(_MAX_PIECE_ITEMS, _PIECE_KV_BYTES // kv_bytes, _PIECE_SCORES // scores))

    def run(self, query: torch.Tensor, layer: int, out: torch.Tensor, scores: Scores = PLAIN) -> None:
        """Attend with ``query`` ``[num_tokens, num_q_heads, head_dim]``. K/V of all positions are already in the pool.

        Writes every row of ``out`` ``[num_tokens, num_q_heads, value_dim]``. ``bmm`` rounds scores to the model's dtype once.
        Softmax and the combination of items run in fp32.
        """
        if self._lone_query is not None:
            self._run_lone_query(self._lone_query, query, layer, out, scores)
        for group in self._groups:
            self._run_group(group, query, layer, out, scores)

    def _plan_lone_query(self, batch: Batch) -> _LoneQuery:
        seq_len = int(batch.seq_lens[0])
        block_ids = self._tables[0, : -(-seq_len // self._block_size)]
        rows = self._rows.of_blocks(block_ids[None, :], np.arange(self._num_kv_heads)[:, None])
        return _LoneQuery(torch.from_numpy(rows.reshape(-1)), seq_len)

    def _run_lone_query(
        self, lone: _LoneQuery, query: torch.Tensor, layer: int, out: torch.Tensor, scores: Scores
    ) -> None:
        heads, head_dim = self._num_kv_heads, self._head_dim
        keys, values = (
            gathered.view(1, heads, -1, gathered.shape[1] // self._block_size)[:, :, : lone.seq_len]
            for gathered in self._gather(lone.pool_rows, layer)
        )
        # The query heads of one KV head form one matrix.
        rows = query.reshape(1, heads, self._group_size, head_dim)
        attended = F.scaled_dot_product_attention(rows, keys, values[..., : self._value_dim], scale=scores.scale)
        out.copy_(attended.view_as(out))

    def _gather(self, pool_rows: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[num_kv_heads * blocks, block_size * size]``, one tensor for latents. Valid until the next call."""
        rows, (key_len, value_len) = pool_rows + self._rows.of_layer(layer), self._rows.lens
        if key_len == value_len or not value_len:
            gathered = self._scratch.flat(len(rows) * key_len).view(len(rows), key_len)
            torch.index_select(self._rows.keys, 0, rows, out=gathered)
            keys, *values = gathered.chunk(2 if value_len else 1)
            return keys, values[0] if values else keys
        num_rows = len(rows) // 2
        scratch = self._scratch.flat(num_rows * (key_len + value_len))
        keys = scratch[: num_rows * key_len].view(num_rows, key_len)
        flat_values = scratch[num_rows * key_len :].view(num_rows, value_len)
        torch.index_select(self._rows.keys, 0, rows[:num_rows], out=keys)
        torch.index_select(self._rows.values, 0, rows[num_rows:], out=flat_values)
        return keys, flat_values

    def _run_group(self, group: _Group, query: torch.Tensor, layer: int, out: torch.Tensor, scores: Scores) -> None:
        heads, per_head, head_dim = self._num_kv_heads, self._group_size, self._head_dim
        num_tiles, tile = group.num_tiles, group.tile
        lanes = query[group.tokens] if group.queries is None else query.index_select(0, group.queries)
        # Query heads of one KV head form one matrix: [num_tiles, kv_heads, group * tile, head_dim]
        tiles = lanes.view(num_tiles, tile, heads, per_head, head_dim).permute(0, 2, 3, 1, 4)
        tiles = tiles.reshape(num_tiles, heads, per_head * tile, head_dim)
        if group.is_split or scores.sinks is not None:
            sums = _OnlineSums(torch.Size((*tiles.shape[:-1], self._value_dim)))
            if scores.sinks is not None:
                sums.add_sinks(scores.sinks.view(1, heads, per_head).repeat_interleave(tile, dim=-1))
            for piece in group.pieces:
                partial, lse = self._attend(group, piece, tiles, layer, scores)
                sums.add(piece, partial, lse)
            result = sums.result(query.dtype)
        else:
            partials = [self._attend(group, piece, tiles, layer, scores)[0] for piece in group.pieces]
            result = partials[0] if len(partials) == 1 else torch.cat(partials)
        # [num_tiles, kv_heads, group, tile, value_dim] -> [num_tiles * tile, q_heads, value_dim]
        result = result.view(num_tiles, heads, per_head, tile, self._value_dim).permute(0, 3, 1, 2, 4)
        result = result.reshape(num_tiles * tile, heads * per_head, self._value_dim)
        out[group.tokens] = result if group.lanes is None else result.index_select(0, group.lanes)

    def _attend(
        self, group: _Group, piece: _Piece, tiles: torch.Tensor, layer: int, options: Scores
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # -> ([n, kv_heads, group * tile, value_dim], [n, kv_heads, group * tile] fp32 if results are summed up)
        heads, head_dim, num_items = self._num_kv_heads, self._head_dim, len(piece.tiles)
        keys, values = (
            gathered.view(num_items * heads, group.chunk, gathered.shape[1] // self._block_size)
            for gathered in self._gather(piece.pool_rows, layer)
        )
        if len(piece.dead):
            # Keys that no query sees may belong to others and hold NaN. A mask does not help, because 0 * NaN is NaN.
            for gathered in (keys, values) if self._has_values else (keys,):
                gathered.view(-1, gathered.shape[2]).index_fill_(0, piece.dead, 0.0)
        values = values[..., : self._value_dim]
        items = tiles[piece.first_tile : piece.end_tile]
        if group.is_split:
            items = items[piece.tiles]
        items = items.reshape(num_items * heads, -1, head_dim)
        num_rows = items.shape[1]
        scores = items.new_empty((num_items * heads, num_rows, group.chunk))
        scale = head_dim**-0.5 if options.scale is None else options.scale
        scores = scores.baddbmm_(items, keys.mT, beta=0, alpha=scale).float()
        if options.softcap is not None:
            scores = scores.div_(options.softcap).tanh_().mul_(options.softcap)
        by_lane = scores.view(num_items, heads, self._group_size, group.tile, group.chunk)
        by_lane[piece.num_unmasked :] += piece.mask
        weights = torch.softmax(scores, dim=-1)
        partial = torch.bmm(weights.to(values.dtype), values).view(num_items, heads, num_rows, self._value_dim)
        if not group.is_split and options.sinks is None:
            return partial, None
        # The likeliest key's weight is exp(0) / sum, so the log-sum-exp costs two maxima and no second exp.
        lse = scores.amax(dim=-1) - weights.amax(dim=-1).log_()
        return partial, lse.view(num_items, heads, num_rows)


class _OnlineSums:
    """Sums of partial results, each weighted by exp(lse) relative to the largest lse so far."""

    def __init__(self, shape: torch.Size) -> None:
        # shape: [num_tiles, kv_heads, rows, value_dim]
        self._sums = torch.zeros(shape)
        self._weights = torch.zeros(shape[:-1])
        self._highest = torch.full(shape[:-1], torch.finfo(torch.float32).min)

    def add_sinks(self, sinks: torch.Tensor) -> None:
        """Add a key without a value to every row, before all pieces. ``sinks`` ``[1, kv_heads, rows]`` are the scores."""
        self._highest = sinks.float().expand_as(self._highest).clone()
        self._weights.fill_(1.0)

    def add(self, piece: _Piece, partial: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Add one piece."""
        assert lse is not None
        tiles = slice(piece.first_tile, piece.end_tile)
        before = self._highest[tiles]
        highest = before.scatter_reduce(0, piece.tiles[:, None, None].expand_as(lse), lse, "amax")
        shrink = (before - highest).exp_()
        weights = (lse - highest[piece.tiles]).exp_()
        self._highest[tiles] = highest
        self._weights[tiles].mul_(shrink).index_add_(0, piece.tiles, weights)
        weighted = partial.float().mul_(weights[..., None])
        self._sums[tiles].mul_(shrink[..., None]).index_add_(0, piece.tiles, weighted)

    def result(self, dtype: torch.dtype) -> torch.Tensor:
        """The weighted mean of all partial results."""
        return self._sums.div_(self._weights[..., None]).to(dtype)


def _tile_for(max_query_len: int) -> int:
    """Queries per tile: a power of two, so that short prompts waste little."""
    return min(_MAX_TILE, 1 << (max_query_len - 1).bit_length())


def _ramp(counts: Ints) -> Ints:
    """``[0..counts[0]-1, 0..counts[1]-1, …]``"""
    total = int(counts.sum())
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    ramp: Ints = np.arange(total) - starts
    return ramp
