"""Attention of one query per sequence over the paged KV pool, for decode.

Split-KV: several programs share the keys of a long sequence. Each writes an fp32 partial result and the log-sum-exp of its scores
to the caller's workspace (Flash-Decoding, Dao et al., 2023). The program that finishes last combines a sequence's results, in
their order. In small batches, and for large heads and fp8 pools, a second kernel does. The splits of the whole batch are numbered
consecutively, and every program finds its own from the lengths on the device. So the grid is an upper bound, and a launch captured
in a CUDA graph can be replayed for other lengths. For several queries per sequence see `prefill_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl

from kvrelay.kernels.attention.decode_workspace import MIN_SEQS, DecodeWorkspace
from kvrelay.kernels.attention.kv_scales import require_compute_dtype
from kvrelay.kernels.attention.splits import (
    MIN_KEYS_PER_SPLIT,
    combined_splits,
    find_split,
    first_key_of,
    most_splits,
    most_waves,
    store_result,
)
from kvrelay.kernels.attention.tiles import LOG2_E, cap, to_half, window_at
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

# A tensor core's tile has 16 rows; a group of fewer query heads is padded up to it.
_MIN_ROWS = 16
_FEW_SEQS = 16  # up to so many have many splits each, which `decode_combine_kernel` combines sooner
# Numbers of a program's heads up to which a split's program combines. More would be read in too many small pieces.
_MOST_COMBINED = 1024
_LOG2_E = tl.constexpr(LOG2_E)


@dataclass(frozen=True)
class _Tile:
    keys: int  # keys per iteration
    num_warps: int
    num_stages: int


def _tile(head_dim_pad: int, element_size: int) -> _Tile:
    if head_dim_pad > 256:
        num_warps, num_stages = (8, 1) if element_size == 4 else (4, 2)
        return _Tile(16, num_warps, num_stages)
    if element_size == 4:
        return _Tile(keys=32 if head_dim_pad <= 64 else 16, num_warps=4, num_stages=1)
    if head_dim_pad <= 64 or (head_dim_pad == 128 and element_size == 1):
        return _Tile(keys=128, num_warps=4, num_stages=3)
    if head_dim_pad == 128 or element_size == 1:
        return _Tile(keys=64, num_warps=4, num_stages=3)
    return _Tile(keys=32, num_warps=4, num_stages=3)


def _splits_at_once(num_seqs: int, group_pad: int, value_dim_pad: int, *, has_scales: bool) -> int:
    """How many splits the last program of a sequence combines at once; 0: `decode_combine_kernel` combines.

    Over an fp8 pool Triton 3.6 would take 192 registers for it. Only two programs would fit a multiprocessor, not three.
    """
    if num_seqs <= _FEW_SEQS or has_scales or group_pad * value_dim_pad > _MOST_COMBINED:
        return 0
    return combined_splits(group_pad, value_dim_pad)


@triton.jit
@no_type_check
def _low_halves(pairs):
    """The e4m3 numbers in the low bytes of int16s, as fp16.

    A tensor core needs values key by key. For single e4m3 values that is a gather of bytes from shared memory. For pairs of
    neighbouring dimensions, the hardware's transposing load of 16-bit elements does it.
    """
    return (pairs & 255).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float16)


# Block tables of several groups of layers are in one tensor, one after the other. One kernel serves all their start addresses.
@triton.jit(
    do_not_specialize=["num_seqs", "max_waves", "block_tables_stride_seq"],
    do_not_specialize_on_alignment=["block_tables_ptr"],
)
@no_type_check
def _decode_split_kernel(
    q_ptr,
    pool_ptr,
    pairs_ptr,
    kv_scales_ptr,
    sinks_ptr,
    block_tables_ptr,
    seq_lens_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    plan_ptr,
    arrivals_ptr,
    out_ptr,
    scale_log2,
    softcap,
    window,
    num_seqs,
    max_waves,
    q_stride_seq,
    q_stride_head,
    out_stride_seq,
    out_stride_head,
    block_tables_stride_seq,
    pool_stride_block,
    pool_stride_value,
    NUM_Q_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SEQS: tl.constexpr,
    KEYS: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    WAVE: tl.constexpr,
    COMBINED_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    HAS_SCALES: tl.constexpr = kv_scales_ptr is not None
    # Adjacent programs read adjacent heads of the same blocks.
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    seq, first_split, num_splits = find_split(
        item, seq_lens_ptr, window, num_seqs, max_waves, SEQS, KEYS, MIN_KEYS, WAVE, HAS_WINDOW, CHUNK
    )
    if seq >= num_seqs:
        return
    if (COMBINED_SPLITS == 0) & (kv_head == 0) & (item == first_split):
        tl.store(plan_ptr + 2 * seq, first_split)
        tl.store(plan_ptr + 2 * seq + 1, num_splits)
    seq_len = tl.load(seq_lens_ptr + seq)
    first_key = first_key_of(seq_len, window, KEYS, HAS_WINDOW, CHUNK)
    split_len = tl.cdiv(tl.cdiv(seq_len - first_key, num_splits), KEYS) * KEYS
    # Because splits are rounded up to tiles, a sequence's last splits may have no keys. Their loop is empty.
    split_start = first_key + (item - first_split) * split_len
    split_end = tl.minimum(split_start + split_len, seq_len)

    rows = tl.arange(0, ROWS)
    heads = kv_head * GROUP + rows
    dims = tl.arange(0, HEAD_DIM_PAD)
    row_mask = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_offsets = seq.to(tl.int64) * q_stride_seq + (heads * q_stride_head)[:, None] + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=row_mask, other=0.0)
    if HAS_SCALES:
        q, q_scale = to_half(q)
        scale_log2 *= q_scale * tl.load(kv_scales_ptr + kv_head)
    table_ptr = block_tables_ptr + seq.to(tl.int64) * block_tables_stride_seq
    head_ptr = pool_ptr + kv_head * (BLOCK_SIZE * HEAD_DIM)
    value_ptr = pool_ptr + pool_stride_value + kv_head * (BLOCK_SIZE * VALUE_DIM)
    value_dims = tl.arange(0, VALUE_DIM_PAD)

    # Every tile holds a visible key (the first starts at most KEYS - 1 before the window), so that the
    # running maximum is finite after the first tile.
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    if sinks_ptr is not None:
        # A sink counts as a key before the first one: its weight is 1, and it has no value.
        is_first = item == first_split
        sinks = tl.load(sinks_ptr + heads, mask=rows < GROUP, other=0.0).to(tl.float32) * _LOG2_E
        row_max = tl.where(is_first, sinks, row_max)
        row_sum += tl.where(is_first, 1.0, 0.0)
    # Over an fp8 pool `acc` has the even dimensions and `acc_odd` the odd ones.
    ACC_DIMS: tl.constexpr = VALUE_DIM_PAD // 2 if HAS_SCALES else VALUE_DIM_PAD
    acc = tl.zeros([ROWS, ACC_DIMS], tl.float32)
    acc_odd = tl.zeros([ROWS, ACC_DIMS], tl.float32)
    pairs = tl.arange(0, ACC_DIMS)
    offsets_in_tile = tl.arange(0, KEYS)
    # Block ids are loaded one iteration ahead, so the loads of keys do not wait for their addresses.
    positions = split_start + offsets_in_tile
    blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=positions < split_end, other=0)
    for tile_start in range(split_start, split_end, KEYS):
        positions = tile_start + offsets_in_tile
        next_positions = positions + KEYS
        next_blocks = tl.load(table_ptr + next_positions // BLOCK_SIZE, mask=next_positions < split_end, other=0)
        visible = positions < split_end
        if HAS_WINDOW:
            visible = visible & (positions >= seq_len - window_at(seq_len - 1, window, CHUNK))
        starts = blocks.to(tl.int64) * pool_stride_block
        key_ptrs = head_ptr + (starts + (positions % BLOCK_SIZE) * HEAD_DIM)[:, None] + dims[None, :]
        value_offsets = starts + (positions % BLOCK_SIZE) * VALUE_DIM
        load_mask = visible[:, None] & (dims < HEAD_DIM)[None, :]
        keys = tl.load(key_ptrs, mask=load_mask, other=0.0)
        if HAS_SCALES:
            keys = keys.to(tl.float16)
            pair_offsets = (kv_head * (BLOCK_SIZE * VALUE_DIM) + pool_stride_value + value_offsets) // 2
            pair_mask = visible[:, None] & (pairs < VALUE_DIM // 2)[None, :]
            value_pairs = tl.load(pairs_ptr + pair_offsets[:, None] + pairs[None, :], mask=pair_mask, other=0)
            values = _low_halves(value_pairs)
            odd_values = _low_halves(value_pairs >> 8)
        else:
            value_mask = visible[:, None] & (value_dims < VALUE_DIM)[None, :]
            values = tl.load(value_ptr + value_offsets[:, None] + value_dims[None, :], mask=value_mask, other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale_log2
        if HAS_SOFTCAP:
            scores = cap(scores, softcap)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        correction = tl.exp2(row_max - new_max)
        weights = tl.exp2(scores - new_max[:, None])
        row_sum = row_sum * correction + tl.sum(weights, axis=1)
        weights = weights.to(values.dtype)
        acc = tl.dot(weights, values, acc * correction[:, None], input_precision="ieee")
        if HAS_SCALES:
            acc_odd = tl.dot(weights, odd_values, acc_odd * correction[:, None], input_precision="ieee")
        row_max = new_max
        blocks = next_blocks

    if HAS_SCALES:
        value_scale = tl.load(kv_scales_ptr + NUM_Q_HEADS // GROUP + kv_head)  # behind the scales of all keys
        acc = tl.join(acc, acc_odd).reshape(ROWS, VALUE_DIM_PAD) * value_scale
    # A split without keys has no weight: its log-sum-exp is -inf.
    weight_sum = tl.where(row_sum > 0.0, row_sum, 1.0)
    store_result(
        acc / weight_sum[:, None],
        row_max + tl.log2(weight_sum),
        heads,
        rows < GROUP,
        item,
        first_split,
        num_splits,
        partial_out_ptr,
        partial_lse_ptr,
        arrivals_ptr + seq * NUM_Q_HEADS + kv_head,
        out_ptr + seq.to(tl.int64) * out_stride_seq,
        out_stride_head,
        kv_head,
        NUM_Q_HEADS,
        GROUP,
        GROUP_PAD,
        VALUE_DIM,
        VALUE_DIM_PAD,
        COMBINED_SPLITS,
    )


def paged_decode_attention(
    q: torch.Tensor,
    pool: torch.Tensor | PagedKv,
    layer: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    chunk_size: int | None = None,
    workspace: DecodeWorkspace,
    out: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attention of the last position of every sequence; its key and value are already in the pool.

    Args:
        q: `[num_seqs, num_q_heads, head_dim]`, pool's dtype, any float type over an fp8 pool; may be strided.
        pool: `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, or views; layer `layer` is read.
        block_tables: `[num_seqs, max_blocks]` int32; entries past a sequence's blocks are not read.
        seq_lens: `[num_seqs]` int32, context including this query; 0 marks padding, whose row becomes 0.
        scale: factor of the scores, usually head_dim ** -0.5.
        sliding_window: None, or the query sees the last `sliding_window` positions, its own included.
        chunk_size: None, or the query sees its own chunk only: positions with the same `position // chunk_size`.
        workspace: for at least num_seqs sequences of this num_q_heads and the values' head_dim; overwritten.
        out: as q, a head of the size of values; every row is written.
        kv_scales: `[num_layers, 2, num_kv_heads]` fp32, what an fp8 pool was written with; else None.
        softcap: None, or scores become softcap * tanh(scores / softcap).
        sinks: None, or `[num_q_heads]` floats: scores of one more key for each head, which has no value.

    Raises:
        ValueError: a shape, dtype, stride or bound is not as above.
    """
    geometry = PoolGeometry.of(pool, layer)
    require_shape("q", q, ("num_seqs", "num_q_heads", geometry.head_dim))
    num_seqs, num_q_heads, head_dim = q.shape
    group = geometry.group_size(num_q_heads)
    require_shape("out", out, (num_seqs, num_q_heads, geometry.value_dim))
    require_compute_dtype(pool, kv_scales, q=q)
    for name, tensor in (("q", q), ("out", out)):
        require_dtype(name, tensor, q.dtype)
        require_unit_stride(name, tensor)
    require_shape("block_tables", block_tables, (num_seqs, "max_blocks"))
    require_shape("seq_lens", seq_lens, (num_seqs,))
    require_int32(block_tables=block_tables, seq_lens=seq_lens)
    require_window(sliding_window, chunk_size)
    require_scores(num_q_heads, softcap, sinks)
    workspace.require_room(num_seqs, num_q_heads, geometry.value_dim)
    max_splits = workspace.max_splits

    head_dim_pad = next_power_of_2(head_dim)
    value_dim_pad = next_power_of_2(geometry.value_dim)
    tile = _tile(max(head_dim_pad, value_dim_pad), pool.dtype.itemsize)
    group_pad = next_power_of_2(group)
    splits_at_once = _splits_at_once(num_seqs, group_pad, value_dim_pad, has_scales=kv_scales is not None)
    kv = PagedKv.of(pool)
    layer_keys = kv.keys[:, layer]
    _decode_split_kernel[(geometry.num_kv_heads, most_splits(num_seqs, max_splits))](
        q,
        layer_keys,
        None if kv_scales is None else layer_keys.view(torch.int16),
        None if kv_scales is None else kv_scales[layer],
        sinks,
        block_tables,
        seq_lens,
        workspace.partial_out,
        workspace.partial_lse,
        workspace.plan,
        workspace.arrivals,
        out,
        scale * LOG2_E,
        softcap or 0.0,
        sliding_window or 0,
        num_seqs,
        most_waves(num_seqs, max_splits),
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        block_tables.stride(0),
        layer_keys.stride(0),
        kv.value_start,
        NUM_Q_HEADS=num_q_heads,
        GROUP=group,
        GROUP_PAD=group_pad,
        ROWS=max(_MIN_ROWS, next_power_of_2(group)),
        HEAD_DIM=head_dim,
        HEAD_DIM_PAD=head_dim_pad,
        VALUE_DIM=geometry.value_dim,
        VALUE_DIM_PAD=value_dim_pad,
        BLOCK_SIZE=geometry.block_size,
        SEQS=max(MIN_SEQS, next_power_of_2(num_seqs)),
        KEYS=tile.keys,
        MIN_KEYS=MIN_KEYS_PER_SPLIT,
        WAVE=max_splits,
        COMBINED_SPLITS=splits_at_once,
        HAS_WINDOW=sliding_window is not None or chunk_size is not None,
        CHUNK=chunk_size or 0,
        HAS_SOFTCAP=softcap is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if not splits_at_once:
        workspace.combine(seq_lens, out)
