"""Paged contexts for kernels, and a plain attention in float64."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gpu_parts.frame.sizes import BLOCK_SIZE, ModelShape
from kvrelay.kernels.attention.decode import paged_decode_attention
from kvrelay.kernels.attention.decode_workspace import DecodeWorkspace, splits_for_device
from kvrelay.kernels.attention.prefill import paged_prefill_attention
from kvrelay.kernels.attention.prefill_tiles import TileLoads

_MAX_SCORES = 1 << 26  # float64 elements of a piece of the reference: half a gibibyte
_POISON = 64.0  # factor on numbers outside all contexts, so that reading them is detected
_FP8 = torch.float8_e4m3fn
_FP8_LARGEST = 0x7E  # the byte of 448


@dataclass(frozen=True, slots=True)
class PagedContext:
    """Sequences whose keys and values are in blocks anywhere in a pool."""

    pool: torch.Tensor  # [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
    layer: int
    lens: tuple[int, ...]
    block_tables: torch.Tensor  # [num_seqs, max_blocks] int32
    seq_lens: torch.Tensor  # [num_seqs] int32
    kv_scales: torch.Tensor | None  # [num_layers, 2, num_kv_heads] fp32, of an fp8 pool

    def keys_values(self, index: int) -> torch.Tensor:
        """One sequence's keys and values, gathered: ``[2, num_kv_heads, len, head_dim]``. From fp8: scaled, in float64."""
        num_blocks = -(-self.lens[index] // self.pool.shape[4])
        block_ids = self.block_tables[index, :num_blocks].long()
        # All devices can gather bytes, but not fp8 numbers.
        is_fp8 = self.pool.dtype == _FP8
        blocks = (self.pool.view(torch.uint8) if is_fp8 else self.pool)[block_ids, self.layer].view(self.pool.dtype)
        # [blocks, 2, heads, tokens, dim] -> [2, heads, blocks * tokens, dim]
        gathered = blocks.permute(1, 2, 0, 3, 4)
        if self.kv_scales is not None:
            gathered = gathered.double() * self.kv_scales[self.layer].double()[:, :, None, None, None]
        return gathered.flatten(2, 3)[:, :, : self.lens[index]]


def random_pool(
    shape: ModelShape,
    num_blocks: int,
    num_layers: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    block_size: int = BLOCK_SIZE,
) -> torch.Tensor:
    """A pool of random numbers; for fp8 between 1/8 and 2, of either sign."""
    sizes = (num_blocks, num_layers, 2, shape.num_kv_heads, block_size, shape.head_dim)
    if dtype == _FP8:
        codes = torch.randint(0, 64, sizes, dtype=torch.uint8, device=generator.device, generator=generator)
        return _signed(codes)
    return torch.empty(sizes, dtype=dtype, device=generator.device).normal_(generator=generator)


def paged_context(
    pool: torch.Tensor, layer: int, lens: Sequence[int], generator: torch.Generator, *, is_poisoned: bool = False
) -> PagedContext:
    """Contexts of ``lens`` tokens in random blocks of ``pool``. Raises ValueError if it has too few blocks.

    ``is_poisoned``: enlarge the numbers after a context's end in its last block, and in the block that pads the tables.
    """
    block_size = pool.shape[4]
    counts = [-(-length // block_size) for length in lens]
    if sum(counts) + 1 > pool.shape[0]:
        raise ValueError(f"contexts of {sum(counts)} blocks, and one to pad with, in a pool of {pool.shape[0]}")
    order = torch.randperm(pool.shape[0], device=pool.device, generator=generator).int()
    tables = order[-1].repeat(len(lens), max(counts) + 1)
    first = 0
    for index, count in enumerate(counts):
        tables[index, :count] = order[first : first + count]
        first += count
    if is_poisoned:
        _spoil(pool, int(order[-1]), layer, 0)
        for index, length in enumerate(lens):
            if length % block_size:
                _spoil(pool, int(tables[index, counts[index] - 1]), layer, length % block_size)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=pool.device)
    scales: torch.Tensor | None = None
    if pool.dtype == _FP8:
        scales = 0.5 + torch.rand((pool.shape[1], 2, pool.shape[3]), device=pool.device, generator=generator)
    return PagedContext(pool, layer, tuple(lens), tables.contiguous(), seq_lens, scales)


def num_multiprocessors(device: torch.device) -> int:
    """The device's multiprocessors; four in a dry run."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 4


def decode_call(
    query: torch.Tensor, paged: PagedContext, out: torch.Tensor, window: int | None = None
) -> Callable[[], None]:
    """Our decode attention of one ``query`` per context into ``out``; both ``[num_seqs, num_q_heads, head_dim]``.

    The workspace is sized for the device, as in the engine.
    """
    num_q_heads, head_dim = query.shape[1:]
    max_splits = splits_for_device(num_multiprocessors(query.device), paged.pool.shape[3])
    return functools.partial(
        paged_decode_attention,
        query,
        paged.pool,
        paged.layer,
        paged.block_tables,
        paged.seq_lens,
        scale=head_dim**-0.5,
        sliding_window=window,
        workspace=DecodeWorkspace.allocate(len(paged.lens), num_q_heads, head_dim, max_splits, query.device),
        out=out,
        kv_scales=paged.kv_scales,
    )


def prefill_call(
    query: torch.Tensor,
    query_lens: Sequence[int],
    paged: PagedContext,
    out: torch.Tensor,
    window: int | None = None,
    loads: TileLoads = TileLoads.POINTERS,
) -> Callable[[], None]:
    """Our prefill attention of the last ``query_lens`` positions of each context, into ``out``.

    ``query`` and ``out``: ``[sum(query_lens), num_q_heads, head_dim]``.
    """
    starts = [0, *itertools.accumulate(query_lens)]
    return functools.partial(
        paged_prefill_attention,
        query,
        paged.pool,
        paged.layer,
        paged.block_tables,
        torch.tensor(starts, dtype=torch.int32, device=query.device),
        paged.seq_lens,
        scale=query.shape[2] ** -0.5,
        sliding_window=window,
        max_query_len=max(query_lens),
        out=out,
        kv_scales=paged.kv_scales,
        loads=loads,
    )


def _signed(codes: torch.Tensor) -> torch.Tensor:
    """e4m3 numbers of the bytes 0x20 to 0x3f, with a sign, from ``codes`` of 0 to 63, which are overwritten."""
    signs = codes.bitwise_and(32) * 4
    return codes.bitwise_and_(31).add_(0x20).add_(signs).view(_FP8)


def _spoil(pool: torch.Tensor, block_id: int, layer: int, first: int) -> None:
    """Enlarge a block's tokens from ``first`` on."""
    if pool.dtype == _FP8:
        pool.view(torch.uint8)[block_id, layer, :, :, first:] = _FP8_LARGEST
    else:
        pool[block_id, layer, :, :, first:] *= _POISON


def attention_float64(query: torch.Tensor, keys_values: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """Causal attention of the last ``num_queries`` positions of a context, scaled by ``head_dim ** -0.5``.

    Args:
        query: ``[num_queries, num_q_heads, head_dim]``.
        keys_values: ``[2, num_kv_heads, len, head_dim]``.
        window: a query sees so many positions, its own included; None: all.

    Returns:
        As ``query``, float64.
    """
    num_queries, num_q_heads, head_dim = query.shape
    _, num_kv_heads, length, _ = keys_values.shape
    keys, values = keys_values.double()
    group = num_q_heads // num_kv_heads
    # [kv_heads, group, queries, dim]
    grouped = query.double().view(num_queries, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    positions = torch.arange(length, device=query.device)
    step = max(1, _MAX_SCORES // (num_q_heads * length))
    pieces: list[torch.Tensor] = []
    for start in range(0, num_queries, step):
        piece = grouped[:, :, start : start + step]
        own = positions[length - num_queries :][start : start + step, None]
        is_visible = positions <= own
        if window is not None:
            is_visible &= positions > own - window
        scores = piece @ keys[:, None].mT * head_dim**-0.5
        weights = scores.masked_fill(~is_visible, float("-inf")).softmax(-1)
        pieces.append(weights @ values[:, None])
    return torch.cat(pieces, dim=2).permute(2, 0, 1, 3).reshape(query.shape)
