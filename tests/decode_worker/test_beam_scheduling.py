"""Beam searches in the decode scheduler: blocks shared and copied, places, preemption as a whole, beside everything else.

The fake engine reads every position's bytes back before each token: a copy that is missing, late or of the wrong block is an error.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvrelay.common.sampling import FinishReason, SamplingParams
from kvrelay.engine.block_manager import Owner, OwnerKind
from kvrelay.engine.fake import FakeEngine, expected_output, fake_card
from kvrelay.engine.sequence import SequenceStatus
from tests.decode_worker.drive import Drive, beams, expected_beams, greedy
from tests.engine.conftest import tokens

VOCAB = 1000


def drive(num_blocks: int = 64, **settings: int) -> Drive:
    return Drive(FakeEngine(fake_card(num_blocks=num_blocks)), **settings)


@pytest.mark.parametrize("num_prompt_tokens", [1, 7, 8, 9])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("is_handed_over", [False, True])
def test_beams_are_those_of_the_search_alone(is_handed_over: bool, width: int, num_prompt_tokens: int) -> None:
    rig, prompt, sampling = drive(), tokens(width, num_prompt_tokens), beams(width)
    if is_handed_over:
        assert rig.hand_over("a", prompt, sampling)
    else:
        rig.add("a", prompt, sampling)
    assert rig.run() == {"a": expected_beams(prompt, sampling, VOCAB)}
    assert rig.most_running <= width
    assert rig.num_copies > 0 or width == 1


@pytest.mark.parametrize("is_handed_over", [False, True])
def test_it_is_told_once_that_a_search_has_begun_when_this_worker_has_computed_a_step_of_it(
    is_handed_over: bool,
) -> None:
    rig = drive()
    if is_handed_over:
        rig.hand_over("a", tokens(0, 9), beams(2, stops=()))
        assert rig.step() == []
        assert rig.begun == []
        assert rig.step() == [("a", 1)] * 2
    else:
        rig.add("a", tokens(0, 9), beams(2, stops=()))
        assert rig.step() == [("a", 9)]
    assert rig.begun == ["a"]
    rig.run()
    assert rig.begun == ["a"]


def test_full_blocks_are_shared_and_the_last_one_is_copied_where_beams_part() -> None:
    rig = drive()
    rig.add("a", tokens(0, 10), beams(4, stops=()))
    assert rig.step() == [("a", 10)]
    assert len(rig.scheduler.running) == 4
    assert rig.blocks.ledger().num_running == 3  # all four in the prompt's blocks
    assert rig.step() == [("a", 1)] * 4
    assert rig.num_copies == 3  # the fourth keeps the block that the others left
    tables = [beam.block_table for beam in rig.scheduler.running]
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert rig.blocks.ledger().num_running <= 2 + 4
    rig.run()


def test_a_search_of_one_token_ends_where_it_joins() -> None:
    rig, prompt, sampling = drive(), tokens(0, 6), beams(4, max_tokens=1)
    rig.hand_over("handed", prompt, sampling)
    rig.add("local", prompt, sampling)
    assert rig.step() == [("local", 2)]
    assert rig.results["handed"] == rig.results["local"] == expected_beams(prompt, sampling, VOCAB)
    assert rig.begun == []
    assert rig.run()


def test_the_model_s_length_ends_a_search() -> None:
    card = fake_card(num_blocks=64, max_model_len=12)
    rig = Drive(FakeEngine(card))
    rig.add("a", tokens(0, 9), beams(2, max_tokens=100, stops=()))
    assert [len(found) for found in rig.run()["a"]] == [3, 3]  # type: ignore[arg-type]
    assert [beam.finish_reason for beam in rig.found["a"]] == [FinishReason.LENGTH] * 2


def test_widths_mix_in_one_batch_and_beside_ordinary_sequences() -> None:
    rig = drive(num_blocks=256)
    wanted: dict[str, SamplingParams] = {f"b{width}": beams(width, max_tokens=5 + width) for width in (2, 3, 8, 5)}
    wanted |= {f"g{index}": greedy(9) for index in range(4)}
    for index, (name, sampling) in enumerate(wanted.items()):
        prompt = tokens(index, 5 + index)
        if index % 2:
            rig.add(name, prompt, sampling, float(index))
        else:
            assert rig.hand_over(name, prompt, sampling, float(index))
    results = rig.run()
    for index, (name, sampling) in enumerate(wanted.items()):
        prompt = tokens(index, 5 + index)
        is_search = sampling.beam_search is not None
        assert results[name] == (
            expected_beams(prompt, sampling, VOCAB) if is_search else expected_output(prompt, 9, VOCAB)
        )
    assert rig.num_preemptions == 0


def crowd(rig: Drive) -> Owner:
    """Lease all blocks that are free, and compute until somebody is preempted for want of one."""
    lease = Owner(OwnerKind.LEASE, "crowd")
    assert rig.blocks.allocate(lease, rig.blocks.num_allocatable) is not None
    for _ in range(20):
        rig.step()
        if rig.num_preemptions:
            return lease
    raise AssertionError("nobody needed a block")


def test_a_search_is_preempted_as_a_whole_and_goes_on_where_it_was() -> None:
    """Nothing of the search may be lost or doubled, and what it shared before it shares again."""
    rig, prompt, sampling = drive(), tokens(1, 9), beams(4, max_tokens=16, stops=())
    rig.add("old", tokens(0, 10), greedy(40), 0.0)
    rig.add("search", prompt, sampling, 1.0)
    for _ in range(7):
        rig.step()
    assert rig.begun == ["search"]
    lease = crowd(rig)
    assert [one.request_id for one in rig.scheduler.running] == ["old"]
    (leader,) = rig.scheduler.waiting
    assert 7 <= leader.num_output_tokens < 16, "it was on its way"
    assert rig.blocks.ledger().num_running == len(rig.scheduler.running[0].block_table)
    rig.blocks.release(lease)
    results = rig.run()
    assert rig.num_preemptions == 1
    assert results["search"] == expected_beams(prompt, sampling, VOCAB)
    assert results["old"] == expected_output(tokens(0, 10), 40, VOCAB)
    assert rig.begun == ["search"]


def test_a_younger_sequence_gives_way_to_the_search() -> None:
    rig, sampling = drive(), beams(4, max_tokens=12, stops=())
    rig.add("search", tokens(1, 9), sampling, 0.0)
    rig.add("young", tokens(0, 10), greedy(20), 1.0)
    for _ in range(3):
        rig.step()
    lease = crowd(rig)
    assert {one.request_id for one in rig.scheduler.running} == {"search"}
    rig.blocks.release(lease)
    results = rig.run()
    assert results["search"] == expected_beams(tokens(1, 9), sampling, VOCAB)
    assert results["young"] == expected_output(tokens(0, 10), 20, VOCAB)


def test_a_handed_over_search_that_waits_for_its_places_can_lose_its_blocks() -> None:
    rig, prompt, sampling = drive(num_blocks=12, max_num_seqs=4), tokens(1, 9), beams(4, max_tokens=6)
    rig.add("old", tokens(0, 10), greedy(34), 0.0)
    rig.step()
    rig.hand_over("search", prompt, sampling, 1.0)
    results = rig.run()
    assert rig.num_preemptions > 0
    assert results == {
        "old": expected_output(tokens(0, 10), 34, VOCAB),
        "search": expected_beams(prompt, sampling, VOCAB),
    }


def test_a_search_takes_all_its_places_from_the_start() -> None:
    rig = drive(max_num_seqs=8)
    rig.add("a", tokens(0, 30), beams(6, max_tokens=4), 0.0)
    for index in range(4):
        rig.hand_over(f"g{index}", tokens(index, 5), greedy(30), 1.0 + index)
    rig.step()
    assert sorted(one.request_id for one in rig.scheduler.running) == ["a"] * 6 + ["g0", "g1"]
    while "a" not in rig.results:
        rig.step()
        assert len(rig.scheduler.running) <= 8
    rig.step()
    assert {one.request_id for one in rig.scheduler.running} == {"g0", "g1", "g2", "g3"}
    rig.run()


def test_those_that_come_later_do_not_take_the_places_that_a_search_waits_for() -> None:
    """Short sequences keep coming, complete; each place that comes free would be taken, and six at once never be free."""
    rig = drive(num_blocks=256, max_num_seqs=8)
    for index in range(8):
        rig.hand_over(f"g{index}", tokens(index, 5), greedy(4 + index), 0.0)
    rig.step()
    rig.add("search", tokens(0, 9), beams(6, max_tokens=4), 1.0)
    for index in range(60):
        rig.hand_over(f"later{index}", tokens(index, 5), greedy(8), 2.0 + index)
        rig.step()
        if "search" in rig.results:
            break
    assert "search" in rig.results
    rig.run()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_a_removed_search_leaves_nothing(num_steps: int) -> None:
    rig = drive()
    rig.hand_over("a", tokens(0, 10), beams(4, stops=()))
    rig.hand_over("b", tokens(1, 10), beams(4, stops=()))
    for _ in range(num_steps):
        rig.step()
    gone = list(rig.scheduler.running)
    assert rig.scheduler.remove(("a", 1)) is not None
    assert rig.scheduler.remove(("a", 1)) is None
    rig.scheduler.check_integrity()
    assert all(one.status is SequenceStatus.FINISHED for one in gone if one.request_id == "a")
    assert {one.request_id for one in rig.scheduler.running + rig.scheduler.waiting} == {"b"}
    assert list(rig.run()) == ["b"]


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_a_search_that_recomputes_can_be_removed(num_steps: int) -> None:
    rig = drive(max_batched_tokens=16, max_num_seqs=8)
    rig.add("search", tokens(1, 21), beams(4, max_tokens=24, stops=()), 1.0)
    for _ in range(12):
        rig.step()
    rig.blocks.release(crowd(rig))
    for _ in range(num_steps):
        rig.step()
    assert len([one for one in rig.scheduler.running if not one.num_computed_tokens]) == 0
    assert rig.scheduler.remove(("search", 1)) is not None
    assert rig.run() == {}


@pytest.mark.parametrize("seed", range(12))
def test_whatever_comes_every_search_finds_its_beams(seed: int) -> None:
    """Random arrivals, widths, lengths and removals on a small pool."""
    rng = random.Random(seed)
    rig = drive(num_blocks=40, max_num_seqs=rng.choice([8, 12, 20]), max_batched_tokens=rng.choice([20, 64]))
    wanted: dict[str, tuple[list[int], SamplingParams]] = {}
    for turn in range(160):
        if turn < 90 and rng.random() < 0.25:
            prompt = tokens(rng.randrange(5), rng.randint(1, 20))  # few heads: prefixes are found again
            early = rng.choice([True, False, None])
            width = rng.choice([0, 0, 1, 2, 3, 6])
            length = rng.randint(1, 14)
            sampling = beams(width, length, early_stopping=early) if width else greedy(max(2, length))
            wanted[f"s{turn}"] = (prompt, sampling)
            if rng.random() < 0.5 or not rig.hand_over(f"s{turn}", prompt, sampling, float(turn)):
                rig.add(f"s{turn}", prompt, sampling, float(turn))
        if rng.random() < 0.03 and wanted:
            name = rng.choice(sorted(wanted))
            if rig.scheduler.remove((name, 1)) is not None:
                del wanted[name]
                rig.results.pop(name, None)
        rig.step()
    results = rig.run()
    assert set(results) == set(wanted)
    for name, (prompt, sampling) in wanted.items():
        is_search = sampling.beam_search is not None
        alone = expected_beams(prompt, sampling, VOCAB)[: len(results[name])] if is_search else None
        assert results[name] == (alone or expected_output(prompt, sampling.max_tokens, VOCAB)), name


class Searches(RuleBasedStateMachine):
    """Searches come, compute and go in a pool that is too small for them; leases take room away meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = drive(num_blocks=24, max_num_seqs=8, max_batched_tokens=16)
        self.wanted: dict[str, tuple[list[int], SamplingParams]] = {}
        self.now = 0

    @rule(
        seed=st.integers(0, 3),
        length=st.integers(1, 12),
        width=st.integers(0, 5),
        max_tokens=st.integers(2, 8),
        is_local=st.booleans(),
    )
    @precondition(lambda self: len(self.wanted) < 6)
    def arrive(self, seed: int, length: int, width: int, max_tokens: int, is_local: bool) -> None:
        self.now += 1
        name, prompt = f"s{self.now}", tokens(seed, length)
        sampling = beams(width, max_tokens) if width else greedy(max_tokens)
        if is_local or not self.rig.hand_over(name, prompt, sampling, float(self.now)):
            self.rig.add(name, prompt, sampling, float(self.now))
        self.wanted[name] = (prompt, sampling)

    @rule(count=st.integers(1, 4))
    def compute(self, count: int) -> None:
        for _ in range(count):
            self.rig.step()

    @rule(number=st.integers(0, 50))
    def cancel(self, number: int) -> None:
        here = [one.request_id for one in self.rig.scheduler.waiting + self.rig.scheduler.running]
        if here:
            name = here[number % len(here)]
            assert self.rig.scheduler.remove((name, 1)) is not None
            del self.wanted[name]
            self.rig.results.pop(name, None)

    @invariant()
    def books_agree(self) -> None:
        self.rig.scheduler.check_integrity()

    def teardown(self) -> None:
        results = self.rig.run()
        assert set(results) == set(self.wanted)
        for name, (prompt, sampling) in self.wanted.items():
            if sampling.beam_search is None:
                assert results[name] == expected_output(prompt, sampling.max_tokens, VOCAB)
            else:
                assert results[name] == expected_beams(prompt, sampling, VOCAB)


TestSearches = Searches.TestCase
TestSearches.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
