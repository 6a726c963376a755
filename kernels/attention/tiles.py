"""A tile of queries in the attention kernels: its conversion, and the pass over tiles of keys.

The pass is FlashAttention-2's (Dao, 2023, arXiv 2307.08691), in base 2: scores are scaled by log2(e). Do not launch these;
`prefill_attention` and `decode_attention` do.
"""

from __future__ import annotations

import math
from typing import no_type_check

import triton
import triton.language as tl

LOG2_E = math.log2(math.e)
_LOG2_E = tl.constexpr(LOG2_E)
# The largest magnitude that `to_half` returns: far from fp16's maximum of 65504, and far enough from its subnormals for
# small numbers.
_HALF_RANGE = tl.constexpr(16384.0)


@triton.jit
@no_type_check
def window_at(positions, window, CHUNK: tl.constexpr):
    """The number of tokens that queries at `positions` see, including themselves: `window` or, with CHUNK, those in their chunk so
    far.
    """
    if CHUNK > 0:
        window = positions % CHUNK + 1
    return window


@triton.jit
@no_type_check
def to_half(q):
    """`q` as fp16 numbers that use fp16's range, and the factor that undoes the scaling.

    e4m3 converts to fp16 without loss in one instruction; to bf16 it takes several. So over an fp8 pool all dot products use fp16
    numbers, and queries, which may exceed fp16, are scaled into its range.
    """
    factor = tl.maximum(tl.max(tl.max(tl.abs(q.to(tl.float32)), axis=1), axis=0), 1.0e-30) / _HALF_RANGE
    return (q.to(tl.float32) / factor).to(tl.float16), factor


