"""The same random requests for two workers: a disturbed one must give the tokens of a plain one."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from kvrelay.common.sampling import SamplingParams, Watermark
from kvrelay.worker.model_worker import Remove
from tests.decode_worker.rig import Rig
from tests.guides import ChainState

VOCAB = 50


@dataclass(frozen=True)
class Wish:
    """A request, and whether it is handed over and has a guide."""

    prompt: list[int]
    sampling: SamplingParams
    handed_over: bool
    guided: int  # tokens of its guide; 0: no guide

    def add_to(self, rig: Rig, name: str) -> bool:
        """Add the request to a worker. Returns whether there was room for it."""
        guide = ChainState(self.guided) if self.guided else None
        return rig.add(name, self.prompt, self.sampling, handed_over=self.handed_over, guide=guide)

    def alone(self, rig: Rig, name: str) -> Rig:
        """Run the request alone on ``rig``, which is returned."""
        self.add_to(rig, name)
        rig.run()
        return rig


def workload(seed: int) -> dict[str, Wish]:
    """Random requests by name."""
    draws = random.Random(seed)
    made = {}
    for index in range(draws.randint(3, 10)):
        sampling = SamplingParams(
            max_tokens=draws.randint(1, 20),
            temperature=draws.choice((0.0, 1.0)),
            seed=draws.randrange(2**32),
            stop_token_ids=tuple(draws.sample(range(VOCAB), draws.choice((0, 2, 8)))),
            min_tokens=draws.choice((0, 0, 0, 4)),
            bad_words=((1, 2),) if draws.random() < 0.1 else (),
            watermark=Watermark() if draws.random() < 0.1 else None,
            num_logprobs=draws.choice((None, 2)),
            repetition_penalty=draws.choice((1.0, 1.0, 1.2)),
            logit_bias=((3, 1.0),) if draws.random() < 0.2 else (),
        )
        prompt = [draws.randrange(VOCAB) for _ in range(draws.randint(1, 17))]
        made[f"r{index}"] = Wish(prompt, sampling, draws.random() < 0.7, draws.choice((0, 0, 0, 7, 30)))
    return made


def add_all(rig: Rig, plain: Rig, seed: int, draws: random.Random, most_steps: int) -> set[str]:
    """Add the ``workload`` to both workers, and run ``plain`` to its end. Returns the requests that were removed from ``rig``.

    ``rig`` runs steps between two requests, a lease overwrites its free blocks, and some of its requests are removed.
    """
    removed = set()
    for name, wish in workload(seed).items():
        wish.add_to(plain, name)
        while not wish.add_to(rig, name):
            rig.let_go()
            rig.step()
        for _ in range(draws.randint(0, most_steps)):
            rig.step()
            if draws.random() < 0.5:
                rig.let_go()
                rig.scribble(draws.randint(1, 6))
        if draws.random() < 0.15:
            removed.add(name)
            rig.worker.handle(Remove((name, 1)))
    plain.run()
    return removed


def assert_same(rig: Rig, plain: Rig, removed: set[str]) -> None:
    """Assert that ``rig`` gave the tokens of ``plain`` (for removed requests, the first ones) and that no request failed."""
    for name, output in plain.outputs.items():
        found = rig.outputs[name]
        if name in removed:
            assert found == output[: len(found)]
        else:
            assert (found, rig.ends.get(name)) == (output, plain.ends.get(name)), name
    assert not rig.failed


def run_disturbed(rig: Rig, wishes: Mapping[str, Wish], draws: random.Random) -> None:
    """Run all requests. ``rig`` runs steps between two of them, and a lease overwrites its free blocks."""
    for name, wish in wishes.items():
        while not wish.add_to(rig, name):
            rig.let_go()
            rig.step()
        for _ in range(draws.randint(0, 3)):
            rig.step()
            rig.let_go()
            rig.scribble(draws.randint(1, 5))
    rig.run()


def assert_as_alone(rig: Rig, alone: Mapping[str, Rig]) -> None:
    """Assert that each request has the tokens and the end that it had ``alone``. Log probabilities are not compared."""
    for name, one in alone.items():
        assert (rig.outputs[name], rig.ends.get(name)) == (one.outputs[name], one.ends.get(name)), name
