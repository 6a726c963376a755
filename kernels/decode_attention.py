"""Attention of one query per sequence over the paged KV pool, for decode.

Split-KV: programs share out a long sequence's keys, each leaves an fp32 partial result and the log-sum-exp
of its scores in the caller's workspace, a second kernel combines them (Flash-Decoding, Dao et al., 2023).
The grid is an upper bound and every length is read on the device, so a launch can be captured in a CUDA
graph and replayed for other lengths. Not for several queries per sequence; see `prefill_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl

from kvrelay.kernels.checks import (
    PoolGeometry,
    next_power_of_2,
    require_dtype,
    require_shape,
    require_unit_stride,
    require_window,
)
from kvrelay.kernels.prefill_attention import LOG2_E, paged_prefill_attention_reference

# Below this a split's partial result costs more traffic than the parallelism is worth.
MIN_KEYS_PER_SPLIT = 256
# A tensor core's tile has 16 rows; a group of fewer query heads is padded up to it.
_MIN_ROWS = 16
_COMBINE_SPLITS = 8


@dataclass(frozen=True)
class DecodeWorkspace:
    """Buffers of `paged_decode_attention`: owned by the caller, overwritten by every call.

    One workspace serves all layers, and all batches up to `max_seqs`, of one stream.
    """

    partial_out: torch.Tensor  # [max_seqs, num_q_heads, max_splits, head_dim] fp32
    partial_lse: torch.Tensor  # [max_seqs, num_q_heads, max_splits] fp32, base 2
    max_splits: int  # upper bound of the splits of one sequence

    @classmethod
    def allocate(
        cls,
        max_seqs: int,
        num_q_heads: int,
        head_dim: int,
        max_splits: int,
        device: torch.device | str,
    ) -> DecodeWorkspace:
        """Allocates uninitialised buffers on `device`.

        Raises:
            ValueError: max_splits < 1.
        """
        if max_splits < 1:
            raise ValueError(f"max_splits is {max_splits}, expected >= 1")
        shape = (max_seqs, num_q_heads, max_splits)
        return cls(
            torch.empty((*shape, head_dim), dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
            max_splits,
        )


@dataclass(frozen=True)
class _Tile:
    keys: int  # keys per iteration
    num_warps: int
    num_stages: int


def _tile(head_dim_pad: int, element_size: int) -> _Tile:
    if element_size == 4:
        return _Tile(keys=32 if head_dim_pad <= 64 else 16, num_warps=4, num_stages=1)
    if head_dim_pad <= 64:
        return _Tile(keys=128, num_warps=4, num_stages=3)
    if head_dim_pad == 128:
        return _Tile(keys=64, num_warps=4, num_stages=3)
    return _Tile(keys=32, num_warps=4, num_stages=3)


def paged_decode_attention_reference(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    out: torch.Tensor,
) -> None:
    """The same contract as `paged_decode_attention`; reads lengths on the host."""
    out[seq_lens == 0] = 0
    rows = seq_lens.nonzero()[:, 0]
    result = torch.empty_like(q[rows])
    paged_prefill_attention_reference(
        q[rows],
        pool,
        layer,
        block_tables[rows],
        torch.arange(rows.numel() + 1, dtype=torch.int32, device=q.device),
        seq_lens[rows],
        scale=scale,
        sliding_window=sliding_window,
        max_query_len=1,
        out=result,
    )
    out[rows] = result


@triton.jit
@no_type_check
def _plan_splits(
    seq_len,
    window,
    MAX_SPLITS: tl.constexpr,
    KEYS: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """First key to read, keys per split (a multiple of KEYS) and number of splits of a sequence."""
    first_key = seq_len * 0
    if HAS_WINDOW:
        first_key = tl.maximum(seq_len - window, 0) // KEYS * KEYS
    num_keys = seq_len - first_key
    split_len = tl.maximum(tl.cdiv(tl.cdiv(num_keys, MAX_SPLITS), KEYS) * KEYS, MIN_KEYS)
    return first_key, split_len, tl.cdiv(num_keys, split_len)


@triton.jit(do_not_specialize=["block_tables_stride_seq"])
@no_type_check
def _decode_split_kernel(
    q_ptr,
    pool_ptr,
    block_tables_ptr,
    seq_lens_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    scale_log2,
    window,
    q_stride_seq,
    q_stride_head,
    block_tables_stride_seq,
    pool_stride_block,
    pool_stride_value,
    pool_stride_head,
    NUM_Q_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + seq)
    first_key, split_len, num_splits = _plan_splits(seq_len, window, MAX_SPLITS, KEYS, MIN_KEYS, HAS_WINDOW)
    if split >= num_splits:
        return
    split_start = first_key + split * split_len
    split_end = tl.minimum(split_start + split_len, seq_len)

    rows = tl.arange(0, ROWS)
    heads = kv_head * GROUP + rows
    dims = tl.arange(0, HEAD_DIM_PAD)
    row_mask = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_offsets = seq * q_stride_seq + (heads * q_stride_head)[:, None] + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=row_mask, other=0.0)
    table_ptr = block_tables_ptr + seq * block_tables_stride_seq
    head_ptr = pool_ptr + kv_head * pool_stride_head

    # Every tile holds a visible key (the first starts at most KEYS - 1 before the window), so that the
    # running maximum is finite after the first tile.
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM_PAD], tl.float32)
    for tile_start in range(split_start, split_end, KEYS):
        positions = tile_start + tl.arange(0, KEYS)
        visible = positions < split_end
        if HAS_WINDOW:
            visible = visible & (positions >= seq_len - window)
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=visible, other=0)
        offsets = blocks.to(tl.int64) * pool_stride_block + (positions % BLOCK_SIZE) * HEAD_DIM
        key_ptrs = head_ptr + offsets[:, None] + dims[None, :]
        load_mask = visible[:, None] & (dims < HEAD_DIM)[None, :]
        keys = tl.load(key_ptrs, mask=load_mask, other=0.0)
        values = tl.load(key_ptrs + pool_stride_value, mask=load_mask, other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale_log2
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        correction = tl.exp2(row_max - new_max)
        weights = tl.exp2(scores - new_max[:, None])
        row_sum = row_sum * correction + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(values.dtype), values, acc * correction[:, None], input_precision="ieee")
        row_max = new_max

    partials = (seq * NUM_Q_HEADS + heads) * MAX_SPLITS + split
    tl.store(
        partial_out_ptr + partials[:, None] * HEAD_DIM + dims[None, :],
        acc / row_sum[:, None],
        mask=row_mask,
    )
    tl.store(partial_lse_ptr + partials, row_max + tl.log2(row_sum), mask=rows < GROUP)


@triton.jit
@no_type_check
def _decode_combine_kernel(
    partial_out_ptr,
    partial_lse_ptr,
    seq_lens_ptr,
    out_ptr,
    window,
    out_stride_seq,
    out_stride_head,
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    KEYS: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + seq)
    _, _, num_splits = _plan_splits(seq_len, window, MAX_SPLITS, KEYS, MIN_KEYS, HAS_WINDOW)
    dims = tl.arange(0, HEAD_DIM_PAD)
    first_partial = (seq * NUM_Q_HEADS + head) * MAX_SPLITS
    lse_max = tl.full([1], float("-inf"), tl.float32)
    weight_sum = tl.zeros([1], tl.float32)
    acc = tl.zeros([HEAD_DIM_PAD], tl.float32)
    for start in range(0, num_splits, SPLITS):
        splits = start + tl.arange(0, SPLITS)
        present = splits < num_splits
        lse = tl.load(partial_lse_ptr + first_partial + splits, mask=present, other=float("-inf"))
        partial = tl.load(
            partial_out_ptr + (first_partial + splits)[:, None] * HEAD_DIM + dims[None, :],
            mask=present[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        new_max = tl.maximum(lse_max, tl.max(lse, axis=0))
        correction = tl.exp2(lse_max - new_max)
        weights = tl.exp2(lse - new_max)
        weight_sum = weight_sum * correction + tl.sum(weights, axis=0)
        acc = acc * correction + tl.sum(weights[:, None] * partial, axis=0)
        lse_max = new_max
    # An empty sequence (padding of a captured batch) has no split: its row is zero, not NaN.
    result = acc / tl.where(weight_sum > 0.0, weight_sum, 1.0)
    out_offsets = seq * out_stride_seq + head * out_stride_head + dims
    tl.store(out_ptr + out_offsets, result.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


def paged_decode_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    workspace: DecodeWorkspace,
    out: torch.Tensor,
) -> None:
    """Attention of the last position of every sequence; its key and value are already in the pool.

    Args:
        q: `[num_seqs, num_q_heads, head_dim]`, pool's dtype; may be a strided view.
        pool: `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`; layer `layer` is read.
        block_tables: `[num_seqs, max_blocks]` int32; entries past a sequence's blocks are not read.
        seq_lens: `[num_seqs]` int32, context including this query; 0 marks padding, whose row becomes 0.
        scale: factor of the scores, usually head_dim ** -0.5.
        sliding_window: None, or the query sees the last `sliding_window` positions, its own included.
        workspace: for at least num_seqs sequences of this num_q_heads and head_dim; overwritten.
        out: as q; every row is written.

    Raises:
        ValueError: a shape, dtype, stride or bound is not as above.
    """
    geometry = PoolGeometry.of(pool, layer)
    require_shape("q", q, ("num_seqs", "num_q_heads", geometry.head_dim))
    num_seqs, num_q_heads, head_dim = q.shape
    group = geometry.group_size(num_q_heads)
    require_shape("out", out, q.shape)
    for name, tensor in (("q", q), ("out", out)):
        require_dtype(name, tensor, pool.dtype)
        require_unit_stride(name, tensor)
    require_shape("block_tables", block_tables, (num_seqs, "max_blocks"))
    require_shape("seq_lens", seq_lens, (num_seqs,))
    for name, tensor in (("block_tables", block_tables), ("seq_lens", seq_lens)):
        require_dtype(name, tensor, torch.int32)
        require_unit_stride(name, tensor)
    require_window(sliding_window)
    max_splits = workspace.max_splits
    max_seqs = workspace.partial_out.shape[0]
    require_shape("partial_out", workspace.partial_out, (max_seqs, num_q_heads, max_splits, head_dim))
    require_shape("partial_lse", workspace.partial_lse, (max_seqs, num_q_heads, max_splits))
    if num_seqs > max_seqs:
        raise ValueError(f"{num_seqs} sequences, the workspace holds {max_seqs}")

    head_dim_pad = next_power_of_2(head_dim)
    tile = _tile(head_dim_pad, pool.element_size())
    layer_pool = pool[:, layer]
    window = sliding_window or 0
    _decode_split_kernel[(num_seqs, geometry.num_kv_heads, max_splits)](
        q,
        layer_pool,
        block_tables,
        seq_lens,
        workspace.partial_out,
        workspace.partial_lse,
        scale * LOG2_E,
        window,
        q.stride(0),
        q.stride(1),
        block_tables.stride(0),
        layer_pool.stride(0),
        layer_pool.stride(1),
        layer_pool.stride(2),
        NUM_Q_HEADS=num_q_heads,
        GROUP=group,
        ROWS=max(_MIN_ROWS, next_power_of_2(group)),
        HEAD_DIM=head_dim,
        HEAD_DIM_PAD=head_dim_pad,
        BLOCK_SIZE=geometry.block_size,
        KEYS=tile.keys,
        MIN_KEYS=MIN_KEYS_PER_SPLIT,
        MAX_SPLITS=max_splits,
        HAS_WINDOW=sliding_window is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    _decode_combine_kernel[(num_seqs, num_q_heads)](
        workspace.partial_out,
        workspace.partial_lse,
        seq_lens,
        out,
        window,
        out.stride(0),
        out.stride(1),
        NUM_Q_HEADS=num_q_heads,
        HEAD_DIM=head_dim,
        HEAD_DIM_PAD=head_dim_pad,
        KEYS=tile.keys,
        MIN_KEYS=MIN_KEYS_PER_SPLIT,
        MAX_SPLITS=max_splits,
        SPLITS=min(_COMBINE_SPLITS, next_power_of_2(max_splits)),
        HAS_WINDOW=sliding_window is not None,
        num_warps=2,
    )