@triton.jit
@no_type_check
def _load_tile(
    ptrs,
    present,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    TO_HALF: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Keys or values of a tile; absent ones and the padding of a head are 0. An unnecessary mask would cost time."""
    dims = tl.arange(0, HEAD_DIM_PAD)
    if MASKED:
        tile = tl.load(ptrs, mask=present[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM != HEAD_DIM_PAD:
        tile = tl.load(ptrs, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    else:
        tile = tl.load(ptrs)
    if TO_HALF:
        tile = tile.to(tl.float16)
    return tile


@triton.jit
@no_type_check
def cap(scores, softcap):
    """`softcap * tanh(scores / softcap)` for scores in base 2: input and output are scaled by log2(e).

    tanh(y) is 1 - 2 / (1 + exp(2 y)), which needs only the softmax's instructions.
    """
    return softcap * _LOG2_E * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 / softcap))))


@triton.jit
@no_type_check
def _weigh(scores, factor, row_max, row_sum):
    """One step of the online softmax: the weights, the correction of earlier results, and the new `row_max` and `row_sum`.

    `factor`, positive, brings `scores` to base 2. Applied here, product and difference are one instruction.
    """
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * factor)
    correction = tl.exp2(row_max - new_max)
    weights = tl.exp2(scores * factor - new_max[:, None])
    return weights, correction, new_max, row_sum * correction + tl.sum(weights, axis=1)


@triton.jit
@no_type_check
def accumulate(
    q,
    acc,
    row_max,
    row_sum,
    query_positions,
    last_seen,
    key_start,
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
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_LAST_SEEN: tl.constexpr,
    LOOK_AHEAD: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The online softmax over the keys `[key_start, key_end)`. Returns the new `acc`, `row_max` and `row_sum`.

    Without MASKED, every key is visible to every row. A row sees no key behind its own position or, with HAS_LAST_SEEN, behind
    its `last_seen`. With a window, no row sees a key before `first_seen`. With LOOK_AHEAD, a
    tile's block ids are loaded one iteration ahead, so that the loads of keys need not wait for their addresses.
    """
    dims = tl.arange(0, HEAD_DIM_PAD)
    value_dims = tl.arange(0, VALUE_DIM_PAD)
    if LOOK_AHEAD:
        positions = key_start + tl.arange(0, KEYS)
        next_blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=positions < seq_len, other=0)
    for tile_start in range(key_start, key_end, KEYS):
        positions = tile_start + tl.arange(0, KEYS)
        # Data past seq_len in the last block is stale, perhaps NaN: never load it.
        present = positions < seq_len
        if HAS_WINDOW:  # nor keys before the window: their block may belong to another sequence
            present = present & (positions >= first_seen)
        if LOOK_AHEAD:
            blocks = next_blocks
            next_positions = positions + KEYS
            next_blocks = tl.load(table_ptr + next_positions // BLOCK_SIZE, mask=next_positions < seq_len, other=0)
        elif MASKED:
            blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=present, other=0)
        else:
            blocks = tl.load(table_ptr + positions // BLOCK_SIZE)
        starts = blocks.to(tl.int64) * pool_stride_block
        key_ptrs = head_ptr + (starts + (positions % BLOCK_SIZE) * HEAD_DIM)[:, None] + dims[None, :]
        keys = _load_tile(key_ptrs, present, HEAD_DIM, HEAD_DIM_PAD, HAS_SCALES, MASKED)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        factor = scale_log2
        if HAS_SOFTCAP:
            scores = cap(scores * scale_log2, softcap)
            factor = 1.0
        if MASKED:
            distance = query_positions[:, None] - positions[None, :]
            visible = positions[None, :] <= last_seen[:, None] if HAS_LAST_SEEN else distance >= 0
            if CHUNK > 0:
                visible = visible & (distance < window_at(query_positions, window, CHUNK)[:, None])
            elif HAS_WINDOW:
                visible = visible & (distance < window)
            scores = tl.where(visible, scores, float("-inf"))
        weights, correction, row_max, row_sum = _weigh(scores, factor, row_max, row_sum)
        if VALUE_DIM == HEAD_DIM:
            value_ptrs = key_ptrs + value_offset  # separate addresses would spill registers
        else:
            rows = starts + (positions % BLOCK_SIZE) * VALUE_DIM
            value_ptrs = head_ptr + value_offset + rows[:, None] + value_dims[None, :]
        values = _load_tile(value_ptrs, present, VALUE_DIM, VALUE_DIM_PAD, HAS_SCALES, MASKED)
        acc = tl.dot(weights.to(values.dtype), values, acc * correction[:, None], input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit
@no_type_check
def accumulate_boxes(
    q,
    acc,
    row_max,
    row_sum,
    key_end,
    table_ptr,
    boxes,
    head_row,
    block_rows,
    value_rows,
    scale_log2,
    softcap,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Like `accumulate` over the keys `[0, key_end)`, which are all visible to every row; each tile must be in one block.

    `boxes` describes the rows of all blocks (`prefill_tiles.layer_boxes`). A block has `block_rows` rows; the keys of a head begin
    at its row `head_row`, and its values `value_rows` later. A box is loaded as a whole, so `key_end`, a multiple of KEYS, must not
    exceed the sequence's length: stale data may be NaN, which even a weight of 0 does not remove.
    """
    # As with LOOK_AHEAD, the block id of the next box is loaded early, so that its load need not wait.
    next_block = tl.load(table_ptr, mask=key_end > 0, other=0)
    for tile_start in range(0, key_end, KEYS):
        row = next_block * block_rows + head_row + tile_start % BLOCK_SIZE
        next_start = tile_start + KEYS
        next_block = tl.load(table_ptr + next_start // BLOCK_SIZE, mask=next_start < key_end, other=0)
        keys = boxes.load([row, 0])
        if HAS_SCALES:
            keys = keys.to(tl.float16)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        factor = scale_log2
        if HAS_SOFTCAP:
            scores = cap(scores * scale_log2, softcap)
            factor = 1.0
        weights, correction, row_max, row_sum = _weigh(scores, factor, row_max, row_sum)
        values = boxes.load([row + value_rows, 0])
        if HAS_SCALES:
            values = values.to(tl.float16)
        acc = tl.dot(weights.to(values.dtype), values, acc * correction[:, None], input_precision="ieee")
    return acc, row_max, row_sum
