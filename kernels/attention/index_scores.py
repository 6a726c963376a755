"""Scores of paged keys for an indexer (DSA: DeepSeek-V3.2, 2025), and the rows of the highest ones.

The indexer's keys stand behind the latents in the pool's rows. A key's score for a token is the sum over the heads of
`weight * relu(query @ key)`. Scores are written as int64 numbers in the same order, with the position in the low bits. So no two
are equal, and of equal scores the first position is the highest: what `topk` takes does not depend on its algorithm.

Attention over the rows is `latent_attention`'s, with blocks of one token.
"""

from __future__ import annotations

import math
from typing import no_type_check

import torch
import triton
import triton.language as tl

from kvrelay.kernels.checks import (
    BLOCK_SIZES,
    FLOAT_DTYPES,
    next_power_of_2,
    require_dtype,
    require_int32,
    require_shape,
    require_unit_stride,
)

_KEYS = 64  # positions of a program
_TOKENS = 8  # a program's tokens of one sequence, for which it loads the keys once
_LOWEST = torch.iinfo(torch.int64).min


def index_scores_reference(
    query: torch.Tensor,
    weights: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    visible: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """The same contract as `index_scores`, in at least fp32 before the rounding to it; reads lengths on the host."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    size, block_size, per_seq = query.shape[2], pool.shape[4], len(query) // len(block_tables)
    out.fill_(_LOWEST)
    for row, count in enumerate(visible.tolist()):
        blocks = block_tables[row // per_seq, : -(-count // block_size)].long()
        keys = pool[blocks, layer, 0, 0].flatten(0, 1)[:count, -size:].to(dtype)
        products = (query[row].to(dtype) @ keys.T).relu()  # [num_heads, count]
        scores = (weights[row, :, None].to(dtype) * products).sum(0).float() + 0.0
        bits = scores.view(torch.int32)
        in_order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        out[row, :count] = (in_order.long() << 32) | (0x7FFFFFFF - torch.arange(count, device=out.device))


@triton.jit(
    do_not_specialize=["per_seq", "num_positions", "out_stride_row", "block_tables_stride_seq"],
    do_not_specialize_on_alignment=["weights_ptr", "block_tables_ptr", "visible_ptr", "out_ptr"],
)
@no_type_check
def _index_scores_kernel(
    query_ptr,
    weights_ptr,
    pool_ptr,
    block_tables_ptr,
    visible_ptr,
    out_ptr,
    per_seq,
    num_positions,
    query_stride_row,
    query_stride_head,
    weights_stride_row,
    out_stride_row,
    block_tables_stride_seq,
    pool_stride_block,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROW: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    positions = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    seq = tl.program_id(2)
    first = seq * per_seq + tl.program_id(1) * TOKENS
    end = tl.minimum(first + TOKENS, (seq + 1) * per_seq)
    # A sequence's last token sees the most. Data behind that is stale, perhaps NaN: never load it.
    present = positions < tl.load(visible_ptr + end - 1)
    table_ptr = block_tables_ptr + seq.to(tl.int64) * block_tables_stride_seq
    blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=present, other=0)
    offsets = blocks.to(tl.int64) * pool_stride_block + (positions % BLOCK_SIZE) * ROW + (ROW - SIZE)
    dims, heads = tl.arange(0, SIZE_PAD), tl.arange(0, HEADS_PAD)
    keys = tl.load(
        pool_ptr + offsets[:, None] + dims[None, :], mask=present[:, None] & (dims < SIZE)[None, :], other=0.0
    )
    is_query = (heads < NUM_HEADS)[:, None] & (dims < SIZE)[None, :]
    for token in range(end - first):
        row = first + token
        rows = row.to(tl.int64)
        query = tl.load(
            query_ptr + rows * query_stride_row + heads[:, None] * query_stride_head + dims[None, :],
            mask=is_query,
            other=0.0,
        )
        weights = tl.load(weights_ptr + rows * weights_stride_row + heads, mask=heads < NUM_HEADS, other=0.0)
        products = tl.maximum(tl.dot(query, tl.trans(keys), input_precision="ieee"), 0.0)  # [HEADS_PAD, KEYS]
        scores = tl.sum(products * weights[:, None], axis=0)
        scores = tl.where(scores == 0.0, 0.0, scores)  # -0 becomes 0
        bits = scores.to(tl.int32, bitcast=True)
        in_order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        ranks = (in_order.to(tl.int64) << 32) | (0x7FFFFFFF - positions).to(tl.int64)
        is_visible = positions < tl.load(visible_ptr + row)
        lowest = tl.full([KEYS], 1, tl.int64) << 63
        tl.store(
            out_ptr + rows * out_stride_row + positions,
            tl.where(is_visible, ranks, lowest),
            mask=positions < num_positions,
        )


def index_scores(
    query: torch.Tensor,
    weights: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    visible: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """The scores of the positions `[0, num_positions)` for rows of `per_seq` consecutive tokens of each sequence.

    Args:
        query: `[num_seqs * per_seq, num_heads, size]`, pool's dtype; may be strided.
        weights: `[num_seqs * per_seq, num_heads]` fp32.
        pool: `[num_blocks, num_layers, 1, 1, block_size, row]`; of layer `layer` the last `size` numbers of each row are read.
        block_tables: `[num_seqs, max_blocks]` int32; entries past what is visible are not read.
        visible: `[num_seqs * per_seq]` int32, positions that each row sees, ascending within a sequence; 0 marks padding.
        out: `[num_seqs * per_seq, num_positions]` int64; positions that a row does not see get the lowest number.

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    require_shape("query", query, ("num_rows", "num_heads", "size"))
    (num_rows, num_heads, size), num_seqs = query.shape, block_tables.shape[0]
    require_shape("pool", pool, ("num_blocks", "num_layers", 1, 1, "block_size", "row"))
    require_dtype("pool", pool, *FLOAT_DTYPES)
    require_dtype("query", query, pool.dtype)
    require_shape("weights", weights, (num_rows, num_heads))
    require_dtype("weights", weights, torch.float32)
    require_shape("block_tables", block_tables, (num_seqs, "max_blocks"))
    require_shape("visible", visible, (num_rows,))
    require_int32(block_tables=block_tables, visible=visible)
    require_shape("out", out, (num_rows, "num_positions"))
    require_dtype("out", out, torch.int64)
    for name, tensor in (("query", query), ("weights", weights), ("out", out)):
        require_unit_stride(name, tensor)
    block_size, row = pool.shape[4:]
    if not pool.is_contiguous() or block_size not in BLOCK_SIZES or not 0 <= layer < pool.shape[1] or size > row:
        raise ValueError(
            f"pool of shape {tuple(pool.shape)} with strides {pool.stride()}, expected a contiguous one with block_size in "
            f"{BLOCK_SIZES}, layer {layer}, and rows of at least {size}"
        )
    if not num_seqs or num_rows % num_seqs:
        raise ValueError(f"query has {num_rows} rows, expected a multiple of the {num_seqs} sequences")
    per_seq, num_positions = num_rows // num_seqs, out.shape[1]
    layer_pool = pool[:, layer]
    _index_scores_kernel[(math.ceil(num_positions / _KEYS), math.ceil(per_seq / _TOKENS), num_seqs)](
        query,
        weights,
        layer_pool,
        block_tables,
        visible,
        out,
        per_seq,
        num_positions,
        query.stride(0),
        query.stride(1),
        weights.stride(0),
        out.stride(0),
        block_tables.stride(0),
        layer_pool.stride(0),
        NUM_HEADS=num_heads,
        SIZE=size,
        ROW=row,
        HEADS_PAD=max(16, next_power_of_2(num_heads)),
        SIZE_PAD=max(16, next_power_of_2(size)),
        BLOCK_SIZE=block_size,
        KEYS=_KEYS,
        TOKENS=_TOKENS,
        num_warps=4,
        num_stages=2,
    )


def highest_rows(ranks: torch.Tensor, block_tables: torch.Tensor, topk: int, pool: torch.Tensor) -> torch.Tensor:
    """The pool's rows of the `topk` highest scores, `[num_rows, topk]` int32, from the highest on. Does not wait for the device.

    A row that sees fewer positions has those first; what follows them is meaningless. Rows are counted in layer 0 over
    `[num_blocks, num_layers, block_size]`.

    Args:
        ranks: of `index_scores`; at least `topk` positions.
        block_tables: as for `index_scores`.
        pool: as for `index_scores`; only its shape is used.
    """
    num_layers, block_size = pool.shape[1], pool.shape[4]
    positions = ranks.topk(topk, dim=-1).indices
    of_sequences = (positions // block_size).view(len(block_tables), -1)
    blocks = block_tables.gather(1, of_sequences).view_as(positions)
    return blocks * (num_layers * block_size) + (positions % block_size).int()
