"""Checks the attention kernels against float64: ragged lengths, windows, cached prefixes, offsets beyond 32 bits, fp8."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from gpu_parts.checks.comparing import compared, poisoned
from gpu_parts.frame.rows import Kernel
from gpu_parts.frame.running import Context, Finding, Note
from gpu_parts.frame.sizes import BLOCK_SIZE, BOX_BLOCK_SIZE
from gpu_parts.kernels.paged import (
    PagedContext,
    attention_float64,
    decode_call,
    paged_context,
    prefill_call,
    random_pool,
)
from kvrelay.kernels.attention.prefill_tiles import TileLoads
from kvrelay.kernels.attention.rotary import rotary_kv_write

_FP8 = torch.float8_e4m3fn


def check_decode_attention(context: Context) -> Iterator[Finding]:
    """Check decode attention."""
    paged = _paged(context, context.dtype)
    yield Note(f"pool of {paged.pool.numel():,} elements (2^31 is {2**31:,}), layer {paged.layer}")
    for window in (None, context.sizes.check_window):
        yield from _decode(context, Kernel.DECODE, paged, window)


def check_prefill_attention(context: Context) -> Iterator[Finding]:
    """Check whole prompts, and prompts with a cached prefix, in one ragged batch."""
    paged = _paged(context, context.dtype)
    for window in (None, context.sizes.check_window):
        yield from _prefill(context, Kernel.PREFILL, paged, window)


def check_prefill_boxes(context: Context) -> Iterator[Finding]:
    """Check blocks that are loaded whole. In a dry run too, one context is long enough for that."""
    sizes, generator = context.sizes, context.generator()
    lens = (*sizes.check_lens, 2 * BOX_BLOCK_SIZE + 2)
    num_needed = sum(-(-length // BOX_BLOCK_SIZE) for length in lens) + 1
    num_blocks = max(sizes.check_blocks * BLOCK_SIZE // BOX_BLOCK_SIZE, num_needed)
    dtype = box_dtype(context)
    pool = random_pool(sizes.shape, num_blocks, sizes.shape.num_layers, dtype, generator, BOX_BLOCK_SIZE)
    paged = paged_context(pool, sizes.shape.num_layers - 1, lens, generator, is_poisoned=True)
    yield from _prefill(context, Kernel.BOXES, paged, None, TileLoads.BOXES)


def box_dtype(context: Context) -> torch.dtype:
    """The model's dtype, if boxes support it, as in every run but a dry one."""
    return context.dtype if context.dtype.itemsize == 2 else torch.float16


def check_fp8(context: Context) -> Iterator[Finding]:
    """Check both over a pool of e4m3 numbers with scales, and the write into such a pool."""
    paged = _paged(context, _FP8)
    yield Note(f"pool of {paged.pool.numel():,} elements, layer {paged.layer}")
    yield from _decode(context, Kernel.FP8, paged, None)
    yield from _prefill(context, Kernel.FP8, paged, None)
    if context.device.type == "cuda":
        yield from _write(context, paged)
    else:
        yield Note("the write of fp8 is left out: Triton's interpreter cuts off where a device rounds")


def _decode(context: Context, kernel: Kernel, paged: PagedContext, window: int | None) -> Iterator[Finding]:
    query = _query(context, len(paged.lens))
    out = poisoned(query.shape, query)
    decode_call(query, paged, out, window)()
    places = range(len(paged.lens))
    rows = [attention_float64(query[place : place + 1], paged.keys_values(place), window) for place in places]
    case = f"decode, contexts {paged.lens}, window {window}"
    yield from compared(kernel, case, out, torch.cat(rows), _rounded_to(out, paged))


def _prefill(
    context: Context, kernel: Kernel, paged: PagedContext, window: int | None, loads: TileLoads = TileLoads.POINTERS
) -> Iterator[Finding]:
    query_lens = [length if index % 2 == 0 else -(-length // 3) for index, length in enumerate(paged.lens)]
    query = _query(context, sum(query_lens)).to(context.dtype if paged.kv_scales is not None else paged.pool.dtype)
    starts = [0, *itertools.accumulate(query_lens)]
    out = poisoned(query.shape, query)
    prefill_call(query, query_lens, paged, out, window, loads)()
    for index, length in enumerate(paged.lens):
        own = slice(starts[index], starts[index + 1])
        expected = attention_float64(query[own], paged.keys_values(index), window)
        case = f"prefill, {query_lens[index]} tokens behind {length - query_lens[index]} cached, window {window}"
        yield from compared(kernel, case, out[own], expected, _rounded_to(out, paged))


def _write(context: Context, paged: PagedContext) -> Iterator[Finding]:
    """Write into the slots of the last context, without rotation, which has its own check."""
    shape, device = context.sizes.shape, context.device
    assert paged.kv_scales is not None
    num_tokens = paged.lens[-1]
    query, key, value = (_query(context, num_tokens)[:, :heads] for heads in _head_counts(context))
    table = torch.zeros((1, shape.head_dim // 2), device=device)
    positions = torch.arange(num_tokens, device=device)
    blocks = paged.block_tables[-1].long()[positions // paged.pool.shape[4]]
    slots = blocks * paged.pool.shape[4] + positions % paged.pool.shape[4]
    rotary_kv_write(
        query,
        key,
        value,
        table + 1,
        table,
        torch.zeros_like(positions),
        paged.pool,
        paged.layer,
        slots,
        kv_scales=paged.kv_scales,
    )
    written = paged.keys_values(len(paged.lens) - 1)
    for part, name, given in ((0, "keys", key), (1, "values", value)):
        case = f"{num_tokens} {name} written"
        yield from compared(Kernel.FP8, case, written[part], given.transpose(0, 1).double(), _FP8)


def _head_counts(context: Context) -> tuple[int, int, int]:
    shape = context.sizes.shape
    return shape.num_q_heads, shape.num_kv_heads, shape.num_kv_heads


def _rounded_to(out: torch.Tensor, paged: PagedContext) -> torch.dtype:
    """The coarsest format on the way: over fp8 the kernels compute in fp16."""
    return torch.float16 if paged.pool.dtype == _FP8 and out.dtype == torch.float32 else out.dtype


def _paged(context: Context, dtype: torch.dtype) -> PagedContext:
    """Contexts in the last layer, in blocks from the whole pool."""
    sizes, generator = context.sizes, context.generator()
    pool = random_pool(sizes.shape, sizes.check_blocks, sizes.shape.num_layers, dtype, generator)
    return paged_context(pool, sizes.shape.num_layers - 1, sizes.check_lens, generator, is_poisoned=True)


def _query(context: Context, num_rows: int) -> torch.Tensor:
    """A query with twice the usual spread, so that some keys matter more than others, as in a model."""
    shape = context.sizes.shape
    sizes = (num_rows, shape.num_q_heads, shape.head_dim)
    query = torch.empty(sizes, dtype=context.dtype, device=context.device)
    return query.normal_(std=2.0, generator=context.generator())
