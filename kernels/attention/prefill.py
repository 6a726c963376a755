"""Causal attention of ragged query chunks over the paged KV pool, for prefill.

The keys and values of every position, including the chunk's own, are already in the pool. So a cached prefix, an earlier chunk and
the present one are read in the same way. Not for decode: one query per sequence would leave most of a tile empty; see
`decode_attention`.

Algorithm: FlashAttention-2 (Dao, 2023, arXiv 2307.08691), with the online softmax in base 2. The query heads of one KV head are
packed into the rows of a tile, so that each key and value is loaded once for all of them.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl

from kvrelay.kernels.attention.kv_scales import require_compute_dtype
from kvrelay.kernels.attention.prefill_tiles import (
    TileLoads,
    box_obstacle,
    choose_tile,
    has_much_shared_memory,
    layer_boxes,
    looks_ahead,
    nvidia_capability,
    tile_loads,
)
from kvrelay.kernels.attention.tiles import LOG2_E, accumulate, accumulate_boxes, to_half, window_at
from kvrelay.kernels.checks import (
    PagedKv,
    PoolGeometry,
    next_power_of_2,
    require_dtype,
    require_int32,
    require_scores,
    require_shape,
    require_unit_stride,
    require_window,
)

_LOG2_E = tl.constexpr(LOG2_E)


# A step's prompts follow its single tokens, so the offset of their tables and lengths changes from step to step.
# Specialising on its alignment
# would compile kernels while streams run.
@triton.jit(
    do_not_specialize=["block_tables_stride_seq"], do_not_specialize_on_alignment=["block_tables_ptr", "seq_lens_ptr"]
)
@no_type_check
def _prefill_attention_kernel(
    q_ptr,
    pool_ptr,
    boxes,
    kv_scales_ptr,
    sinks_ptr,
    block_tables_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    last_seen_ptr,
    out_ptr,
    scale_log2,
    softcap,
    window,
    q_stride_token,
    q_stride_head,
    out_stride_token,
    out_stride_head,
    block_tables_stride_seq,
    pool_stride_block,
    pool_stride_value,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LAST_SEEN: tl.constexpr,
    LOOK_AHEAD: tl.constexpr,
    BY_BOXES: tl.constexpr,
):
    # The last tiles of a sequence see the most keys. They start first, so that none of them finishes alone.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = tl.program_id(2)
    query_start = tl.load(query_start_loc_ptr + seq)
    query_len = tl.load(query_start_loc_ptr + seq + 1) - query_start
    if tile * ROWS >= query_len * GROUP:
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    context_len = seq_len - query_len

    rows = tile * ROWS + tl.arange(0, ROWS)
    tokens = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, HEAD_DIM_PAD)
    row_mask = (tokens < query_len)[:, None] & (dims < HEAD_DIM)[None, :]
    token_rows = (query_start + tokens).to(tl.int64)
    q_offsets = (token_rows * q_stride_token + heads * q_stride_head)[:, None] + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=row_mask, other=0.0)
    if HAS_SCALES:
        q, q_scale = to_half(q)
        scale_log2 *= q_scale * tl.load(kv_scales_ptr + kv_head)

    query_positions = context_len + tokens
    first_position = context_len + tile * ROWS // GROUP
    last_position = tl.minimum(context_len + (tile * ROWS + ROWS - 1) // GROUP, seq_len - 1)
    key_end = last_position + 1
    last_seen = query_positions
    if HAS_LAST_SEEN:
        last_seen = tl.load(last_seen_ptr + query_start + tokens, mask=tokens < query_len, other=0)
        key_end = tl.max(last_seen, axis=0) + 1
    # Keys before masked_start are visible to every row of the tile. With a window, one masked loop covers everything: a
    # third loop for the
    # window's edge made the kernel spill on sm80.
    masked_start = (first_position + 1) // KEYS * KEYS
    first_seen = 0
    if HAS_WINDOW:
        first_seen = first_position - window_at(first_position, window, CHUNK) + 1
        masked_start = tl.maximum(first_seen, 0) // KEYS * KEYS
    table_ptr = block_tables_ptr + seq.to(tl.int64) * block_tables_stride_seq
    head_ptr = pool_ptr + kv_head * (BLOCK_SIZE * HEAD_DIM)
    # The offset from a head's keys to its values.
    value_offset = pool_stride_value + kv_head * (BLOCK_SIZE * (VALUE_DIM - HEAD_DIM))

    # A finite floor, not -inf: a row that sees none of a tile's keys must not compute inf - inf.
    row_max = tl.full([ROWS], -1.0e30, tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        # The sink counts like a first key: its weight is 1, and it has no value.
        row_max = tl.load(sinks_ptr + heads).to(tl.float32) * _LOG2_E
        row_sum = tl.full([ROWS], 1.0, tl.float32)
    acc = tl.zeros([ROWS, VALUE_DIM_PAD], tl.float32)
    if BY_BOXES:
        # Row numbers, and so all terms of them, fit 31 bits (`box_obstacle`).
        acc, row_max, row_sum = accumulate_boxes(
            q,
            acc,
            row_max,
            row_sum,
            masked_start,
            table_ptr,
            boxes,
            kv_head * BLOCK_SIZE,
            (pool_stride_block // HEAD_DIM).to(tl.int32),
            NUM_KV_HEADS * BLOCK_SIZE,
            scale_log2,
            softcap,
            BLOCK_SIZE,
            KEYS,
            HAS_SCALES,
            HAS_SOFTCAP,
        )
    elif not HAS_WINDOW:
        acc, row_max, row_sum = accumulate(
            q,
            acc,
            row_max,
            row_sum,
            query_positions,
            last_seen,
            0,
            masked_start,
            0,
            seq_len,
            table_ptr,
            head_ptr,
            scale_log2,
            softcap,
            window,
            pool_stride_block,
            value_offset,
            HEAD_DIM,
            HEAD_DIM_PAD,
            VALUE_DIM,
            VALUE_DIM_PAD,
            BLOCK_SIZE,
            KEYS,
            HAS_WINDOW,
            CHUNK,
            HAS_SCALES,
            HAS_SOFTCAP,
            HAS_LAST_SEEN,
            LOOK_AHEAD,
            False,
        )
    acc, row_max, row_sum = accumulate(
        q,
        acc,
        row_max,
        row_sum,
        query_positions,
        last_seen,
        masked_start,
        key_end,
        first_seen,
        seq_len,
        table_ptr,
        head_ptr,
        scale_log2,
        softcap,
        window,
        pool_stride_block,
        value_offset,
        HEAD_DIM,
        HEAD_DIM_PAD,
        VALUE_DIM,
        VALUE_DIM_PAD,
        BLOCK_SIZE,
        KEYS,
        HAS_WINDOW,
        CHUNK,
        HAS_SCALES,
        HAS_SOFTCAP,
        HAS_LAST_SEEN,
        LOOK_AHEAD,
        True,
    )
    # Rows past the sequence may have seen no key; they are divided by 1 and not stored.
    result = acc / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
    if HAS_SCALES:
        result *= tl.load(kv_scales_ptr + NUM_KV_HEADS + kv_head)
    value_dims = tl.arange(0, VALUE_DIM_PAD)
    out_mask = (tokens < query_len)[:, None] & (value_dims < VALUE_DIM)[None, :]
    out_offsets = (token_rows * out_stride_token + heads * out_stride_head)[:, None] + value_dims[None, :]
    tl.store(out_ptr + out_offsets, result.to(out_ptr.dtype.element_ty), mask=out_mask)


def paged_prefill_attention(
    q: torch.Tensor,
    pool: torch.Tensor | PagedKv,
    layer: int,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    chunk_size: int | None = None,
    max_query_len: int,
    out: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    last_seen: torch.Tensor | None = None,
    loads: TileLoads | None = None,
) -> None:
    """Causal attention; a sequence's queries are the last `query_len` positions of its context.

    With `last_seen` tokens also see later ones, as those of one image do in some models (Gemma 3).

    Args:
        q: `[num_tokens, num_q_heads, head_dim]`, packed by sequence; pool's dtype, any float type over an fp8 pool; may be strided.
        pool: `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, or views; layer `layer` is read.
        block_tables: `[num_seqs, max_blocks]` int32; entries past a sequence's blocks are not read.
        query_start_loc: `[num_seqs + 1]` int32, cumulative query lengths from 0; an empty query is allowed.
        seq_lens: `[num_seqs]` int32, total context including this step's queries.
        scale: factor of the scores, usually head_dim ** -0.5.
        sliding_window: None, or a query at p sees keys with p - key < sliding_window (transformers' meaning).
        chunk_size: None, or a query sees its own chunk only: keys with the same `position // chunk_size`.
        max_query_len: host upper bound of the query lengths; sizes the grid.
        out: as q, a head of the size of values; rows `[0, query_start_loc[-1])` are written, later ones are left alone.
        kv_scales: `[num_layers, 2, num_kv_heads]` fp32, what an fp8 pool was written with; else None.
        softcap: None, or scores become softcap * tanh(scores / softcap).
        sinks: None, or `[num_q_heads]` floats: scores of one more key for each head, which has no value.
        last_seen: None, or `[num_tokens]` int32: the last position that each query sees, from its own up to the context's last.
            The first one stays that of the query's own position, its window and its chunk.
        loads: how tiles without a mask are loaded; None: `tile_loads` of the device, the pool and the window.

    Raises:
        ValueError: a shape, dtype, stride or bound is not as above, or BOXES for a pool or window that does not allow them.
    """
    geometry = PoolGeometry.of(pool, layer)
    require_shape("q", q, ("num_tokens", "num_q_heads", geometry.head_dim))
    num_q_heads = q.shape[1]
    group = geometry.group_size(num_q_heads)
    require_shape("out", out, (*q.shape[:2], geometry.value_dim))
    require_compute_dtype(pool, kv_scales, q=q)
    for name, tensor in (("q", q), ("out", out)):
        require_dtype(name, tensor, q.dtype)
        require_unit_stride(name, tensor)
    num_seqs = seq_lens.shape[0]
    require_shape("block_tables", block_tables, (num_seqs, "max_blocks"))
    require_shape("query_start_loc", query_start_loc, (num_seqs + 1,))
    require_shape("seq_lens", seq_lens, (num_seqs,))
    require_int32(block_tables=block_tables, query_start_loc=query_start_loc, seq_lens=seq_lens)
    if last_seen is not None:
        require_shape("last_seen", last_seen, (q.shape[0],))
        require_int32(last_seen=last_seen)
    require_window(sliding_window, chunk_size)
    has_window = sliding_window is not None or chunk_size is not None
    require_scores(num_q_heads, softcap, sinks)
    if max_query_len < 0:
        raise ValueError(f"max_query_len is {max_query_len}, expected >= 0")
    if loads is None:
        loads = tile_loads(nvidia_capability(q.device), pool, has_window=has_window)
    elif loads is TileLoads.BOXES and (obstacle := box_obstacle(pool, has_window=has_window)):
        raise ValueError(f"tiles cannot be loaded as boxes: {obstacle}")
    head_dim_pad = next_power_of_2(geometry.head_dim)
    largest = max(head_dim_pad, next_power_of_2(geometry.value_dim))
    is_roomy = has_much_shared_memory(nvidia_capability(q.device))
    limits = {"is_chunked": chunk_size is not None, "sees_ahead": last_seen is not None}
    tile = choose_tile(largest, pool.dtype.itemsize, **limits, is_roomy=is_roomy)
    kv = PagedKv.of(pool)
    layer_keys = kv.keys[:, layer]
    _prefill_attention_kernel[(triton.cdiv(max_query_len * group, tile.rows), geometry.num_kv_heads, num_seqs)](
        q,
        layer_keys,
        layer_boxes(pool[:, layer]) if loads is TileLoads.BOXES and isinstance(pool, torch.Tensor) else None,
        None if kv_scales is None else kv_scales[layer],
        sinks,
        block_tables,
        query_start_loc,
        seq_lens,
        last_seen,
        out,
        scale * LOG2_E,
        softcap or 0.0,
        sliding_window or 0,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        block_tables.stride(0),
        layer_keys.stride(0),
        kv.value_start,
        NUM_KV_HEADS=geometry.num_kv_heads,
        GROUP=group,
        HEAD_DIM=geometry.head_dim,
        HEAD_DIM_PAD=head_dim_pad,
        VALUE_DIM=geometry.value_dim,
        VALUE_DIM_PAD=next_power_of_2(geometry.value_dim),
        BLOCK_SIZE=geometry.block_size,
        ROWS=tile.rows,
        KEYS=tile.keys,
        HAS_WINDOW=has_window,
        CHUNK=chunk_size or 0,
        HAS_SCALES=kv_scales is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        HAS_LAST_SEEN=last_seen is not None,
        LOOK_AHEAD=looks_ahead(q.device),
        BY_BOXES=loads is TileLoads.BOXES,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
