"""Floods from some API keys: how long their requests and those of other keys wait.

Requests run through the real gateways, workers and schedulers, in virtual time, at the pace of :mod:`.pools`. A flood begins after
the warm-up. ``python -m tests.simulation.floods [seconds] [seeds]`` prints the table.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvrelay.common.fair_queue import Flow
from kvrelay.common.sampling import SamplingParams
from kvrelay.gateway.relay.request import GenerationRequest, RequestTimings
from kvrelay.gateway.settings import RelaySettings

from . import pools
from .machines import VOCAB
from .pools import MACHINES, PACE, calm
from .world import World, living

NUM_PREFILLS, NUM_DECODES, NUM_GATEWAYS = 2, 4, 2
OTHERS = ("a", "b", "c", "d")
PROMPT_LEN, ANSWER_LEN = 400, 64  # means; lengths are between half and one and a half of them
WARM_UP_S = 5.0  # not counted: workers and gateways learn what requests cost
_STEP_TOKENS = 512  # of a prefill worker's full step
PREFILL_TOKENS_PER_S = NUM_PREFILLS * _STEP_TOKENS / (PACE.step_s + _STEP_TOKENS * PACE.token_s)  # of all, at most


@dataclass(frozen=True)
class Client:
    """Requests of one API key, which arrive as a Poisson process."""

    key: str
    per_s: float
    weight: float = 1.0
    priority: int = 0

    @property
    def floods(self) -> bool:
        """Whether its prompts alone are more than all prefill workers can compute."""
        return self.per_s * PROMPT_LEN > PREFILL_TOKENS_PER_S


@dataclass(kw_only=True)
class Outcome(pools.Outcome):
    """The times of one request's tokens, and whose it is."""

    client: Client
    prompt_len: int


@dataclass
class Result:
    """The outcomes of one run."""

    outcomes: list[Outcome] = field(default_factory=list)

    def __add__(self, other: Result) -> Result:
        return Result(self.outcomes + other.outcomes)

    def ttft_s(self, keys: Iterable[str], share: float = 0.9) -> float:
        """A percentile of the time to first token of those keys' requests."""
        found = sorted(one.ttft_s for one in self.of(keys))
        return found[int(share * len(found))]

    def rate(self, keys: Iterable[str]) -> float:
        """Those keys' first tokens a second, from the first to the last."""
        times = sorted(one.token_s[0] for one in self.of(keys))
        return len(times) / (times[-1] - times[0])

    def shares(self) -> list[float]:
        """Each request's time to first token, as a multiple of its fair time.

        The fair time is that on a worker for this key alone, which computes one prompt after the other. That worker has the key's
        share (its weight over the sum of all weights) of all prefill workers' speed.
        """
        weights = {one.client.key: one.client.weight for one in self.outcomes}
        free_s = dict.fromkeys(weights, 0.0)
        found: list[float] = []
        for one in sorted(self.outcomes, key=lambda one: one.begun_s):
            key = one.client.key
            tokens_per_s = PREFILL_TOKENS_PER_S * weights[key] / sum(weights.values())
            free_s[key] = max(free_s[key], one.begun_s) + one.prompt_len / tokens_per_s
            found.append(one.ttft_s / (free_s[key] - one.begun_s))
        return found

    def of(self, keys: Iterable[str]) -> list[Outcome]:
        names = set(keys)
        return [one for one in self.outcomes if one.client.key in names]


def run(clients: Sequence[Client], seconds: float, *, has_keys: bool = True, seed: int = 1) -> Result:
    """Let clients send requests for ``seconds`` after the warm-up, and wait until all have ended.

    Floods begin after the warm-up, whose requests are not in the result. Without ``has_keys`` the gateways know no keys or weights.
    """
    result = Result()
    with living(lambda: World(seed, NUM_PREFILLS, NUM_DECODES, NUM_GATEWAYS, MACHINES, RelaySettings())) as world:
        calm(world)
        tasks: list[asyncio.Task[None]] = []
        world.advance(2.0)
        counted_s = world.loop.now_s + WARM_UP_S
        for client in clients:
            chance, at_s = random.Random(f"{seed} {client.key}"), WARM_UP_S if client.floods else 0.0
            while (at_s := at_s + chance.expovariate(client.per_s)) < WARM_UP_S + seconds:
                prompt = chance.choices(range(VOCAB), k=int(PROMPT_LEN * chance.uniform(0.5, 1.5)))
                outcome = Outcome(world.loop.now_s + at_s, client=client, prompt_len=len(prompt))
                answer_len, gateway = int(ANSWER_LEN * chance.uniform(0.5, 1.5)), f"g{chance.randrange(NUM_GATEWAYS)}"
                result.outcomes.append(outcome)
                request = GenerationRequest(
                    f"{client.key}{len(result.outcomes)}",
                    prompt,
                    SamplingParams(max_tokens=answer_len, temperature=0.0),
                    RequestTimings(outcome.begun_s),
                    flow=Flow(client.key, client.priority, client.weight) if has_keys else Flow(),
                )
                begin = partial(_begin, world, gateway, request, outcome, tasks)
                world.loop.call_at(outcome.begun_s, begin, context=world.members[gateway].process.context)
        world.advance(WARM_UP_S + seconds)
        pools.finish(world, tasks)
    assert all(one.is_finished for one in result.outcomes), "somebody was refused"
    return Result([one for one in result.outcomes if one.begun_s >= counted_s])


def _begin(
    world: World, gateway: str, request: GenerationRequest, outcome: Outcome, tasks: list[asyncio.Task[None]]
) -> None:
    tasks.append(asyncio.ensure_future(pools.send(world, gateway, request, outcome)))


def main(seconds: float = 30.0, seeds: float = 3) -> None:
    """Print the table; each row joins the runs of all seeds."""
    print("| clients | whose requests | TTFT p50 | p90 | longest | first tokens/s | most of a fair share |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, clients, has_keys in CASES:
        runs = [run(clients, seconds, has_keys=has_keys, seed=seed + 1) for seed in range(int(seeds))]
        result, most = sum(runs, Result()), max(share for one in runs for share in one.shares())
        floods = [client.key for client in clients if client.floods]
        whose = [("the four", OTHERS)] if len(clients) > len(floods) else []
        for who, keys in [*whose, *((f"{key}'s", (key,)) for key in floods)]:
            times = [f"{result.ttft_s(keys, share):.2f} s" for share in (0.5, 0.9)]
            times.append(f"{max(one.ttft_s for one in result.of(keys)):.2f} s")
            rate = sum(one.rate(keys) for one in runs) / len(runs)
            print(
                f"| {name} | {who} ({len(result.of(keys))}) | {' | '.join(times)} | {rate:.1f} | {most:.1f} |",
                flush=True,
            )


OTHERS_ALONE = [Client(key, per_s=2.0) for key in OTHERS]  # two thirds of what prefill workers compute
FLOOD = Client("flood", per_s=25.0)
SECOND_FLOOD = Client("second", per_s=25.0, weight=3.0)
CASES: list[tuple[str, list[Client], bool]] = [
    ("four keys", OTHERS_ALONE, True),
    ("and a flood, as if all were one key", [*OTHERS_ALONE, FLOOD], False),
    ("and a flood", [*OTHERS_ALONE, FLOOD], True),
    ("and two floods, of weights 1 and 3", [*OTHERS_ALONE, FLOOD, SECOND_FLOOD], True),
    ("a flood alone, as if without keys", [FLOOD], False),
    ("a flood alone", [FLOOD], True),
]

if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
