"""Speculation in the decode scheduler: the same tokens in fewer steps, and the number of drafted tokens for each sequence."""

from __future__ import annotations

import random
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvrelay.decode_worker.drafts import Drafts, Record, Room, num_to_draft
from kvrelay.decode_worker.forced import GuideDrafter
from kvrelay.decode_worker.metrics import DraftMetrics
from kvrelay.decode_worker.ngram import NgramDrafter
from kvrelay.engine.fake.engine import FakeEngine, FakePace, fake_card
from kvrelay.engine.fake.language import expected_output
from kvrelay.engine.kv.owners import Owner, OwnerKind
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.planner import Planner
from tests.decode_worker.rig import Rig, beams, expected_beams, greedy
from tests.decode_worker.workload import add_all, assert_same
from tests.drafters import FakeOracle
from tests.engine.conftest import sequence, tokens
from tests.guides import TokensState

VOCAB = 50
ALWAYS_RIGHT = 10**9


def fake_rig(num_blocks: int = 64, *, runs_ahead: bool = False, num_right: int = ALWAYS_RIGHT, **options: Any) -> Rig:
    engine = FakeEngine(fake_card(num_blocks=num_blocks, vocab_size=VOCAB), runs_ahead=runs_ahead)
    return Rig(engine, drafter=FakeOracle(VOCAB, num_right), **options)


@pytest.mark.parametrize("seed", range(40))
def test_everybody_gets_the_tokens_that_come_without_drafts(seed: int) -> None:
    """Random requests are guided, preempted or cancelled. They get the same tokens as on a worker without drafts."""
    draws = random.Random(seed)
    rig = fake_rig(
        draws.choice((14, 20, 64)),
        runs_ahead=draws.random() < 0.5,
        num_right=draws.choice((1, 4, 20)),
        max_num_seqs=draws.choice((4, 9, 16)),
        max_batched_tokens=draws.choice((16, 24, 512)),
        speculation_tokens=draws.choice((1, 3, 7)),
    )
    plain = Rig(FakeEngine(fake_card(num_blocks=256, vocab_size=VOCAB)))
    removed = add_all(rig, plain, seed, draws, most_steps=2)
    rig.run()
    assert_same(rig, plain, removed)
    for name in plain.outputs.keys() - removed:
        assert rig.sampled.get(name) == plain.sampled.get(name)


def test_a_text_that_is_guessed_comes_in_fewer_steps() -> None:
    for runs_ahead in (False, True):
        rig = fake_rig(runs_ahead=runs_ahead, speculation_tokens=7)
        rig.add("a", tokens(0, 9), greedy(65))
        rig.run()
        assert rig.outputs["a"] == expected_output(tokens(0, 9), 65, VOCAB)
        # The first token comes with the hand-off. Then drafts grow from 1, 2 and 4 to 7 tokens, and end at the last token.
        assert len(rig.engine.rows) < 15
        assert rig.drafted() == rig.drafted("accepted_draft") == 65 - 1 - len(rig.engine.rows)
        assert rig.count("sampled_tokens") == 64


def test_what_a_guide_forces_comes_in_fewer_steps() -> None:
    """The guide drafts the tokens that it forces; the other drafter is always wrong. Log probabilities stay the same."""
    params = greedy(40, num_logprobs=2)
    forced = [*range(10, 40), 7, 7, 7]
    plain = Rig(FakeEngine(fake_card(vocab_size=VOCAB)))
    rig = fake_rig(num_right=0)
    for one in (plain, rig):
        one.add("guided", tokens(0, 9), params, guide=TokensState(forced))
        one.add("free", tokens(1, 9), greedy(40))
        one.run()
    assert rig.outputs["guided"] == plain.outputs["guided"] == forced
    assert rig.sampled == plain.sampled
    assert accepted(rig.registry, "guide") > 25


