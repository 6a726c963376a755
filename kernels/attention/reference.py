"""Attention over the paged pool in plain torch: the reference of the kernels for prompts and for single tokens.

Not for serving: it copies each sequence's keys and values out of the pool, and reads lengths on the host.
"""

from __future__ import annotations

import math

import torch

from kvrelay.kernels.attention.kv_scales import dequantise
from kvrelay.kernels.attention.prefill_tiles import TileLoads
from kvrelay.kernels.checks import PagedKv


def gather_context(
    pool: torch.Tensor | PagedKv, layer: int, block_table: torch.Tensor, seq_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy one sequence's keys and values out of the pool: two tensors `[num_kv_heads, seq_len, size]`."""
    kv = PagedKv.of(pool)
    block_ids = block_table[: -(-seq_len // kv.keys.shape[3])].long()
    # [num_blocks, num_kv_heads, block_size, size] each
    keys, values = (view[block_ids, layer].transpose(0, 1).flatten(1, 2)[:, :seq_len] for view in (kv.keys, kv.values))
    return keys, values


def paged_prefill_attention_reference(
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
    """The same as `paged_prefill_attention`, in at least fp32, for any `loads`. Reads lengths on the host."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    for index, seq_len in enumerate(lens):
        start, end = starts[index], starts[index + 1]
        assert end - start <= min(max_query_len, seq_len), (start, end, max_query_len, seq_len)
        scales = None if kv_scales is None else kv_scales[layer]
        context = gather_context(pool, layer, block_tables[index], seq_len)
        keys, values = (dequantise(t, scales, kind).to(dtype) for kind, t in enumerate(context))
        num_kv_heads, head_dim = keys.shape[0], keys.shape[2]
        # [num_kv_heads, group, query_len, head_dim]
        by_group = (end - start, num_kv_heads, q.shape[1] // num_kv_heads, head_dim)
        query = q[start:end].to(dtype).view(by_group).permute(1, 2, 0, 3)
        scores = query @ keys[:, None].transpose(-1, -2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        query_positions = torch.arange(seq_len - (end - start), seq_len, device=q.device)[:, None]
        key_positions = torch.arange(seq_len, device=q.device)[None, :]
        distance = query_positions - key_positions
        visible = key_positions <= (query_positions if last_seen is None else last_seen[start:end, None])
        if sliding_window is not None:
            visible &= distance < sliding_window
        if chunk_size is not None:
            visible &= distance <= query_positions % chunk_size
        scores = scores.masked_fill(~visible, -math.inf)
        if sinks is not None:
            of_heads = sinks.to(dtype).view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, of_heads), dim=-1)
        result = scores.softmax(-1)[..., :seq_len] @ values[:, None]
        out[start:end] = result.permute(2, 0, 1, 3).flatten(1, 2).to(out.dtype)


def paged_decode_attention_reference(
    q: torch.Tensor,
    pool: torch.Tensor | PagedKv,
    layer: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    chunk_size: int | None = None,
    out: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Same contract as `paged_decode_attention`; reads lengths on the host."""
    out[seq_lens == 0] = 0
    rows = seq_lens.nonzero()[:, 0]
    result = out[rows]
    paged_prefill_attention_reference(
        q[rows],
        pool,
        layer,
        block_tables[rows],
        torch.arange(rows.numel() + 1, dtype=torch.int32, device=q.device),
        seq_lens[rows],
        scale=scale,
        sliding_window=sliding_window,
        chunk_size=chunk_size,
        max_query_len=1,
        out=result,
        kv_scales=kv_scales,
        softcap=softcap,
        sinks=sinks,
    )
    out[rows] = result
