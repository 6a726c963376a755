"""Closed loops in virtual time: a prefill and a decode worker of one core each, compared with workers that do both.

Two devices can be split in three ways (:class:`Split`): two pools, one worker on both devices, or a worker that does both on each
device. One worker on both devices is the hardest to match: it computes each prompt twice as fast as a single device.

The loads are those of ``benchmarks/split.py`` that fit a fake engine's 4,096 tokens. The results show routing and scheduling alone,
without a machine's noise. A step takes about as long as the demo model's on a core.
``python -m tests.simulation.closed_loops`` prints the table.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.engine.fake.engine import FakePace
from kvrelay.gateway.settings import RelaySettings
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings

from .machines import Machines
from .pools import Arrival, Outcome, ask, calm, finish
from .world import World, living

_STEP_S, _TOKEN_S, _ROW_S = 0.011, 0.00056, 0.0006  # of one core
_MAX_PROMPT_LEN = 3900
_WARM_UP_S = 3.0


@dataclass(frozen=True)
class Loop:
    """Each client sends its next request when the last one ends. Lengths are normal, with a deviation of a quarter of the mean."""

    num_clients: int
    num_requests: int
    prompt_len: int
    answer_len: int

    def requests(self, chance: random.Random) -> list[Arrival]:
        """Draw the lengths of all requests."""

        def drawn(mean: int, most: int) -> int:
            return min(most, max(2, int(chance.gauss(mean, mean / 4))))

        return [
            Arrival(0.0, drawn(self.prompt_len, _MAX_PROMPT_LEN), drawn(self.answer_len, 4 * self.answer_len))
            for _ in range(self.num_requests)
        ]


LOOPS = {"16x400": Loop(16, 64, 400, 100), "64x300": Loop(64, 192, 300, 60), "8x3000": Loop(8, 24, 3000, 60)}


@dataclass(frozen=True)
class Split:
    """How two devices are used."""

    num_prefills: int
    num_decodes: int
    speed: int = 1  # of each worker, in devices


POOLS = Split(1, 1)
ONE_OF_BOTH = Split(0, 1, speed=2)
ONE_EACH = Split(0, 2)


@dataclass(frozen=True)
class Result:
    """What one loop measured."""

    ttft_p50_s: float
    gap_p99_s: float
    run_s: float
    ways: dict[tuple[str, str], int]  # number of prompts by (way, reason)


def run(loop: Loop, split: Split, itl_budget_ms: float | None, seed: int = 1) -> Result:
    """Run one loop to its end."""
    speed = split.speed
    machines = Machines(
        num_blocks=4096,
        block_size=16,
        prefill=PrefillSchedulerSettings(max_batched_tokens=512),
        decode=DecodeSchedulerSettings(max_batched_tokens=512, itl_budget_ms=itl_budget_ms),
        pace=FakePace(step_s=_STEP_S / speed, token_s=_TOKEN_S / speed, row_s=_ROW_S / speed),
        checks_books=False,
    )
    with living(lambda: World(seed, split.num_prefills, split.num_decodes, 1, machines, RelaySettings())) as world:
        calm(world)
        gateway, outcomes = world.members["g0"], list[Outcome]()
        tasks: list[asyncio.Task[None]] = []

        async def client(name: str, requests: Iterator[Arrival]) -> None:
            for number, request in enumerate(requests):
                outcomes.append(Outcome(world.loop.now_s))
                await ask(world, f"{name}.{number}", request, outcomes[-1])

        def start(names: list[str], requests: list[Arrival], seconds: float) -> None:
            arrivals = iter(requests)

            def begin() -> None:
                tasks.extend(asyncio.ensure_future(client(name, arrivals)) for name in names)

            world.loop.call_at(world.loop.now_s, begin, context=gateway.process.context)
            world.advance(seconds)

        start(["warm"], [Arrival(0.0, 128, 8)], _WARM_UP_S)
        outcomes.clear()
        begun_s = world.loop.now_s
        names = [f"c{number}" for number in range(loop.num_clients)]
        start(names, loop.requests(random.Random(seed)), 0.1)
        finish(world, tasks, step_s=0.1)
        assert all(outcome.is_finished for outcome in outcomes), "somebody was refused"
        assert gateway.relay is not None
        times = [outcome.token_s for outcome in outcomes]
        gaps = sorted(after - before for one in times for before, after in pairwise(one))
        return Result(
            median(outcome.ttft_s for outcome in outcomes),
            gaps[int(0.99 * len(gaps))],
            max(one[-1] for one in times) - begun_s,
            dict(gateway.relay.prompt_ways),
        )


def main() -> None:
    """Print the table."""
    print(
        "| load | budget | TTFT p50: two pools; one of both; one each | p99 gap | whole run | over one of both | over one each |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, loop in LOOPS.items():
        for budget_ms in (None, 20, 40, 80, 160, 0):
            runs = [run(loop, split, budget_ms) for split in (POOLS, ONE_OF_BOTH, ONE_EACH)]
            budget = "default" if budget_ms is None else f"{budget_ms} ms" if budget_ms else "none"
            print(
                f"| {name} | {budget} | {', '.join(f'{one.ttft_p50_s:.2f}' for one in runs)} s "
                f"| {', '.join(f'{1000 * one.gap_p99_s:.0f}' for one in runs)} ms "
                f"| {', '.join(f'{one.run_s:.1f}' for one in runs)} s "
                f"| {_over(runs[0], runs[1])} | {_over(runs[0], runs[2])} |",
                flush=True,
            )


def _over(one: Result, other: Result) -> str:
    return (
        f"{one.ttft_p50_s / other.ttft_p50_s:.2f}, {one.gap_p99_s / other.gap_p99_s:.2f}, {one.run_s / other.run_s:.2f}"
    )


if __name__ == "__main__":
    main()
