"""Beam searches in the decode scheduler: shared and copied blocks, places in the batch, preemption, and mixed batches.

The fake engine reads all K/V back before each token. So a missing, late or wrong copy of a block fails the step.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from kvrelay.common.sampling import FinishReason, SamplingParams
from kvrelay.engine.fake.engine import FakeEngine, fake_card
from kvrelay.engine.fake.language import expected_output
from kvrelay.engine.fake.step import Share
from kvrelay.engine.kv.owners import Owner, OwnerKind
from kvrelay.engine.step.sequence import SequenceStatus
from tests.decode_worker.rig import Rig, beams, expected_beams, greedy, token_lists
from tests.engine.conftest import tokens

VOCAB = 1000


@pytest.mark.parametrize("num_prompt_tokens", [1, 7, 8, 9])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("is_handed_over", [False, True])
def test_beams_are_those_of_the_search_alone(is_handed_over: bool, width: int, num_prompt_tokens: int) -> None:
    rig, prompt, sampling = Rig(), tokens(width, num_prompt_tokens), beams(width)
    if is_handed_over:
        assert rig.add("a", prompt, sampling)
    else:
        rig.local("a", prompt, sampling)
    assert rig.run() == {"a": expected_beams(prompt, sampling, VOCAB)}
    assert rig.ends["a"] == rig.beams["a"][0].finish_reason.value
    assert rig.most_running <= width
    assert rig.engine.num_copies > 0 or width == 1


@pytest.mark.parametrize("is_handed_over", [False, True])
def test_it_is_told_once_that_a_search_has_begun_when_this_worker_has_computed_a_step_of_it(
    is_handed_over: bool,
) -> None:
    rig = Rig()
    if is_handed_over:
        rig.add("a", tokens(0, 9), beams(2, stops=()))
        assert rig.step() == []
        assert rig.begun == []
        assert rig.step() == [("a", 1)] * 2
    else:
        rig.local("a", tokens(0, 9), beams(2, stops=()))
        assert rig.step() == [("a", 9)]
    assert rig.begun == ["a"]
    rig.run()
    assert rig.begun == ["a"]


def test_full_blocks_are_shared_and_the_last_one_is_copied_where_beams_part() -> None:
    rig = Rig()
    rig.local("a", tokens(0, 10), beams(4, stops=()))
    assert rig.step() == [("a", 10)]
    assert len(rig.scheduler.running) == 4
    assert rig.blocks.ledger().num_running == 3  # all four beams share the prompt's blocks
    assert rig.step() == [("a", 1)] * 4
    assert rig.engine.num_copies == 3  # three beams get a copy, and the fourth keeps the block
    tables = [beam.block_tables[0] for beam in rig.scheduler.running]
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert rig.blocks.ledger().num_running <= 2 + 4
    rig.run()


def test_a_search_of_one_token_ends_where_it_joins() -> None:
    rig, prompt, sampling = Rig(), tokens(0, 6), beams(4, max_tokens=1)
    rig.add("handed", prompt, sampling)
    rig.local("local", prompt, sampling)
    assert rig.step() == [("local", 2)]
    assert set(rig.ends) == {"handed", "local"}
    assert rig.begun == []
    expected = expected_beams(prompt, sampling, VOCAB)
    assert rig.run() == {"handed": expected, "local": expected}


def test_the_model_s_length_ends_a_search() -> None:
    card = fake_card(num_blocks=64, max_model_len=12)
    rig = Rig(FakeEngine(card))
    rig.local("a", tokens(0, 9), beams(2, max_tokens=100, stops=()))
    assert [len(found) for found in rig.run()["a"]] == [3, 3]  # type: ignore[arg-type]
    assert [beam.finish_reason for beam in rig.beams["a"]] == [FinishReason.LENGTH] * 2


def test_widths_mix_in_one_batch_and_beside_ordinary_sequences() -> None:
    rig = Rig(num_blocks=256)
    wanted: dict[str, SamplingParams] = {f"b{width}": beams(width, max_tokens=5 + width) for width in (2, 3, 8, 5)}
    wanted |= {f"g{index}": greedy(9) for index in range(4)}
    for index, (name, sampling) in enumerate(wanted.items()):
        prompt = tokens(index, 5 + index)
        if index % 2:
            rig.local(name, prompt, sampling)
        else:
            assert rig.add(name, prompt, sampling)
    results = rig.run()
    for index, (name, sampling) in enumerate(wanted.items()):
        prompt = tokens(index, 5 + index)
        is_search = sampling.beam_search is not None
        assert results[name] == (
            expected_beams(prompt, sampling, VOCAB) if is_search else expected_output(prompt, 9, VOCAB)
        )
    assert rig.num_preemptions == 0


def crowd(rig: Rig) -> Owner:
    """Lease all free blocks, and run steps until a sequence is preempted because there is no block."""
    lease = Owner(OwnerKind.LEASE, "crowd")
    assert rig.blocks.allocate(lease, rig.blocks.num_allocatable) is not None
    for _ in range(20):
        rig.step()
        if rig.num_preemptions:
            return lease
    raise AssertionError("nobody needed a block")


def test_a_search_is_preempted_as_a_whole_and_goes_on_where_it_was() -> None:
    """All beams of a search are preempted together. Later it continues, and finds the same beams."""
    rig, prompt, sampling = Rig(), tokens(1, 9), beams(4, max_tokens=16, stops=())
    rig.local("old", tokens(0, 10), greedy(40))
    rig.local("search", prompt, sampling)
    for _ in range(7):
        rig.step()
    assert rig.begun == ["search"]
    lease = crowd(rig)
    assert [one.request_id for one in rig.scheduler.running] == ["old"]
    (leader,) = rig.scheduler.waiting
    assert 7 <= leader.num_output_tokens < 16, "it was on its way"
    assert rig.blocks.ledger().num_running == len(rig.scheduler.running[0].block_tables[0])
    rig.blocks.release(lease)
    results = rig.run()
    assert rig.num_preemptions == 1
    assert results["search"] == expected_beams(prompt, sampling, VOCAB)
    assert results["old"] == expected_output(tokens(0, 10), 40, VOCAB)
    assert rig.begun == ["search"]


def test_a_younger_sequence_gives_way_to_the_search() -> None:
    rig, sampling = Rig(), beams(4, max_tokens=12, stops=())
    rig.local("search", tokens(1, 9), sampling)
    rig.local("young", tokens(0, 10), greedy(20))
    for _ in range(3):
        rig.step()
    lease = crowd(rig)
    assert {one.request_id for one in rig.scheduler.running} == {"search"}
    rig.blocks.release(lease)
    results = rig.run()
    assert results["search"] == expected_beams(tokens(1, 9), sampling, VOCAB)
    assert results["young"] == expected_output(tokens(0, 10), 20, VOCAB)


def test_a_handed_over_search_that_waits_for_its_places_can_lose_its_blocks() -> None:
    rig, prompt, sampling = Rig(num_blocks=12, max_num_seqs=4), tokens(1, 9), beams(4, max_tokens=6)
    rig.local("old", tokens(0, 10), greedy(34))
    rig.step()
    rig.add("search", prompt, sampling)
    results = rig.run()
    assert rig.num_preemptions > 0
    assert results == {
        "old": expected_output(tokens(0, 10), 34, VOCAB),
        "search": expected_beams(prompt, sampling, VOCAB),
    }


def test_a_search_takes_all_its_places_from_the_start() -> None:
    rig = Rig(max_num_seqs=8)
    rig.local("a", tokens(0, 30), beams(6, max_tokens=4))
    for index in range(4):
        rig.add(f"g{index}", tokens(index, 5), greedy(30))
    rig.step()
    assert sorted(one.request_id for one in rig.scheduler.running) == ["a"] * 6 + ["g0", "g1"]
    while "a" not in rig.ends:
        rig.step()
        assert len(rig.scheduler.running) <= 8
    rig.step()
    assert {one.request_id for one in rig.scheduler.running} == {"g0", "g1", "g2", "g3"}
    rig.run()


def test_those_that_come_later_do_not_take_the_places_that_a_search_waits_for() -> None:
    """A search waits for six places while short handed-over sequences keep coming. They must not take every free place."""
    rig = Rig(num_blocks=256, max_num_seqs=8)
    for index in range(8):
        rig.add(f"g{index}", tokens(index, 5), greedy(4 + index))
    rig.step()
    rig.local("search", tokens(0, 9), beams(6, max_tokens=4))
    for index in range(60):
        rig.add(f"later{index}", tokens(index, 5), greedy(8))
        rig.step()
        if "search" in rig.ends:
            break
    assert "search" in rig.ends
    rig.run()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_a_removed_search_leaves_nothing(num_steps: int) -> None:
    rig = Rig()
    rig.add("a", tokens(0, 10), beams(4, stops=()))
    rig.add("b", tokens(1, 10), beams(4, stops=()))
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
    rig = Rig(max_batched_tokens=16, max_num_seqs=8)
    rig.local("search", tokens(1, 21), beams(4, max_tokens=24, stops=()))
    for _ in range(12):
        rig.step()
    rig.blocks.release(crowd(rig))
    for _ in range(num_steps):
        rig.step()
    assert len([one for one in rig.scheduler.running if not one.num_computed_tokens]) == 0
    assert rig.scheduler.remove(("search", 1)) is not None
    assert rig.run() == {}


def test_a_search_keeps_places_for_beams_that_it_does_not_have_yet() -> None:
    rig = Rig(max_num_seqs=4)
    rig.local("search", [1, 2, 3], beams(3, 6, stops=()))
    for name in "abc":
        rig.local(name, [4, 5, ord(name)], greedy(4))
    rig.run()
    assert rig.most_running == 4


def test_a_search_is_charged_to_its_key_with_the_tokens_of_all_its_beams() -> None:
    rig = Rig()
    rig.local("search", tokens(0, 8), beams(4, max_tokens=12, stops=()), key="a")  # 4 x 12 tokens
    rig.local("plain", tokens(1, 8), greedy(24), key="b")
    rig.run()
    for key in ("a", "b"):
        rig.local(f"next of {key}", tokens(2, 8), greedy(4), key=key)
    assert rig.names == ["next of b", "next of a"]
    rig.run()


def test_a_search_of_which_one_beam_has_its_sample_stays_in_the_batch_if_steps_of_others_fail() -> None:
    """The search begins again after the first failed step. The later ones come before its second beam has a sample, too."""
    culprits = set[str]()

    def on_step(shares: Seq[Share]) -> None:
        if any(share.sequence.name.partition("/")[0] in culprits for share in shares):
            raise RuntimeError("this step fails")

    rig, prompt, sampling = Rig(FakeEngine(fake_card(), on_step), max_num_seqs=3), tokens(0, 5), beams(2, stops=())
    rig.local("search", prompt, sampling)
    rig.add("first", tokens(1, 5), greedy(30))
    for _ in range(5):
        rig.step()
    for name in ("second", "last"):
        rig.add(name, tokens(2, 6), greedy(30), priority=-1)
    culprits.add("first")
    while not rig.failed:
        rig.step(breaks=True)
    rig.step()
    culprits.add("second")
    rig.run(breaks=True)
    assert rig.failed == ["first", "second"]
    assert token_lists(rig.beams["search"]) == expected_beams(prompt, sampling, VOCAB)
    assert len(rig.outputs["last"]) == 30
