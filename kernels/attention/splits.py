"""How a decode batch is cut into splits, and how the splits' results are combined.

The splits of a batch are numbered consecutively, sequence by sequence. The grid has one program per number and KV head, up to a
bound that the host knows. Every program finds its sequence and keys itself, on the device, from the batch's lengths. So no plan is
made, copied or waited for. Do not launch these; `decode_attention` does.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from kvrelay.kernels.attention.tiles import window_at

# Fewest keys of a split: with fewer, the traffic of partial results costs more than the parallelism gains.
MIN_KEYS_PER_SPLIT = 128
# Partial results that one iteration of the combining loop reads.
COMBINE_SPLITS = 8


@triton.jit
@no_type_check
def first_key_of(seq_lens, window, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first key of the tile where a sequence's last token begins to see; 0 without a window."""
    first_keys = seq_lens * 0
    if HAS_WINDOW:
        first_keys = tl.maximum(seq_lens - window_at(seq_lens - 1, window, CHUNK), 0) // KEYS * KEYS
    return first_keys


@triton.jit
@no_type_check
def find_split(
    item,
    seq_lens_ptr,
    window,
    num_seqs,
    SEQS: tl.constexpr,
    KEYS: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The sequence of the batch's split `item`, that sequence's first split, and its number of splits.

    The longest split has the length of `MAX_SPLITS + num_seqs` equal splits. So no batch has more than `MAX_SPLITS + 2 * num_seqs -
    1` splits. If there is no such split, the sequence is `num_seqs` or more.
    """
    seqs = tl.arange(0, SEQS)
    seq_lens = tl.load(seq_lens_ptr + seqs, mask=seqs < num_seqs, other=0)
    num_keys = seq_lens - first_key_of(seq_lens, window, KEYS, HAS_WINDOW, CHUNK)
    longest = tl.cdiv(tl.cdiv(tl.sum(num_keys, axis=0), MAX_SPLITS + num_seqs), KEYS) * KEYS
    num_splits = tl.cdiv(num_keys, tl.maximum(longest, MIN_KEYS))
    seq = tl.sum((tl.cumsum(num_splits, axis=0) <= item).to(tl.int32), axis=0)
    first_split = tl.sum(tl.where(seqs < seq, num_splits, 0), axis=0)
    return seq, first_split, tl.sum(tl.where(seqs == seq, num_splits, 0), axis=0)


@triton.jit
@no_type_check
def decode_combine_kernel(
    partial_out_ptr,
    partial_lse_ptr,
    plan_ptr,
    seq_lens_ptr,
    out_ptr,
    out_stride_seq,
    out_stride_head,
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    # An empty sequence (padding of a captured batch) has no split and no plan. Its row becomes zero, not NaN.
    has_keys = tl.load(seq_lens_ptr + seq) > 0
    first_split = tl.load(plan_ptr + 2 * seq, mask=has_keys, other=0).to(tl.int64)
    num_splits = tl.load(plan_ptr + 2 * seq + 1, mask=has_keys, other=0)
    dims = tl.arange(0, HEAD_DIM_PAD)
    lse_max = tl.full([1], float("-inf"), tl.float32)
    weight_sum = tl.zeros([1], tl.float32)
    acc = tl.zeros([HEAD_DIM_PAD], tl.float32)
    # A sequence's first split has keys, so the maximum is finite from the first iteration on.
    for start in range(0, num_splits, SPLITS):
        splits = start + tl.arange(0, SPLITS)
        present = splits < num_splits
        partials = (first_split + splits) * NUM_Q_HEADS + head
        lse = tl.load(partial_lse_ptr + partials, mask=present, other=float("-inf"))
        partial = tl.load(
            partial_out_ptr + partials[:, None] * HEAD_DIM + dims[None, :],
            mask=present[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        new_max = tl.maximum(lse_max, tl.max(lse, axis=0))
        correction = tl.exp2(lse_max - new_max)
        weights = tl.exp2(lse - new_max)
        weight_sum = weight_sum * correction + tl.sum(weights, axis=0)
        acc = acc * correction + tl.sum(weights[:, None] * partial, axis=0)
        lse_max = new_max
    result = acc / tl.where(weight_sum > 0.0, weight_sum, 1.0)
    out_offsets = seq * out_stride_seq + head * out_stride_head + dims
    tl.store(out_ptr + out_offsets, result.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
