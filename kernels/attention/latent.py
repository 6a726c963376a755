"""Attention over the paged pool of latents (MLA: DeepSeek-V2, 2024), for single tokens and for prompts.

All query heads share one key per position, the stored latent: `rank` numbers, then a rotated part. The first `rank` numbers are
also the value. So a tile of latents is loaded once for scores and sums. Queries must be absorbed: multiplied by the matrix that
makes keys of latents. Not for keys and values by heads; see `decode_attention` and `prefill_attention`.

Single tokens are cut into splits as in `decode_attention` (`splits`). The rows of a program are then heads of one token; for
prompts they are (token, head) pairs.
"""

from __future__ import annotations

import math
from typing import no_type_check

import torch
import triton
import triton.language as tl

from kvrelay.kernels.attention.decode_workspace import MIN_SEQS, DecodeWorkspace
from kvrelay.kernels.attention.latent_tiles import LatentSizes, Tile, accumulate_latents, load_queries
from kvrelay.kernels.attention.splits import (
    MIN_KEYS_PER_SPLIT,
    find_split,
    most_splits,
    most_waves,
)
from kvrelay.kernels.attention.tiles import LOG2_E
from kvrelay.kernels.checks import next_power_of_2, require_int32, require_shape


def latent_programs(num_q_heads: int) -> int:
    """The number of programs per split; pass it to `splits_for_device` as `num_kv_heads`."""
    return -(-num_q_heads // Tile.rows)


def latent_attention_reference(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    rank: int,
    scale: float,
    max_query_len: int,
    out: torch.Tensor,
) -> None:
    """The same contract as `latent_prefill_attention`, in at least fp32; reads lengths on the host."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    starts, block_size = query_start_loc.tolist(), pool.shape[4]
    for index, seq_len in enumerate(seq_lens.tolist()):
        start, end = starts[index], starts[index + 1]
        assert end - start <= min(max_query_len, seq_len), (start, end, max_query_len, seq_len)
        blocks = block_tables[index, : -(-seq_len // block_size)].long()
        latents = pool[blocks, layer, 0, 0].flatten(0, 1)[:seq_len, : q.shape[2]].to(dtype)
        scores = q[start:end].to(dtype) @ latents.T * scale  # [query_len, num_q_heads, seq_len]
        positions = torch.arange(seq_len - (end - start), seq_len, device=q.device)[:, None]
        hidden = torch.arange(seq_len, device=q.device)[None, :] > positions
        weights = scores.masked_fill(hidden[:, None], -math.inf).softmax(-1)
        out[start:end] = (weights @ latents[:, :rank]).to(out.dtype)


@triton.jit(
    do_not_specialize=["num_seqs", "max_waves", "block_tables_stride_seq"],
    do_not_specialize_on_alignment=["block_tables_ptr"],
)
@no_type_check
def _latent_split_kernel(
    q_ptr,
    pool_ptr,
    block_tables_ptr,
    seq_lens_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    plan_ptr,
    scale_log2,
    num_seqs,
    max_waves,
    q_stride_seq,
    q_stride_head,
    block_tables_stride_seq,
    pool_stride_block,
    NUM_Q_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    ROW: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SEQS: tl.constexpr,
    KEYS: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    WAVE: tl.constexpr,
):
    # Neighbouring programs read the same latents.
    head_tile = tl.program_id(0)
    item = tl.program_id(1)
    seq, first_split, num_splits = find_split(
        item, seq_lens_ptr, 0, num_seqs, max_waves, SEQS, KEYS, MIN_KEYS, WAVE, False, 0
    )
    if seq >= num_seqs:
        return
    if (head_tile == 0) & (item == first_split):
        tl.store(plan_ptr + 2 * seq, first_split)
        tl.store(plan_ptr + 2 * seq + 1, num_splits)
    seq_len = tl.load(seq_lens_ptr + seq)
    split_len = tl.cdiv(tl.cdiv(seq_len, num_splits), KEYS) * KEYS
    # Split lengths are rounded up to tiles, so a sequence's last splits may have no keys: their loop is empty.
    split_start = (item - first_split) * split_len
    split_end = tl.minimum(split_start + split_len, seq_len)

    heads = head_tile * ROWS + tl.arange(0, ROWS)
    q_ptrs = q_ptr + seq.to(tl.int64) * q_stride_seq + heads * q_stride_head
    q, q_rope = load_queries(q_ptrs, heads < NUM_Q_HEADS, RANK, ROPE, RANK_PAD, ROPE_PAD)
    acc, row_max, row_sum = accumulate_latents(
        q,
        q_rope,
        tl.zeros([ROWS, RANK_PAD], tl.float32),
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
        heads,
        split_start,
        split_end,
        block_tables_ptr + seq.to(tl.int64) * block_tables_stride_seq,
        pool_ptr,
        scale_log2,
        pool_stride_block,
        RANK,
        ROPE,
        ROW,
        RANK_PAD,
        ROPE_PAD,
        BLOCK_SIZE,
        KEYS,
        False,
    )
    # A split without keys has no weight: its log-sum-exp is -inf.
    weight_sum = tl.where(row_sum > 0.0, row_sum, 1.0)
    acc = acc / weight_sum[:, None]
    partials = item.to(tl.int64) * NUM_Q_HEADS + heads
    ranks = tl.arange(0, RANK_PAD)
    mask = (heads < NUM_Q_HEADS)[:, None] & (ranks < RANK)[None, :]
    tl.store(partial_out_ptr + partials[:, None] * RANK + ranks[None, :], acc, mask=mask)
    tl.store(partial_lse_ptr + partials, row_max + tl.log2(weight_sum), mask=heads < NUM_Q_HEADS)


# As in `prefill_attention`: the offset of a step's prompts in tables and lengths changes from step to step.
@triton.jit(
    do_not_specialize=["block_tables_stride_seq"], do_not_specialize_on_alignment=["block_tables_ptr", "seq_lens_ptr"]
)
@no_type_check
def _latent_prefill_kernel(
    q_ptr,
    pool_ptr,
    block_tables_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    out_ptr,
    scale_log2,
    q_stride_token,
    q_stride_head,
    out_stride_token,
    out_stride_head,
    block_tables_stride_seq,
    pool_stride_block,
    NUM_Q_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    ROW: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
):
    # The last tiles of a sequence see the most keys. They start first, so that none of them finishes alone.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    seq = tl.program_id(1)
    query_start = tl.load(query_start_loc_ptr + seq)
    query_len = tl.load(query_start_loc_ptr + seq + 1) - query_start
    if tile * ROWS >= query_len * NUM_Q_HEADS:
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    context_len = seq_len - query_len
    rows = tile * ROWS + tl.arange(0, ROWS)
    tokens, heads = rows // NUM_Q_HEADS, rows % NUM_Q_HEADS
    is_there = tokens < query_len
    token_rows = (query_start + tokens).to(tl.int64)
    q_ptrs = q_ptr + token_rows * q_stride_token + heads * q_stride_head
    q, q_rope = load_queries(q_ptrs, is_there, RANK, ROPE, RANK_PAD, ROPE_PAD)
    key_end = tl.minimum(context_len + (tile * ROWS + ROWS - 1) // NUM_Q_HEADS + 1, seq_len)
    # Every row sees the first key, so its maximum is finite from the first tile on.
    acc, _, row_sum = accumulate_latents(
        q,
        q_rope,
        tl.zeros([ROWS, RANK_PAD], tl.float32),
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
        context_len + tokens,
        0,
        key_end,
        block_tables_ptr + seq.to(tl.int64) * block_tables_stride_seq,
        pool_ptr,
        scale_log2,
        pool_stride_block,
        RANK,
        ROPE,
        ROW,
        RANK_PAD,
        ROPE_PAD,
        BLOCK_SIZE,
        KEYS,
        True,
    )
    result = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
    ranks = tl.arange(0, RANK_PAD)
    out_ptrs = out_ptr + (token_rows * out_stride_token + heads * out_stride_head)[:, None] + ranks[None, :]
    tl.store(out_ptrs, result, mask=is_there[:, None] & (ranks < RANK)[None, :])


def latent_decode_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    rank: int,
    scale: float,
    workspace: DecodeWorkspace,
    out: torch.Tensor,
) -> None:
    """Attention of the last position of every sequence; its latent is already in the pool.

    Args:
        q: `[num_seqs, num_q_heads, size]`, absorbed, pool's dtype; may be strided.
        pool: `[num_blocks, num_layers, 1, 1, block_size, row]`; of layer `layer` the first `size` numbers of each row are read.
            `block_size` may be 1: then tables list single rows.
        block_tables: `[num_seqs, max_blocks]` int32; entries past a sequence's blocks are not read.
        seq_lens: `[num_seqs]` int32, context including this query; 0 marks padding, whose row becomes 0.
        rank: how many of a latent's first numbers are its value.
        scale: factor of the scores.
        workspace: for at least num_seqs sequences of this num_q_heads and `rank`; overwritten.
        out: `[num_seqs, num_q_heads, rank]`; every row is written.

    Raises:
        ValueError: a shape, dtype, stride or bound is not as above.
    """
    sizes, num_seqs = LatentSizes.of(q, pool, layer, rank, out), q.shape[0]
    require_shape("block_tables", block_tables, (num_seqs, "max_blocks"))
    require_shape("seq_lens", seq_lens, (num_seqs,))
    require_int32(block_tables=block_tables, seq_lens=seq_lens)
    workspace.require_room(num_seqs, sizes.num_q_heads, rank)
    max_splits = workspace.max_splits
    layer_pool = pool[:, layer]
    _latent_split_kernel[(triton.cdiv(sizes.num_q_heads, sizes.tile.rows), most_splits(num_seqs, max_splits))](
        q,
        layer_pool,
        block_tables,
        seq_lens,
        workspace.partial_out,
        workspace.partial_lse,
        workspace.plan,
        scale * LOG2_E,
        num_seqs,
        most_waves(num_seqs, max_splits),
        q.stride(0),
        q.stride(1),
        block_tables.stride(0),
        layer_pool.stride(0),
        SEQS=max(MIN_SEQS, next_power_of_2(num_seqs)),
        MIN_KEYS=MIN_KEYS_PER_SPLIT,
        WAVE=max_splits,
        **sizes.constants,
    )
    workspace.combine(seq_lens, out)


def latent_prefill_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    rank: int,
    scale: float,
    max_query_len: int,
    out: torch.Tensor,
) -> None:
    """Causal attention; a sequence's queries are the last `query_len` positions of its context.

    Args:
        q: `[num_tokens, num_q_heads, size]`, absorbed, packed by sequence, pool's dtype; may be strided.
        pool, rank, scale: as for `latent_decode_attention`.
        block_tables: `[num_seqs, max_blocks]` int32; entries past a sequence's blocks are not read.
        query_start_loc: `[num_seqs + 1]` int32, cumulative query lengths from 0; an empty query is allowed.
        seq_lens: `[num_seqs]` int32, total context including this step's queries.
        max_query_len: host upper bound of the query lengths; sizes the grid.
        out: `[num_tokens, num_q_heads, rank]`; rows `[0, query_start_loc[-1])` are written, later ones are left alone.

    Raises:
        ValueError: a shape, dtype, stride or bound is not as above.
    """
    sizes, num_seqs = LatentSizes.of(q, pool, layer, rank, out), seq_lens.shape[0]
    require_shape("block_tables", block_tables, (num_seqs, "max_blocks"))
    require_shape("query_start_loc", query_start_loc, (num_seqs + 1,))
    require_int32(block_tables=block_tables, query_start_loc=query_start_loc, seq_lens=seq_lens)
    layer_pool = pool[:, layer]
    _latent_prefill_kernel[(triton.cdiv(max_query_len * sizes.num_q_heads, sizes.tile.rows), num_seqs)](
        q,
        layer_pool,
        block_tables,
        query_start_loc,
        seq_lens,
        out,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        block_tables.stride(0),
        layer_pool.stride(0),
        **sizes.constants,
    )
