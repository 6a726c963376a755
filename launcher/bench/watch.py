"""How well a generator process kept up: how late its event loop was, and how much CPU it used, second by second.

A loop that is late notes chunks later than they came, and one busy second is invisible in the average of a minute. ``watch``
writes down both while a load runs; ``generator_load`` makes figures of the part that counts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from kvrelay.launcher.bench.summary import percentile

TICK_S = 0.02
_INTERVAL_S = 1.0  # between two readings of the CPU time
_LEAST_INTERVAL_S = 0.25  # a shorter one says nothing: CPU times have steps


class Watched(msgspec.Struct, kw_only=True):
    """What was written down in one process. Times are on the run's clock."""

    lag: list[tuple[float, float]] = []  # when the loop came to a timer, and how much later than it was to, s
    cpu: list[tuple[float, float]] = []  # when, and the process's CPU time up to then, s


@dataclass(frozen=True, slots=True)
class GeneratorLoad:
    """Of all generator processes together."""

    max_lag_s: float
    lag_p99_s: float | None  # None: nothing was written down in that time
    busiest: float | None  # cores of one process in one interval


async def watch(watched: Watched, clock: Callable[[], float]) -> None:
    """Write down until cancelled."""
    try:
        while True:
            before_s = clock()
            if not watched.cpu or before_s - watched.cpu[-1][0] >= _INTERVAL_S:
                watched.cpu.append((before_s, time.process_time()))
            await asyncio.sleep(TICK_S)
            now_s = clock()
            watched.lag.append((now_s, max(0.0, now_s - before_s - TICK_S)))
    finally:
        watched.cpu.append((clock(), time.process_time()))


def generator_load(processes: Sequence[Watched], from_s: float, until_s: float) -> GeneratorLoad:
    """What happened between two times of the run's clock. Pure."""
    late_s = sorted(
        one
        for watched in processes
        for at_s, late in watched.lag
        if from_s <= at_s <= until_s
        for one in _moments(late)
    )
    shares = [
        (used_after - used_before) / (after - before)
        for watched in processes
        for (before, used_before), (after, used_after) in zip(watched.cpu, watched.cpu[1:], strict=False)
        if from_s <= (before + after) / 2 <= until_s and after - before >= _LEAST_INTERVAL_S
    ]
    return GeneratorLoad(
        max_lag_s=late_s[-1] if late_s else 0.0,
        lag_p99_s=percentile(late_s, 0.99) if late_s else None,
        busiest=max(shares, default=None),
    )


def _moments(late_s: float) -> list[float]:
    """One delay as the ticks that it swallowed would have seen it; else a long one would weigh as little as a short one."""
    return [late_s - number * TICK_S for number in range(1 + int(late_s / TICK_S))]
