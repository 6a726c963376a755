"""A step that fails: only the request that breaks it fails, on both kinds of worker. A lost device ends the worker."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.fake.engine import FakeEngine, fake_card
from kvrelay.engine.fake.language import expected_output
from kvrelay.engine.fake.step import Share
from kvrelay.engine.step.interface import DeviceFailedError
from kvrelay.engine.step.plan import StepPlan
from tests.decode_worker.rig import Rig, beams, expected_beams, token_lists
from tests.guides import TokensState
from tests.prefill_worker.rig import ModelRig

CARD = fake_card(num_blocks=256)
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)


class FailingEngine(FakeEngine):
    """A step fails if it has a sequence whose name begins with "bad". With ``is_lost`` the device is then lost."""

    def __init__(self, *, runs_ahead: bool = False, is_lost: bool = False, num_stages: int = 1) -> None:
        super().__init__(CARD, self._look_at, runs_ahead=runs_ahead, num_stages=num_stages)
        self.is_lost = is_lost
        self.num_failures = 0

    def _look_at(self, rows: Seq[Share]) -> None:
        if any(row.sequence.name.startswith("bad") for row in rows):
            self.num_failures += 1
            raise RuntimeError("an illegal memory access")

    def check_device(self) -> None:
        if self.is_lost and self.num_failures:
            raise DeviceFailedError("an illegal memory access")


def prompt_of(index: int) -> list[int]:
    return [index, *range(5 + index % 4)]


@pytest.mark.parametrize("options", [{"runs_ahead": False}, {"runs_ahead": True}, {"num_stages": 3}], ids=str)
def test_one_bad_request_costs_nobody_else_an_attempt(options: dict[str, Any]) -> None:
    engine = FailingEngine(**options)
    rig = Rig(engine)
    for index in range(12):
        rig.add(f"good{index}", prompt_of(index), GREEDY, handed_over=index % 3 > 0)
    rig.local("good search", prompt_of(20), beams(3, 6, stops=()))
    for _ in range(3):
        rig.step()
    for name, sampling in (("bad", GREEDY), ("bad search", beams(2, 6))):
        rig.local(name, prompt_of(30), sampling)
    rig.run(breaks=True)
    assert sorted(rig.failed) == ["bad", "bad search"]
    for index in range(12):
        assert rig.outputs[f"good{index}"] == expected_output(prompt_of(index), 9, CARD.vocab_size)
    assert token_lists(rig.beams["good search"]) == expected_beams(
        prompt_of(20), beams(3, 6, stops=()), CARD.vocab_size
    )
    assert rig.count("failed_steps") <= 8


@pytest.mark.parametrize("num_stages", [1, 2])
def test_one_bad_prompt_costs_no_other_its_token(num_stages: int) -> None:
    rig = ModelRig(FailingEngine(num_stages=num_stages))
    for name in ("good0", "good1", "bad", "good2"):
        rig.local(name, prompt_of(len(name)) * 3, GREEDY)
    rig.run(breaks=True)
    assert rig.failed == ["bad"]
    assert sorted(rig.tokens) == ["good0", "good1", "good2"]


def test_a_search_that_joins_with_a_step_that_fails_joins_again() -> None:
    """A search that was handed over has no row in its first step. So only a step's results let it go on."""
    rig = Rig(FailingEngine())
    rig.add("search", prompt_of(1), beams(3, 6, stops=()))
    rig.local("bad", prompt_of(2), GREEDY)
    rig.run(breaks=True)
    assert rig.failed == ["bad"]
    assert token_lists(rig.beams["search"]) == expected_beams(prompt_of(1), beams(3, 6, stops=()), CARD.vocab_size)


def test_a_sequence_that_cannot_even_be_scheduled_ends_alone() -> None:
    """Scheduling the sequence raises. It fails alone instead of blocking every step."""
    rig = Rig(FakeEngine(CARD))
    rig.add("runs", prompt_of(0), GREEDY)
    rig.step()
    rig.add("bad", [-1, *range(9)], GREEDY, handed_over=False)  # no block hash can be made of it
    rig.add("waits", prompt_of(1), GREEDY, handed_over=False)
    rig.run(breaks=True)
    assert rig.failed == ["bad"]
    assert {name: len(output) for name, output in rig.outputs.items()} == {"runs": 9, "bad": 0, "waits": 9}


