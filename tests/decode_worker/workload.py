"""The same requests for two workers: one that is disturbed in all ways, and a plain one, whose tokens the other must give, too."""

from __future__ import annotations

import random

from kvrelay.common.sampling import SamplingParams, Watermark
from kvrelay.worker.model_worker import Remove
from tests.decode_worker.rig import Rig
from tests.guides import ChainState

VOCAB = 50


def workload(seed: int) -> list[tuple[str, list[int], SamplingParams, bool, int]]:
    """Requests of all kinds: (name, prompt, sampling, whether it was handed over, tokens of its guide)."""
    draws = random.Random(seed)
    made = []
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
        made.append((f"r{index}", prompt, sampling, draws.random() < 0.7, draws.choice((0, 0, 0, 7, 30))))
    return made


def add_all(rig: Rig, plain: Rig, seed: int, draws: random.Random, most_steps: int) -> set[str]:
    """Both get the ``workload``, ``plain`` room for all of it. ``rig`` steps between two requests, has blocks that come free
    overwritten, and loses some of the requests: returns which. Then ``plain`` runs to its end.
    """
    removed = set()
    for name, prompt, sampling, handed_over, guided in workload(seed):
        plain.add(name, prompt, sampling, handed_over=handed_over, guide=ChainState(guided) if guided else None)
        while not rig.add(
            name, prompt, sampling, handed_over=handed_over, guide=ChainState(guided) if guided else None
        ):
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
    """Assert that ``rig`` gave the tokens of ``plain``, of ``removed`` as many as it came to, and failed nobody."""
    for name, output in plain.outputs.items():
        found = rig.outputs[name]
        if name in removed:
            assert found == output[: len(found)]
        else:
            assert (found, rig.ends.get(name)) == (output, plain.ends.get(name)), name
    assert not rig.failed
