"""Prompts on an engine of several stages: a chunk is launched before the chunks in front of it are computed."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.fake.engine import FakeEngine, fake_card
from kvrelay.engine.fake.language import expected_output
from kvrelay.engine.step.plan import PlanRow
from kvrelay.worker.model_worker import Remove
from tests.decode_worker.rig import Watched
from tests.prefill_worker.rig import ModelRig

CARD = fake_card(num_blocks=256)
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)


def staged(num_stages: int, **settings: int) -> tuple[ModelRig, Watched, list[list[tuple[int, int]]]]:
    """A rig on several stages, its engine, and (start, tokens) of each launched row by step."""
    launched: list[list[tuple[int, int]]] = []

    def note(rows: Seq[PlanRow]) -> None:
        launched.append([(row.start, row.num_tokens) for row in rows])

    engine = Watched(FakeEngine(CARD, num_stages=num_stages), note)
    return ModelRig(engine, max_batched_tokens=16, **settings), engine, launched


def test_a_long_prompt_has_a_chunk_in_each_stage() -> None:
    rig, engine, launched = staged(3)
    prompt = list(range(100))
    rig.local("long", prompt, ONE_TOKEN)
    rig.run()
    assert launched == [[(start, 16)] for start in range(0, 96, 16)] + [[(96, 4)]]
    assert engine.depths == [0, 1, 2, 2, 2, 2, 2]
    assert rig.tokens["long"] == expected_output(prompt, 1, CARD.vocab_size)[0]


def test_the_next_prompt_begins_behind_the_last_chunk_of_the_one_before() -> None:
    rig, _, launched = staged(2)
    prompts = {"first": list(range(20)), "second": list(range(40, 70))}
    for name, prompt in prompts.items():
        rig.local(name, prompt, ONE_TOKEN)
    rig.run()
    assert launched == [[(0, 16)], [(16, 4), (0, 12)], [(12, 16)], [(28, 2)]]
    assert rig.tokens == {name: expected_output(prompt, 1, CARD.vocab_size)[0] for name, prompt in prompts.items()}


def test_log_probabilities_of_a_prompt_are_made_chunk_by_chunk() -> None:
    rig, engine, _ = staged(2)
    rig.local("asks", list(range(40)), SamplingParams(max_tokens=1, temperature=0.0, num_prompt_logprobs=2))
    rig.run()
    assert engine.depths == [0, 0, 0]
    assert len(rig.reports[-1].progress[0].prompt_logprobs or ()) == 39


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_prompt_that_is_removed_computes_no_more(num_steps: int) -> None:
    rig, _, launched = staged(3)
    rig.local("goes", list(range(100)), ONE_TOKEN)
    for _ in range(num_steps):
        rig.worker.step()
    rig.worker.handle(Remove(("goes", 1)))
    num_launched = len(launched)
    removed = [key for report in rig.reports for key in report.removed]
    assert not removed, "steps still write to its blocks"
    while rig.worker.has_work():
        rig.worker.step()
    assert len(launched) == num_launched
    assert [key for report in rig.reports for key in report.removed] == [("goes", 1)]