def test_the_first_drafter_with_an_idea_is_taken_and_each_has_a_record_of_its_own() -> None:
    registry = CollectorRegistry()
    drafts = Drafts([GuideDrafter(), FakeOracle(VOCAB, ALWAYS_RIGHT)], 7, DraftMetrics(registry))
    one = sequence([1, 2, 3], [0, 1], max_tokens=30)
    one.guide = TokensState([5, 6, -1])
    limits, room = {one: 9}, Room(1, 9, None)
    assert drafts.draft(limits, room) == {one: (5, 6)}
    drafts.hear(one, 2, 0)
    one.guide = None
    assert len(drafts.draft(limits, room)[one]) == 2  # the other drafter has no record yet
    drafts.hear(one, 2, 2)
    assert len(drafts.draft(limits, room)[one]) > 2
    assert (accepted(registry, "guide"), accepted(registry, "oracle")) == (0, 2)
    drafts.forget(one)
    assert not drafts._records


def accepted(registry: CollectorRegistry, drafter: str) -> float:
    return registry.get_sample_value("kvrelay_accepted_draft_tokens_total", {"drafter": drafter}) or 0.0


def test_the_batch_has_no_more_rows_than_places() -> None:
    rig = fake_rig(max_num_seqs=6, speculation_tokens=7)
    for index in range(5):
        rig.add(f"s{index}", tokens(index, 9), greedy(30))
    rig.run()
    assert max(map(len, rig.engine.rows)) == 6


def test_no_draft_takes_a_block_that_somebody_needs_next() -> None:
    rig = fake_rig(17, speculation_tokens=7)
    for index in range(2):
        rig.add(f"s{index}", tokens(index, 7), greedy(25))
    rig.run()
    assert rig.drafted() > 0
    assert rig.num_preemptions == 0


def test_a_draft_takes_as_many_blocks_as_are_left_over() -> None:
    """A draft of seven tokens needs two blocks of four, and all blocks but one are promised."""
    rig = fake_rig(32, speculation_tokens=7)
    rig.add("a", tokens(0, 9), greedy(60))
    assert [len(rig.step()) for _ in range(3)][-1] == 1 + 7
    (one,) = rig.scheduler.running
    assert one.num_tokens == one.num_blocks * rig.blocks.block_size
    lease = Owner(OwnerKind.LEASE, "crowd")
    assert rig.blocks.allocate(lease, rig.blocks.num_allocatable - rig.blocks.num_next - 2) is not None
    assert rig.blocks.num_allocatable == rig.blocks.num_next + 1
    assert len(rig.step()) == 1 + 4
    assert rig.blocks.num_allocatable == rig.blocks.num_next
    rig.blocks.release(lease)
    rig.run()
    assert rig.outputs["a"] == expected_output(tokens(0, 9), 60, VOCAB)


def test_beams_get_no_drafts() -> None:
    rig, sampling = fake_rig(), beams(3)
    rig.add("search", tokens(0, 9), sampling)
    assert rig.run() == {"search": expected_beams(tokens(0, 9), sampling, VOCAB)}
    assert rig.drafted() == 0


def test_nothing_is_kept_of_who_stops_while_the_next_step_runs() -> None:
    drafter = NgramDrafter()
    rig = Rig(FakeEngine(fake_card(vocab_size=VOCAB), runs_ahead=True), drafter=drafter)
    stop = expected_output(tokens(0, 9), 9, VOCAB)[-1]
    rig.add("stops", tokens(0, 9), greedy(40, stop_token_ids=(stop,)))
    rig.add("goes on", tokens(1, 9), greedy(20))
    rig.run()
    assert rig.ends == {"stops": "stop", "goes on": "length"}
    assert not drafter._indices


def test_steps_with_prompts_have_no_drafts() -> None:
    rig = fake_rig(max_batched_tokens=16, max_num_seqs=8)
    rig.add("a", tokens(0, 9), greedy(30))
    rig.step()
    rig.local("long", tokens(1, 60), greedy(3))
    for _ in range(4):
        assert [name for name, _ in rig.step()] == ["a", "long"]
    rig.run()


