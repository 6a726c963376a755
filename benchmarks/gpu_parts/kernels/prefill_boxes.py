"""Prefill attention over blocks of 64 tokens: tiles loaded as boxes (TMA) compared with tiles loaded by pointers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpu_parts.checks.check_attention import box_dtype
from gpu_parts.frame.floors import prefill_attention_flops
from gpu_parts.frame.rows import Peer, Row, Unit
from gpu_parts.frame.running import Context, Finding
from gpu_parts.frame.sizes import BOX_BLOCK_SIZE
from gpu_parts.kernels.paged import paged_context, prefill_call, random_pool
from kvrelay.kernels.attention.prefill_tiles import TileLoads, nvidia_capability, tile_loads


def measure_prefill_boxes(context: Context) -> Iterator[Finding]:
    """One row for each prompt length. The peer is our own pointer version; the ratio decides which one is used."""
    shape, stopwatch, generator = context.sizes.shape, context.stopwatch(), context.generator()
    for length in context.sizes.box_lens:
        figure = f"prefill attention by TMA, {length:,} tokens, blocks of {BOX_BLOCK_SIZE}"
        num_blocks = -(-length // BOX_BLOCK_SIZE) + 1
        pool = random_pool(shape, num_blocks, 2, box_dtype(context), generator, BOX_BLOCK_SIZE)
        if (
            tile_loads(nvidia_capability(pool.device), pool, has_window=False) is not TileLoads.BOXES
            and not context.is_dry
        ):
            yield Row(figure, Unit.SECONDS, None, note="this device does not load boxes of this pool")
            continue
        paged = paged_context(pool, 1, (length,), generator)
        query = torch.empty((length, shape.num_q_heads, shape.head_dim), dtype=pool.dtype, device=pool.device)
        query.normal_(generator=generator)
        out = torch.empty_like(query)
        # Interleaved, so that a falling clock affects both.
        seconds: dict[TileLoads, list[float]] = {TileLoads.POINTERS: [], TileLoads.BOXES: []}
        for _ in range(2):
            for loads, found in seconds.items():
                found.append(stopwatch.median_s(prefill_call(query, [length], paged, out, loads=loads), budget_s=0.25))
        by_boxes, by_pointers = (min(seconds[loads]) for loads in (TileLoads.BOXES, TileLoads.POINTERS))
        flops = prefill_attention_flops(shape, length, 0)
        yield Row(
            figure,
            Unit.SECONDS,
            by_boxes,
            None if context.limits is None else context.limits.flops_s(flops),
            peers=(Peer("pointers", by_pointers),),
            note=f"{flops / by_boxes / 1e12:.0f} TFLOP/s; {by_boxes / by_pointers:.3f} of pointers' time",
        )
