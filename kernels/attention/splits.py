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

# Fewest keys of a split: a program's start costs more than fewer keys take.
MIN_KEYS_PER_SPLIT = 64
# Partial results of a program's heads that one iteration of the combining loop reads: numbers, and splits at most.
_COMBINED_NUMBERS = 8192
_COMBINED_SPLITS = 16
# More waves than so many are not planned for: programs no longer start and end together then, and no wave is idle.
_MANY_WAVES = 7
# Plans that are compared: numbers of waves from the smallest possible on. See `most_waves` for why they are enough.
_PLANS = tl.constexpr(8)
# What a program's start and its partial result cost, in keys that could be read instead: 2.5 us of a wave on an H200.
_KEYS_PER_START = tl.constexpr(54)


def most_waves(num_seqs: int, wave: int) -> int:
    """The largest number of waves that a batch may be cut into, at most six more than the smallest; see `find_split`.

    It allows three splits for each sequence in small batches, and a longest split that a batch's bandwidth hides in all.
    """
    fewest = -(-num_seqs // wave)
    return max(min(-(-3 * num_seqs // wave), max(fewest, _MANY_WAVES)), -(-(num_seqs + (wave + 1) // 2) // wave))


def most_splits(num_seqs: int, wave: int) -> int:
    """An upper bound of the splits of a batch; it grows with both arguments."""
    return most_waves(num_seqs, wave) * wave


def combined_splits(num_heads: int, head_dim: int) -> int:
    """How many splits of `num_heads` heads one iteration combines; both arguments are powers of two."""
    return max(1, min(_COMBINED_SPLITS, _COMBINED_NUMBERS // (num_heads * head_dim)))


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
def _longest_split(
    num_keys, num_seqs, max_waves, SEQS: tl.constexpr, KEYS: tl.constexpr, MIN_KEYS: tl.constexpr, WAVE: tl.constexpr
):
    """The length that no split of the batch exceeds: that of the cheapest plan.

    A plan is a number of waves. If `total / (waves * WAVE - num_seqs + 1)` keys are a longest split, then no batch has more than
    `waves * WAVE` splits. Half a wave saturates the memory. So a plan's cost is the total, and the keys that could be read while
    less than half a wave is left.
    """
    total = tl.sum(num_keys, axis=0)
    # The splits of a sequence are combined one after the other: that should not take longer than the splits themselves.
    most = tl.max(num_keys, axis=0).to(tl.float32)
    shortest = tl.maximum((2.0 * tl.sqrt(most)).to(tl.int32), MIN_KEYS)
    if 3 * SEQS <= WAVE:
        # One wave is the only plan, for all batches that this kernel is compiled for.
        longest = tl.maximum(tl.cdiv(tl.cdiv(total, WAVE - num_seqs + 1), KEYS) * KEYS, shortest)
    else:
        waves = tl.cdiv(num_seqs, WAVE) + tl.arange(0, _PLANS)
        lengths = tl.maximum(tl.cdiv(tl.cdiv(total, waves * WAVE - num_seqs + 1), KEYS) * KEYS, shortest)
        splits = tl.cdiv(num_keys[None, :], lengths[:, None])
        num_splits = tl.sum(splits, axis=1)
        real_length = tl.max(num_keys[None, :].to(tl.float32) / tl.maximum(splits, 1).to(tl.float32), axis=1)
        full = tl.maximum(num_splits - 1, 0) // WAVE
        saturating: tl.constexpr = (WAVE + 1) // 2
        missing = tl.maximum(saturating - (num_splits - full * WAVE), 0)
        wide_total = total.to(tl.float32)
        one_wave = tl.maximum(wide_total, real_length * saturating)
        # Programs of several waves do not end together: each full wave spreads the ends.
        several = wide_total + real_length * missing / tl.maximum(full, 1)
        cost = tl.where(full == 0, one_wave, several) + num_splits.to(tl.float32) * _KEYS_PER_START
        cost = tl.where(waves <= max_waves, cost, float("inf"))
        longest = tl.max(tl.where(cost == tl.min(cost, axis=0), lengths, 0), axis=0)
    return longest


@triton.jit
@no_type_check
def find_split(
    item,
    seq_lens_ptr,
    window,
    num_seqs,
    max_waves,
    SEQS: tl.constexpr,
    KEYS: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    WAVE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The sequence of the batch's split `item`, that sequence's first split, and its number of splits.

    `WAVE` splits run at once. `max_waves` is `most_waves`. A sequence without keys has one split, which is empty. If there is no
    such split, the sequence is `num_seqs` or more.
    """
    seqs = tl.arange(0, SEQS)
    seq_lens = tl.load(seq_lens_ptr + seqs, mask=seqs < num_seqs, other=0)
    num_keys = seq_lens - first_key_of(seq_lens, window, KEYS, HAS_WINDOW, CHUNK)
    longest = _longest_split(num_keys, num_seqs, max_waves, SEQS, KEYS, MIN_KEYS, WAVE)
    num_splits = tl.where(seqs < num_seqs, tl.maximum(tl.cdiv(num_keys, longest), 1), 0)
    seq = tl.sum((tl.cumsum(num_splits, axis=0) <= item).to(tl.int32), axis=0)
    first_split = tl.sum(tl.where(seqs < seq, num_splits, 0), axis=0)
    return seq, first_split, tl.sum(tl.where(seqs == seq, num_splits, 0), axis=0)


@triton.jit
@no_type_check
def combine(
    partial_out_ptr,
    partial_lse_ptr,
    first_split,
    num_splits,
    heads,
    head_mask,
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The results of `heads`, `[HEADS, HEAD_DIM_PAD]`, from those of the splits, in their order; zeros without splits."""
    dims = tl.arange(0, HEAD_DIM_PAD)
    lse_max = tl.full([HEADS], float("-inf"), tl.float32)
    weight_sum = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, HEAD_DIM_PAD], tl.float32)
    mask = head_mask[:, None] & (dims < HEAD_DIM)[None, :]
    # A sequence's first split has keys, so the maximum is finite from the first iteration on.
    for start in range(0, num_splits, SPLITS):
        splits = start + tl.arange(0, SPLITS)
        present = splits < num_splits
        partials = (first_split.to(tl.int64) + splits)[:, None] * NUM_Q_HEADS + heads[None, :]
        # Other programs wrote the results, perhaps during this launch: a multiprocessor's own cache may be older.
        lse = tl.load(
            partial_lse_ptr + partials,
            mask=present[:, None] & head_mask[None, :],
            other=float("-inf"),
            cache_modifier=".cg",
        )
        partial = tl.load(
            partial_out_ptr + partials[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=present[:, None, None] & mask[None, :, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_max = tl.maximum(lse_max, tl.max(lse, axis=0))
        # Rows that pad the heads have no maximum.
        finite_max = tl.where(head_mask, new_max, 0.0)
        correction = tl.exp2(lse_max - finite_max)
        weights = tl.exp2(lse - finite_max[None, :])
        weight_sum = weight_sum * correction + tl.sum(weights, axis=0)
        acc = acc * correction[:, None] + tl.sum(weights[:, :, None] * partial, axis=0)
        lse_max = new_max
    return acc / tl.where(weight_sum > 0.0, weight_sum, 1.0)[:, None]


@triton.jit
@no_type_check
def store_result(
    acc,
    lse,
    heads,
    row_mask,
    item,
    first_split,
    num_splits,
    partial_out_ptr,
    partial_lse_ptr,
    arrivals_ptr,
    out_ptr,
    out_stride_head,
    kv_head,
    NUM_Q_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Stores what split `item` has for the rows of one KV head; if it is the last to finish, combines all of its sequence.

    The only split of a sequence goes to `out_ptr`, its row, at once. `arrivals_ptr` points to the number of finished splits of the
    sequence and KV head: 0 before the first and after the last. SPLITS, see `combined_splits`, is 0 if
    `decode_combine_kernel` will combine.
    """
    dims = tl.arange(0, HEAD_DIM_PAD)
    mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
    if (SPLITS > 0) & (num_splits == 1):
        out_ptrs = out_ptr + (heads * out_stride_head)[:, None] + dims[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        partials = item.to(tl.int64) * NUM_Q_HEADS + heads
        tl.store(partial_out_ptr + partials[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)
        tl.store(partial_lse_ptr + partials, lse, mask=row_mask)
        if SPLITS > 0:
            # All threads have stored their results before one of them counts. So who counts last sees the results of all.
            tl.debug_barrier()
            if tl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
                tl.debug_barrier()
                group = tl.arange(0, GROUP_PAD)
                own_heads = kv_head * GROUP + group
                result = combine(
                    partial_out_ptr,
                    partial_lse_ptr,
                    first_split,
                    num_splits,
                    own_heads,
                    group < GROUP,
                    NUM_Q_HEADS,
                    HEAD_DIM,
                    HEAD_DIM_PAD,
                    GROUP_PAD,
                    SPLITS,
                )
                out_ptrs = out_ptr + (own_heads * out_stride_head)[:, None] + dims[None, :]
                own_mask = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
                tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=own_mask)
                tl.store(arrivals_ptr, 0)


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
    heads = tl.program_id(1) + tl.arange(0, 1)
    # The one split of an empty sequence (padding of a captured batch) has no weight. The row becomes zero, not NaN.
    has_keys = tl.load(seq_lens_ptr + seq) > 0
    first_split = tl.load(plan_ptr + 2 * seq, mask=has_keys, other=0)
    num_splits = tl.load(plan_ptr + 2 * seq + 1, mask=has_keys, other=0)
    result = combine(
        partial_out_ptr,
        partial_lse_ptr,
        first_split,
        num_splits,
        heads,
        heads < NUM_Q_HEADS,
        NUM_Q_HEADS,
        HEAD_DIM,
        HEAD_DIM_PAD,
        1,
        SPLITS,
    )
    dims = tl.arange(0, HEAD_DIM_PAD)
    out_offsets = seq * out_stride_seq + (heads * out_stride_head)[:, None] + dims[None, :]
    tl.store(out_ptr + out_offsets, result.to(out_ptr.dtype.element_ty), mask=(dims < HEAD_DIM)[None, :])
