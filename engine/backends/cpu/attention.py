"""Paged attention on the CPU: ragged queries over paged K/V, vectorised, without a loop over sequences or blocks.

Work is cut into items of (query tile, chunk of keys), like split-KV kernels on a GPU; see
:mod:`kvrelay.engine.backends.cpu.attention_items`. All layers of a group use one ``AttentionPlan`` per step. A tile's partial
results are combined by their log-sum-exp (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao,
"Flash-Decoding", 2023).

Why not ``scaled_dot_product_attention``: on Zen 4 its flash kernel takes five times as long as two ``bmm`` for bf16 decode, twice
as long for bf16 prefill, and the same for fp32 prefill. It is faster only for a lone decode step, where the number of calls
dominates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from kvrelay.common.kv_geometry import Window, window_at
from kvrelay.engine.backends.cpu.attention_items import ItemPlanner, Piece, Tiles, tile_for
from kvrelay.engine.backends.cpu.pool_rows import GatherScratch, PoolRows
from kvrelay.engine.kv.views import GroupKv
from kvrelay.engine.models.ops import PLAIN, Scores
from kvrelay.engine.step.batch import Batch
from kvrelay.engine.step.slots import Ints


@dataclass(frozen=True, slots=True)
class _LoneQuery:
    """One sequence's decode step, alone in the batch."""

    pool_rows: torch.Tensor  # [num_kinds * num_kv_heads * blocks] of layer 0: keys, then values; see PoolRows
    seq_len: int


class AttentionPlan:
    """The items of one step for one group of layers."""

    def __init__(
        self,
        batch: Batch,
        kv: GroupKv,
        num_q_heads: int,
        window: Window | None,
        scratch: GatherScratch,
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
        self._rows = PoolRows(kv, scratch)
        sizes, self._block_size = kv.sizes, kv.block_size
        self._num_kv_heads = sizes.num_kv_heads
        self._value_dim = sizes.value_size if latent_rank is None else latent_rank
        self._has_values = latent_rank is None
        self._group_size = num_q_heads // self._num_kv_heads
        tables = batch.block_tables(group)
        planner = ItemPlanner(kv, self._rows, tables, num_q_heads, window)
        split, end = batch.num_decode_rows, len(batch.rows)
        self._groups: list[Tiles] = []
        self._lone_query: _LoneQuery | None = None
        sees_all = window is None or batch.seq_lens[0] <= window_at(window, batch.seq_lens[0] - 1)
        if has_plain_scores and split == 1 and end == 1 and sees_all:
            self._lone_query = self._plan_lone_query(tables[0], int(batch.seq_lens[0]))
        elif split > 0:
            self._groups.append(planner.plan(batch, 0, split, 1))
        if split < end:
            last_seen = batch.last_seen if sees_ahead else None
            self._groups.append(planner.plan(batch, split, end, tile_for(batch.max_query_len), last_seen))

    def run(self, query: torch.Tensor, layer: int, out: torch.Tensor, scores: Scores = PLAIN) -> None:
        """Attend with ``query`` ``[num_tokens, num_q_heads, head_dim]``. K/V of all positions are already in the pool.

        Of longer keys the first ``head_dim`` numbers count.
        Writes every row of ``out`` ``[num_tokens, num_q_heads, value_dim]``. ``bmm`` rounds scores to the model's dtype once.
        Softmax and the combination of items run in fp32.
        """
        if self._lone_query is not None:
            self._run_lone_query(self._lone_query, query, layer, out, scores)
        for group in self._groups:
            self._run_group(group, query, layer, out, scores)

    def _plan_lone_query(self, table: Ints, seq_len: int) -> _LoneQuery:
        block_ids = table[: -(-seq_len // self._block_size)]
        rows = self._rows.of_blocks(block_ids[None, :], np.arange(self._num_kv_heads)[:, None])
        return _LoneQuery(torch.from_numpy(rows.reshape(-1)), seq_len)

    def _run_lone_query(
        self, lone: _LoneQuery, query: torch.Tensor, layer: int, out: torch.Tensor, scores: Scores
    ) -> None:
        heads, head_dim = self._num_kv_heads, query.shape[-1]
        keys, values = (
            gathered.view(1, heads, -1, gathered.shape[1] // self._block_size)[:, :, : lone.seq_len]
            for gathered in self._rows.gather(lone.pool_rows, layer)
        )
        # The query heads of one KV head form one matrix.
        rows = query.reshape(1, heads, self._group_size, head_dim)
        attended = F.scaled_dot_product_attention(
            rows, keys[..., :head_dim], values[..., : self._value_dim], scale=scores.scale
        )
        out.copy_(attended.view_as(out))

    def _run_group(self, group: Tiles, query: torch.Tensor, layer: int, out: torch.Tensor, scores: Scores) -> None:
        heads, per_head, head_dim = self._num_kv_heads, self._group_size, query.shape[-1]
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
        self, group: Tiles, piece: Piece, tiles: torch.Tensor, layer: int, options: Scores
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # -> ([n, kv_heads, group * tile, value_dim], [n, kv_heads, group * tile] fp32 if results are summed up)
        heads, head_dim, num_items = self._num_kv_heads, tiles.shape[-1], len(piece.tiles)
        keys, values = (
            gathered.view(num_items * heads, group.chunk, gathered.shape[1] // self._block_size)
            for gathered in self._rows.gather(piece.pool_rows, layer)
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
        scores = scores.baddbmm_(items, keys[..., :head_dim].mT, beta=0, alpha=scale).float()
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

    def add(self, piece: Piece, partial: torch.Tensor, lse: torch.Tensor | None) -> None:
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
