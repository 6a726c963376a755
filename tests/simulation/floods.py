"""One API key floods a deployment; what becomes of the others' requests, and of its own.

All runs through the real gateways, workers and schedulers, in virtual time, at the pace of :mod:`.pools`. Run it for the table:
``python -m tests.simulation.floods``.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvrelay.common.fair_queue import Flow
from kvrelay.common.sampling import SamplingParams
from kvrelay.gateway.relay.request import GenerationRequest, RequestTimings
from kvrelay.gateway.settings import RelaySettings
from kvrelay.wire.messages import TokenDelta

from .pools import MACHINES, calm
from .world import VOCAB, World, living

NUM_PREFILLS, NUM_DECODES, NUM_GATEWAYS = 2, 4, 2
OTHERS = ("a", "b", "c", "d")
PROMPT_LEN, ANSWER_LEN = 400, 64  # on average, from half to one and a half of it


@dataclass(frozen=True)
class Client:
    """Requests of one API key, as a Poisson process."""

    key: str
    per_s: float
    weight: float = 1.0
    priority: int = 0


@dataclass
class Outcome:
    """What came of one request."""

    client: Client
    begun_s: float
    first_s: float | None = None

    @property
    def ttft_s(self) -> float:
        assert self.first_s is not None
        return self.first_s - self.begun_s


@dataclass
class Result:
    """Of one run."""

    outcomes: list[Outcome] = field(default_factory=list)

    def ttft_s(self, keys: Iterable[str], share: float = 0.9) -> float:
        """A percentile of the time to first token of those keys' requests."""
        found = sorted(one.ttft_s for one in self.of(keys))
        return found[int(share * len(found))]

    def of(self, keys: Iterable[str]) -> list[Outcome]:
        names = set(keys)
        return [one for one in self.outcomes if one.client.key in names]


def run(clients: Sequence[Client], seconds: float, *, has_keys: bool = True, seed: int = 1) -> Result:
    """Let them ask for so long; returns when all have an end. ``has_keys``: else the gateways know no keys, and no weights."""
    result = Result()
    with living(lambda: World(seed, NUM_PREFILLS, NUM_DECODES, NUM_GATEWAYS, MACHINES, RelaySettings())) as world:
        calm(world)
        tasks: list[asyncio.Task[None]] = []
        world.advance(2.0)
        for client in clients:
            chance, at_s = random.Random(f"{seed} {client.key}"), 0.0
            while (at_s := at_s + chance.expovariate(client.per_s)) < seconds:
                prompt = chance.choices(range(VOCAB), k=int(PROMPT_LEN * chance.uniform(0.5, 1.5)))
                outcome = Outcome(client, world.loop.now_s + at_s)
                answer_len, gateway = int(ANSWER_LEN * chance.uniform(0.5, 1.5)), f"g{chance.randrange(NUM_GATEWAYS)}"
                result.outcomes.append(outcome)
                name = f"{client.key}{len(result.outcomes)}"

                def begin(
                    prompt: list[int] = prompt,
                    outcome: Outcome = outcome,
                    answer_len: int = answer_len,
                    gateway: str = gateway,
                    name: str = name,
                ) -> None:
                    client = outcome.client
                    flow = Flow(client.key, client.priority, client.weight) if has_keys else Flow()
                    tasks.append(asyncio.ensure_future(_ask(world, gateway, name, prompt, answer_len, flow, outcome)))

                world.loop.call_at(outcome.begun_s, begin, context=world.members[gateway].process.context)
        world.advance(seconds)
        while not all(task.done() for task in tasks):
            world.advance(1.0)
        for task in tasks:
            task.result()
        assert not world.problems, world.problems[:3]
    return result


async def _ask(
    world: World, gateway: str, name: str, prompt: list[int], answer_len: int, flow: Flow, outcome: Outcome
) -> None:
    def take(delta: TokenDelta) -> bool:
        if delta.tokens and outcome.first_s is None:
            outcome.first_s = world.loop.now_s
        return True

    sampling = SamplingParams(max_tokens=answer_len, temperature=0.0)
    request = GenerationRequest(name, prompt, sampling, RequestTimings(outcome.begun_s), flow=flow)
    relay = world.members[gateway].relay
    assert relay is not None
    await relay.run(request, take)


def main(seconds: float = 30.0) -> None:
    """Print the table."""
    print("| clients | whose requests | TTFT p50 | p90 | longest |")
    print("| --- | --- | --- | --- | --- |")
    for name, clients, has_keys in (
        ("four keys", OTHERS_ALONE, True),
        ("and a flood, as if all were one key", [*OTHERS_ALONE, FLOOD], False),
        ("and a flood", [*OTHERS_ALONE, FLOOD], True),
    ):
        result = run(clients, seconds, has_keys=has_keys)
        for whose, keys in (("the four", OTHERS), ("the flood's", ("flood",))):
            if of := result.of(keys):
                times = [f"{result.ttft_s(keys, share):.2f} s" for share in (0.5, 0.9, 1 - 1 / len(of))]
                print(f"| {name} | {whose} ({len(of)}) | {' | '.join(times)} |", flush=True)


OTHERS_ALONE = [Client(key, per_s=2.0) for key in OTHERS]  # two thirds of what the workers compute
FLOOD = Client("flood", per_s=40.0)

if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
