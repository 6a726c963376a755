"""Goodput of three policies: hand over every prompt, colocate prefill and decode, or choose the sooner way for each prompt.

A request counts if it meets the latency promise. Requests run through the real gateway, workers and schedulers, in virtual time.
A step takes 20 ms, and 0.4 ms more for each prompt token. ``python -m tests.simulation.pools`` prints the table.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvrelay.common.sampling import SamplingParams
from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.engine.fake.engine import FakePace
from kvrelay.gateway.errors import ApiError
from kvrelay.gateway.relay.request import GenerationRequest, RequestTimings
from kvrelay.gateway.settings import RelaySettings
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings
from kvrelay.wire.messages import TokenDelta

from .machines import VOCAB, Machines
from .world import World, living

TTFT_S = 2.0
GAP_P99_S = 0.06
_WARM_UP_S = 5.0
PACE = FakePace(step_s=0.02, token_s=0.0004)
MACHINES = Machines(
    num_blocks=1024,
    block_size=32,
    prefill=PrefillSchedulerSettings(),
    decode=DecodeSchedulerSettings(max_num_seqs=16),
    pace=PACE,
    checks_books=False,
)


@dataclass(frozen=True)
class Arrival:
    """One request."""

    at_s: float
    prompt_len: int
    answer_len: int


@dataclass(frozen=True)
class Mix:
    """A load: the rate of requests for each worker, and the mean lengths of prompts and answers."""

    name: str
    per_worker_s: float
    prompt_len: int
    answer_len: int
    burst_every_s: float = 0.0  # period of bursts: one more prompt for each worker, all at the same moment
    burst_prompt_len: int = 0  # mean length of the prompts in a burst

    def arrivals(self, num_workers: int, seconds: float, chance: random.Random) -> Iterator[Arrival]:
        """A Poisson process and the bursts. Lengths are between half and one and a half of the mean."""
        at_s = 0.0
        while (at_s := at_s + chance.expovariate(self.per_worker_s * num_workers)) < seconds:
            yield self._drawn(at_s, self.prompt_len, chance)
        for burst in range(int(seconds / self.burst_every_s) if self.burst_every_s else 0):
            for _ in range(num_workers):
                yield self._drawn((burst + 0.5) * self.burst_every_s, self.burst_prompt_len, chance)

    def _drawn(self, at_s: float, prompt_len: int, chance: random.Random) -> Arrival:
        return Arrival(
            at_s, int(prompt_len * chance.uniform(0.5, 1.5)), int(self.answer_len * chance.uniform(0.5, 1.5))
        )


MIXES = (
    Mix("short", 2.5, 100, 128),
    Mix("long", 0.3, 2000, 128),
    Mix("bursts", 1.5, 100, 128, burst_every_s=5.0, burst_prompt_len=2000),
    Mix("answers", 0.8, 100, 400),
)


@dataclass(frozen=True)
class Pools:
    """A number of workers of each role, and the gateway's policy."""

    name: str
    num_prefills: int
    num_decodes: int
    local_prefill: str = "sooner"


def ways(num_prefills: int, num_decodes: int) -> tuple[Pools, Pools, Pools]:
    """The three policies on the same number of workers."""
    return (
        Pools("disaggregated", num_prefills, num_decodes, "fallback"),
        Pools("colocated", 0, num_prefills + num_decodes),
        Pools("sooner", num_prefills, num_decodes),
    )


@dataclass
class Outcome:
    """The times of one request's tokens."""

    begun_s: float
    token_s: list[float] = field(default_factory=list)
    is_finished: bool = False

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.begun_s

    @property
    def gap_p99_s(self) -> float:
        gaps = sorted(after - before for before, after in zip(self.token_s, self.token_s[1:], strict=False))
        return gaps[int(0.99 * len(gaps))] if gaps else 0.0

    @property
    def is_good(self) -> bool:
        """Whether the request met the latency promise."""
        return self.is_finished and self.ttft_s <= TTFT_S and self.gap_p99_s <= GAP_P99_S


