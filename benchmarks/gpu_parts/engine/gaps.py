"""Gaps between tokens of many streams while long prompts come: prefill on another worker, or on the streams' own.

All streams begin before the first prompt. Each prompt is sent when the one before it has its first token, until a stream ends.
Gaps count from the first prompt until then. Both workers are there in all rounds, and share the device by time slices.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from handoff_parts.sides import Side

from gpu_parts.engine.model_dir import model_directory
from gpu_parts.engine.workers import (
    Asker,
    Room,
    asker,
    blocks_of,
    prompt_blocks,
    run_decode_worker,
    run_prefill_worker,
)
from gpu_parts.frame.rows import Peer, Row, Unit
from gpu_parts.frame.running import PRELOADED, Context, Finding, Note

_WARM_UPS = 2  # prompts each way
_SETTLED = 8  # tokens of every stream before the first prompt
_OTHERS = 8  # places for prompts beside the streams
_APART, _COLOCATED, _BASE = "two workers", "colocated", "no prompt beside"
_IS_LOCAL = {_BASE: None, _APART: False, _COLOCATED: True}  # where a way computes its prompts


@dataclass(frozen=True, slots=True)
class Measured:
    """One round of streams."""

    gaps_s: list[float]
    ttfts_s: list[float]  # of prompts whose first token came while all streams ran


def measure_gaps(context: Context) -> Iterator[Finding]:
    """The same streams without prompts, beside prompts on another worker, and beside prompts on their own worker."""
    model_directory(context)  # before both workers try to write it
    load = context.sizes.streams
    stream_blocks = load.num_requests * blocks_of(load.input_len + load.output_len + 1)
    room = Room(load.num_requests + _OTHERS, stream_blocks + prompt_blocks(context))
    # In this order, because the prefill worker owns the link and must end first.
    start = functools.partial(Side, ends_s=context.ends_s, preload=PRELOADED)
    with start(run_decode_worker, context, room) as decode, start(run_prefill_worker, context, room) as prefill:
        addresses = prefill.hear(), decode.hear()
        yield Note(f"both workers are up, {context.remaining_s:.0f} s left")
        measured = asyncio.run(_ask(context, *addresses))
    base_s = percentile(measured[_BASE].gaps_s, 0.99)
    for name in (_APART, _COLOCATED):
        gaps_s, num_prompts = measured[name].gaps_s, len(measured[name].ttfts_s)
        yield Row(
            f"p99 gap between tokens, {load.num_requests} streams beside prompts, {name}",
            Unit.SECONDS,
            percentile(gaps_s, 0.99),
            peers=(Peer(_BASE, base_s),),
            note=f"{_medians(gaps_s, measured[_BASE].gaps_s)}; {len(gaps_s):,} gaps, {num_prompts} prompts",
        )
    for name in (_APART, _COLOCATED):
        ttfts_s = measured[name].ttfts_s
        yield Row(
            f"TTFT of {context.sizes.prefill_len:,} tokens beside {load.num_requests} streams, {name}",
            Unit.SECONDS,
            statistics.median(ttfts_s) if ttfts_s else None,
            note=f"median of {len(ttfts_s)}" if ttfts_s else "no first token came before a stream ended",
        )


def percentile(values: list[float], share: float) -> float:
    """The smallest value that ``share`` of all values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _medians(gaps_s: list[float], base_s: list[float]) -> str:
    ours, base = (Unit.SECONDS.text(percentile(values, 0.5)) for values in (gaps_s, base_s))
    return f"p50 {ours}, {_BASE} {base}"


async def _ask(context: Context, prefill_address: str, decode_address: str) -> dict[str, Measured]:
    generator = torch.Generator().manual_seed(context.seed)
    sizes = context.sizes

    def drawn(length: int) -> list[int]:
        tokens: list[int] = torch.randint(3, sizes.shape.vocab_size, (length,), generator=generator).tolist()
        return tokens

    streams = [drawn(sizes.streams.input_len) for _ in range(sizes.streams.num_requests)]
    async with asker(prefill_address, decode_address) as asking:
        for _ in range(_WARM_UPS):
            for is_local in (False, True):
                await asking.ask(drawn(sizes.prefill_len), is_local=is_local)
        prompts = iter(lambda: drawn(sizes.prefill_len), None)
        await _round(asking, streams, 2 * _SETTLED, prompts, is_local=None)  # its streams' prompts are cached then
        return {
            name: await _round(asking, streams, sizes.streams.output_len, prompts, is_local=is_local)
            for name, is_local in _IS_LOCAL.items()
        }


async def _round(
    asking: Asker, streams: list[list[int]], num_tokens: int, prompts: Iterator[list[int]], *, is_local: bool | None
) -> Measured:
    """Run all ``streams`` to their ends. ``is_local``: where prompts beside them are computed; None: there are none."""
    have_settled = asyncio.Barrier(len(streams) + 1)
    has_ended = asyncio.Event()
    arrivals: list[list[float]] = [[] for _ in streams]
    prompt_tasks: list[asyncio.Task[float]] = []
    num_in_time = 0

    async def run_stream(token_ids: list[int], at_s: list[float]) -> None:
        async for now_s in asking.stream(token_ids, num_tokens):
            at_s.append(now_s)
            if len(at_s) == _SETTLED:
                await have_settled.wait()  # what comes meanwhile has its time already
        has_ended.set()

    async def run_prompt(token_ids: list[int], has_begun: asyncio.Event) -> float:
        return (await asking.ask(token_ids, is_local=bool(is_local), has_begun=has_begun)).first_s

    async with asyncio.TaskGroup() as group:
        for token_ids, at_s in zip(streams, arrivals, strict=True):
            group.create_task(run_stream(token_ids, at_s))
        await have_settled.wait()
        begun_s = time.monotonic()
        while is_local is not None and not has_ended.is_set():
            if len(prompt_tasks) > 1:
                await prompt_tasks[-2]  # at most two have blocks, which both pools have room for
            has_begun = asyncio.Event()
            prompt_tasks.append(group.create_task(run_prompt(next(prompts), has_begun)))
            await has_begun.wait()
            num_in_time += not has_ended.is_set()
    ended_s = min(at_s[-1] for at_s in arrivals)
    gaps_s = [
        now_s - before_s
        for at_s in arrivals
        for before_s, now_s in itertools.pairwise(at_s)
        if begun_s <= now_s <= ended_s
    ]
    return Measured(gaps_s, [task.result() for task in prompt_tasks[:num_in_time]])
