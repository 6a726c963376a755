"""With several stages, one step for each stage is under way. The output stays the same, and every stage has a step."""

from __future__ import annotations

import random

import pytest

from kvrelay.engine.fake.engine import FakeEngine, fake_card
from kvrelay.engine.fake.language import expected_output
from kvrelay.worker.model_worker import Remove
from tests.decode_worker.rig import Rig, beams, expected_beams, greedy, token_lists
from tests.decode_worker.test_drafts import FakeOracle
from tests.decode_worker.workload import add_all, assert_same

VOCAB = 50


def fake_rig(num_stages: int, num_blocks: int = 64, **settings: int) -> Rig:
    return Rig(FakeEngine(fake_card(num_blocks=num_blocks, vocab_size=VOCAB), num_stages=num_stages), **settings)


def prompt_of(index: int) -> list[int]:
    return [index, *range(3 + index % 4)]


@pytest.mark.parametrize("seed", range(60))
def test_the_output_is_that_of_one_stage(seed: int) -> None:
    """Random requests are guided, drafted, preempted or cancelled, also beside a beam search. They get the tokens of one stage."""
    draws = random.Random(seed)
    card = fake_card(num_blocks=draws.choice((14, 20, 64)), vocab_size=VOCAB)
    drafter = draws.choice((None, None, FakeOracle(VOCAB, 4)))
    staged = Rig(
        FakeEngine(card, num_stages=draws.choice((2, 3, 4))),
        drafter=drafter,
        max_num_seqs=draws.choice((4, 9, 16)),
        max_batched_tokens=draws.choice((16, 24, 512)),
    )
    plain = fake_rig(1, 256)
    searches = {"search": beams(3, 8, stops=())} if draws.random() < 0.5 else {}
    for name, sampling in searches.items():
        staged.local(name, prompt_of(7), sampling)
    removed = add_all(staged, plain, seed, draws, most_steps=4)
    staged.let_go()
    staged.run()
    assert_same(staged, plain, removed)
    for name, sampling in searches.items():
        assert token_lists(staged.beams[name]) == expected_beams(prompt_of(7), sampling, VOCAB)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_steady_decoding_has_a_step_in_each_stage_and_all_are_about_as_large(num_stages: int) -> None:
    rig = fake_rig(num_stages, 256)
    for index in range(8):
        rig.add(f"r{index}", prompt_of(index), greedy(30))
    rig.step()
    rig.step()
    num_before = len(rig.engine.rows)
    for _ in range(12):
        rig.step()
    assert set(rig.engine.depths[num_before:]) == {num_stages - 1}
    sizes = [len(rows) for rows in rig.engine.rows[num_before:]]
    assert all(8 // num_stages <= size <= -(-8 // num_stages) for size in sizes), sizes
    rig.run()
    for index in range(8):
        assert rig.outputs[f"r{index}"] == expected_output(prompt_of(index), 30, VOCAB)


def test_nobody_is_in_two_steps_at_a_time() -> None:
    rig = fake_rig(3, 256)
    for index in range(5):
        rig.add(f"r{index}", prompt_of(index), greedy(20))
    while rig.worker.has_work():
        rig.step()
        flying = [row.sequence for row in rig.worker._flying]
        assert len(set(flying)) == len(flying)


def test_one_stream_gets_a_token_in_each_step() -> None:
    rig = fake_rig(2)
    rig.add("a", prompt_of(1), greedy(20))
    rig.run()
    assert len(rig.engine.rows) == 19
    assert set(rig.engine.depths) == {0}


def test_who_is_removed_keeps_its_blocks_until_its_step_is_over_and_stops_no_other() -> None:
    rig = fake_rig(2)
    for index in range(4):
        rig.add(f"r{index}", prompt_of(index), greedy(20))
    rig.step()
    rig.step()
    flying = [row.sequence for row in rig.worker._flying]
    assert len(flying) == 2
    idle = next(one for one in rig.scheduler.running if one not in flying)
    rig.worker.handle(Remove(idle.key))
    assert rig.ends == {idle.request_id: "removed"}, "nobody writes to its blocks"
    rig.worker.handle(Remove(flying[0].key))
    assert flying[0].request_id not in rig.ends
    rig.step()
    assert rig.ends[flying[0].request_id] == "removed"
    rig.run()
    for one in rig.outputs.keys() - {idle.request_id, flying[0].request_id}:
        assert rig.outputs[one] == expected_output(prompt_of(int(one[1:])), 20, VOCAB)


def test_who_must_give_way_does_so_behind_its_step() -> None:
    """The pool is too small for the ends of two sequences. The younger one is preempted, and both get the right tokens."""
    rig = fake_rig(2, 6)
    rig.local("old", prompt_of(1), greedy(15))
    rig.local("young", prompt_of(2), greedy(13))
    rig.run()
    assert rig.num_preemptions >= 1
    assert rig.outputs["old"] == expected_output(prompt_of(1), 15, VOCAB)
    assert rig.outputs["young"] == expected_output(prompt_of(2), 13, VOCAB)


def test_the_beams_of_a_search_are_in_one_step() -> None:
    rig = fake_rig(2, 256)
    sampling = beams(4, 12, stops=())
    rig.local("search", prompt_of(3), sampling)
    for index in range(3):
        rig.add(f"r{index}", prompt_of(index), greedy(30))
    rig.run()
    assert token_lists(rig.beams["search"]) == expected_beams(prompt_of(3), sampling, VOCAB)
    assert {sum(name == "search" for name, _ in rows) for rows in rig.engine.rows[5:]} <= {0, 4}
