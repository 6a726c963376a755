"""TTFT of a long prompt: prefill and decode on two workers against one worker, on the same device."""

from __future__ import annotations

import asyncio
import functools
import statistics
from collections.abc import Iterator

import torch
from handoff_parts.sides import Side

from gpu_parts.engine.handoff import SAME_HOST, fact_name
from gpu_parts.engine.model_dir import model_directory
from gpu_parts.engine.workers import Answer, asker, run_decode_worker, run_prefill_worker
from gpu_parts.frame.rows import Against, Goal, Peer, Row, Unit
from gpu_parts.frame.running import PRELOADED, Context, Finding, Note

_WARM_UPS = 2
_TTFT_GOAL = Goal("≤ 1.15x local prefill", Against.PEER, 1.15)
_HIDDEN_GOAL = Goal("≥ 80 %", Against.VALUE, 0.8, is_at_least=True)


def measure_ttft(context: Context) -> Iterator[Finding]:
    """Both ways in turns with fresh prompts, as medians; and the share of the hand-off that prefill hides."""
    model_directory(context)  # before both workers try to write it
    # In this order, because the prefill worker owns the link and must end first.
    start = functools.partial(Side, ends_s=context.ends_s, preload=PRELOADED)
    with start(run_decode_worker, context) as decode, start(run_prefill_worker, context) as prefill:
        addresses = prefill.hear(), decode.hear()
        yield Note(f"both workers are up, {context.remaining_s:.0f} s left")
        apart, local = asyncio.run(_ask(context, *addresses))
    length, chunk = context.sizes.prefill_len, context.sizes.ttft_chunk
    yield Row(
        f"TTFT of {length:,} tokens, apart",
        Unit.SECONDS,
        statistics.median(one.first_s for one in apart),
        goals=(_TTFT_GOAL,),
        peers=(Peer("local prefill", statistics.median(one.first_s for one in local)),),
        note=f"two processes on one device, chunks of {chunk:,}",
    )
    yield Row(
        f"from the first token to the second, {length:,} tokens, apart",
        Unit.SECONDS,
        statistics.median(one.second_s - one.first_s for one in apart),
        peers=(Peer("local prefill", statistics.median(one.second_s - one.first_s for one in local)),),
    )
    yield _hidden_row(context, apart)


def hidden_share(exposed_s: float, alone_s: float) -> float:
    """The share of a hand-off that prefill hides. ``exposed_s``: time after the commit; ``alone_s``: without a prefill."""
    return max(0.0, 1 - exposed_s / alone_s)


def _hidden_row(context: Context, apart: list[Answer]) -> Row:
    name = f"hand-off of {context.sizes.prefill_len:,} tokens: share hidden behind prefill"
    exposed = [one.transfer_s for one in apart if one.transfer_s is not None]
    alone_s = context.facts.get(fact_name(SAME_HOST))
    if alone_s is None or not exposed or context.sizes.handoff_len != context.sizes.prefill_len:
        missing = (
            "the decode worker tells no transfer" if not exposed else "the section handoff did not measure it alone"
        )
        return Row(name, Unit.SHARE, None, goals=(_HIDDEN_GOAL,), note=missing)
    exposed_s = statistics.median(exposed)
    note = f"{exposed_s * 1e3:.1f} ms behind the commit, {alone_s * 1e3:.0f} ms alone, through shared memory"
    return Row(name, Unit.SHARE, hidden_share(exposed_s, alone_s), goals=(_HIDDEN_GOAL,), note=note)


async def _ask(context: Context, prefill_address: str, decode_address: str) -> tuple[list[Answer], list[Answer]]:
    generator = torch.Generator().manual_seed(context.seed)
    sizes = context.sizes
    answers: dict[bool, list[Answer]] = {True: [], False: []}
    async with asker(prefill_address, decode_address) as asking:
        for number in range(_WARM_UPS + sizes.ttft_rounds):
            for is_local in (True, False) if number % 2 else (False, True):
                prompt = torch.randint(3, sizes.shape.vocab_size, (sizes.prefill_len,), generator=generator).tolist()
                answers[is_local].append(await asking.ask(prompt, is_local=is_local))
    return answers[False][_WARM_UPS:], answers[True][_WARM_UPS:]