@dataclass(frozen=True)
class Result:
    """The outcomes of one mix under one policy."""

    outcomes: list[Outcome]
    ways: dict[tuple[str, str], int]  # number of prompts by (way, reason)
    seconds: float

    @property
    def goodput(self) -> float:
        """Requests per second that met the latency promise."""
        return sum(one.is_good for one in self.outcomes) / self.seconds

    def median(self, read: Callable[[Outcome], float]) -> float:
        values = sorted(read(one) for one in self.outcomes if one.is_finished)
        return values[len(values) // 2] if values else float("nan")


def run(pools: Pools, mix: Mix, seconds: float, seed: int = 1, machines: Machines = MACHINES) -> Result:
    """Warm the workers up, send the mix's requests for ``seconds``, and wait until all have ended."""
    relay = RelaySettings(local_prefill=pools.local_prefill)
    with living(lambda: World(seed, pools.num_prefills, pools.num_decodes, 1, machines, relay)) as world:
        calm(world)
        gateway = world.members["g0"]
        tasks: list[asyncio.Task[None]] = []

        def come(arrivals: Iterable[Arrival]) -> list[Outcome]:
            outcomes: list[Outcome] = []
            for arrival in arrivals:
                outcome = Outcome(world.loop.now_s + arrival.at_s)
                outcomes.append(outcome)

                def begin(arrival: Arrival = arrival, outcome: Outcome = outcome) -> None:
                    tasks.append(asyncio.ensure_future(ask(world, f"r{len(tasks)}", arrival, outcome)))

                world.loop.call_at(outcome.begun_s, begin, context=gateway.process.context)
            return outcomes

        num_workers = pools.num_prefills + pools.num_decodes
        come(Arrival(number / num_workers, 100, 50) for number in range(3 * num_workers))
        world.advance(_WARM_UP_S)
        outcomes = come(mix.arrivals(num_workers, seconds, random.Random(seed)))
        world.advance(seconds)
        finish(world, tasks)
        assert gateway.relay is not None
        return Result(outcomes, dict(gateway.relay.prompt_ways), seconds)


def calm(world: World) -> None:
    """Make all delays of the network and of threads short."""
    wires = world.wires
    world.loop.step_s = wires.message_s = wires.send_s = wires.receive_s = 0.0005
    wires.long_delays = 0.0


def finish(world: World, tasks: Sequence[asyncio.Task[None]], step_s: float = 1.0) -> None:
    """Wait in steps until all tasks have ended, and check that none has failed."""
    world.until(lambda: all(task.done() for task in tasks), step_s=step_s)
    assert not world.problems, world.problems[:3]


async def ask(world: World, request_id: str, arrival: Arrival, outcome: Outcome) -> None:
    """Send one request with its own random prompt to gateway g0, and wait for its end."""
    prompt = random.Random(request_id).choices(range(VOCAB), k=arrival.prompt_len)
    sampling = SamplingParams(max_tokens=arrival.answer_len, temperature=0.0)
    await send(world, "g0", GenerationRequest(request_id, prompt, sampling, RequestTimings(outcome.begun_s)), outcome)


async def send(world: World, gateway: str, request: GenerationRequest, outcome: Outcome) -> None:
    """Send a request to a gateway, and wait for its end."""

    def take(delta: TokenDelta) -> bool:
        if delta.tokens:
            outcome.token_s.append(world.loop.now_s)
        outcome.is_finished |= delta.finish_reason is not None
        return True

    relay = world.members[gateway].relay
    assert relay is not None
    with contextlib.suppress(ApiError):  # then ``is_finished`` stays False
        await relay.run(request, take)


def main(seconds: float = 30.0) -> None:
    """Print the table."""
    print("| workers | mix | pools | requests/s that keep it | of | TTFT p50 | p99 gap p50 | prompts by way |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for num_prefills, num_decodes in ((4, 4), (2, 6)):
        for mix in MIXES:
            for pools in ways(num_prefills, num_decodes):
                result = run(pools, mix, seconds)
                how = ", ".join(f"{way} ({why}) {num}" for (way, why), num in sorted(result.ways.items()))
                print(
                    f"| {num_prefills} + {num_decodes} | {mix.name} | {pools.name} | {result.goodput:.1f} "
                    f"| {len(result.outcomes) / seconds:.1f} | {result.median(lambda one: one.ttft_s):.2f} s "
                    f"| {1000 * result.median(lambda one: one.gap_p99_s):.0f} ms | {how} |",
                    flush=True,
                )


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