def test_a_step_that_fails_loses_no_token() -> None:
    fails = [False] * 3 + [True] + [False] * 50
    engine = FakeEngine(fake_card(vocab_size=VOCAB), lambda shares: 1 / 0 if fails.pop(0) else None)  # type: ignore[arg-type,return-value]
    rig = Rig(engine, drafter=FakeOracle(VOCAB))
    for index in range(2):
        rig.local(f"s{index}", tokens(index, 9), greedy(30))
    rig.run(breaks=True)
    assert not rig.failed
    for index in range(2):
        assert rig.outputs[f"s{index}"] == expected_output(tokens(index, 9), 30, VOCAB)


def test_many_who_are_guessed_wrong_are_hardly_drafted() -> None:
    """Rows cost half of a step and every other guess is wrong. Each sequence then has fewer drafts than one with good guesses."""
    rig = fake_rig(256, num_right=1, pace=FakePace(0.01, 0.001), max_num_seqs=32)
    for index in range(16):
        rig.add(f"s{index}", tokens(index, 9), greedy(100))
    rig.run()
    alone = fake_rig(num_right=20)
    alone.add("s", tokens(0, 9), greedy(100))
    alone.run()
    assert rig.drafted() / 16 < alone.drafted()


@pytest.mark.parametrize(
    ("chance", "row_share", "draft_share", "num_tokens"),
    [
        (0.5, 0.05, 0, 2), (0.7, 0.05, 0, 5), (0.95, 0.05, 0, 7), (0.95, 0.3, 0, 5), (0.14, 0.05, 0, 0), (0.6, 0.4, 0, 0),
        (0.99, 0.6, 0, 0), (0.9, 0.02, 0.1, 7), (0.8, 0.02, 0.3, 4), (0.5, 0.02, 0.3, 1), (0.95, 0.02, 1.0, 0),
    ],
)  # fmt: skip
def test_more_is_drafted_where_it_comes_true_and_costs_little(
    chance: float, row_share: float, draft_share: float, num_tokens: int
) -> None:
    assert num_to_draft(chance, row_share, draft_share, most=7) == num_tokens


def test_a_guess_that_failed_is_tried_again_some_day() -> None:
    record = Record(0)
    while num_to_draft(record.chance, 0.1, 0.0, 7):
        record.hear(1, 0)
    record.skip()
    assert num_to_draft(record.chance, 0.1, 0.0, 7) == 0
    for _ in range(100):
        record.skip()
    assert num_to_draft(record.chance, 0.1, 0.0, 7) == 1


def test_a_plan_has_a_row_for_each_token_of_a_draft() -> None:
    one = sequence([1, 2, 3], [7, 8], bad_words=((3, 5), (6,)), min_tokens=2, stop_token_ids=(9,))
    one.num_computed_tokens, one.adapter = 2, 3
    plan = Planner(1, VOCAB).plan([StepRow(one, 1, draft=(3, 4))])
    assert {row.adapter for row in plan.rows} == {3}
    assert [(row.start, row.draft_tokens, row.num_samples) for row in plan.rows] == [
        (2, (), 1), (3, (3,), 1), (4, (3, 4), 1)
    ]  # fmt: skip
    assert plan.sampling is not None
    assert plan.sampling.rules is not None
    forbidden = zip(plan.sampling.rules.forbidden_rows, plan.sampling.rules.forbidden_tokens, strict=True)
    assert sorted(forbidden) == [(0, 5), (0, 6), (0, 9), (1, 5), (1, 6), (1, 9), (2, 6)]


def test_only_the_last_token_has_a_draft_behind_it() -> None:
    one = sequence([1, 2, 3], [7, 8])
    for row in (StepRow(one, 1, draft=(4,)), StepRow(one, 3, draft=(4,))):
        with pytest.raises(ValueError, match="which is not the last token alone"):
            Planner(1, VOCAB).plan([row])