class BreakingState(TokensState):
    """A guide that fails when it takes a token."""

    def accept(self, token_id: int) -> None:
        raise RuntimeError("the guide is out of order")


def test_a_step_that_breaks_when_tokens_are_taken_in_ends_all_in_it() -> None:
    """A step fails while the worker takes in its tokens. All its sequences fail, because some would lose a token otherwise."""
    rig = Rig(FakeEngine(CARD), max_num_seqs=3)
    rig.add("first", prompt_of(0), GREEDY)
    rig.add("ends", prompt_of(1), SamplingParams(max_tokens=2, temperature=0.0))
    rig.add("guided", prompt_of(2), GREEDY, handed_over=False, guide=BreakingState([1, 2]))
    rig.add("waits", prompt_of(3), GREEDY)
    rig.run(breaks=True)
    assert sorted(rig.failed) == ["ends", "first", "guided"]
    assert len(rig.outputs["waits"]) == 9


class MaskBreaker(TokensState):
    """A guide that fails to make the mask for its fourth token."""

    def fill(self, bitmask: npt.NDArray[np.int32]) -> None:
        if len(self.left) == 5:
            raise RuntimeError("the guide is out of order")
        super().fill(bitmask)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_guide_that_makes_no_mask_costs_no_other_its_answer(runs_ahead: bool) -> None:
    """One guide fails to make its mask, also in a step that runs ahead. The other sequences get all their tokens."""
    rig = Rig(FakeEngine(CARD, runs_ahead=runs_ahead))
    for name, guide in (("good0", TokensState), ("bad", MaskBreaker), ("good1", TokensState)):
        rig.add(name, prompt_of(len(name)), GREEDY, handed_over=False, guide=guide(list(range(1, 9))))
    rig.run(breaks=True)
    assert rig.failed == ["bad"]
    assert rig.outputs["good0"] == rig.outputs["good1"] == list(range(1, 9))


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_device_that_has_failed_for_good_ends_the_worker_at_once(role: str) -> None:
    engine = FailingEngine(is_lost=True)
    rig: Rig | ModelRig = Rig(engine) if role == "decode" else ModelRig(engine)
    for index in range(3):
        rig.local(f"bad{index}", prompt_of(index), GREEDY)
    with pytest.raises(DeviceFailedError):
        rig.run(breaks=True)
    assert engine.num_failures <= 2  # a fake step that is under way fails again when it is waited for again


def test_the_token_of_the_step_in_front_is_not_lost() -> None:
    """A launch fails while the step before it is under way. No sequence fails, and all get the right tokens."""
    engine = FailingEngine(runs_ahead=True)
    rig = Rig(engine)
    launch, num_launched = engine.launch, 0

    def fail_once(plan: StepPlan) -> object:
        nonlocal num_launched
        num_launched += 1
        if num_launched == 4:
            raise RuntimeError("out of memory")
        return launch(plan)

    engine.launch = fail_once  # type: ignore[method-assign, assignment]
    for index in range(3):
        rig.add(f"good{index}", prompt_of(index), GREEDY)
    rig.run(breaks=True)
    assert not rig.failed
    for index in range(3):
        assert rig.outputs[f"good{index}"] == expected_output(prompt_of(index), 9, CARD.vocab_size)


def test_who_computes_well_alone_computes_with_all_others_again() -> None:
    rig = Rig(FailingEngine())
    for name in ("good0", "good1", "bad"):
        rig.local(name, prompt_of(1), GREEDY)
    rig.run(breaks=True)
    assert rig.failed == ["bad"]
    assert sum(len(rows) == 2 for rows in rig.engine.rows) >= 7, "suspects were kept apart for longer than a step"
