"""A draft model beside a fake engine, which reads all K/V back. Tokens stay the same, and the draft model frees its blocks."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvrelay.common.block_hash import HashChain
from kvrelay.decode_worker.draft_model import DraftModel, chunk_tokens
from kvrelay.decode_worker.drafter import LookUp, Wanted
from kvrelay.decode_worker.drafts import Drafts, Room
from kvrelay.decode_worker.metrics import DraftMetrics
from kvrelay.engine.fake.engine import FakeEngine, FakePace, fake_card
from kvrelay.engine.fake.language import expected_output
from kvrelay.engine.step.interface import Engine, LaunchedStep
from kvrelay.engine.step.plan import StepPlan
from kvrelay.engine.step.sequence import Sequence
from kvrelay.worker.scheduling.step_cost import StepCosts
from tests.decode_worker.rig import Rig, beams, expected_beams, greedy
from tests.decode_worker.workload import add_all, assert_same
from tests.draft_models import CheckedDraftModel, MistakenEngine
from tests.engine.conftest import sequence

VOCAB = 50
ALWAYS_RIGHT = 10**9


def tokens(seed: int, count: int) -> list[int]:
    draws = random.Random(seed)
    return [draws.randrange(VOCAB) for _ in range(count)]


def draft_engine(num_blocks: int = 64, num_right: int = ALWAYS_RIGHT, **card: Any) -> FakeEngine:
    return MistakenEngine(num_right, num_blocks=num_blocks, **{"vocab_size": VOCAB, "model_id": "draft", **card})


def fake_rig(drafter: DraftModel | None, num_blocks: int = 64, *, runs_ahead: bool = False, **options: Any) -> Rig:
    engine = FakeEngine(fake_card(num_blocks=num_blocks, vocab_size=VOCAB), runs_ahead=runs_ahead)
    return Rig(engine, drafter=drafter, **options)


@pytest.mark.parametrize("seed", range(40))
def test_everybody_gets_the_tokens_that_come_without_drafts(seed: int) -> None:
    """Random requests are guided, preempted or cancelled, and the draft model's pool may be too small for all of them.

    They get the same tokens as on a worker without drafts.
    """
    draws = random.Random(seed)
    windows = draws.choice(((None,), (None,), (None, 6)))
    drafter = CheckedDraftModel(
        draft_engine(draws.choice((8, 20, 64)), draws.choice((1, 4, 20)), windows=windows),
        VOCAB,
        max_step_tokens=draws.choice((8, 64)),
    )
    rig = fake_rig(
        drafter,
        draws.choice((14, 20, 64)),
        runs_ahead=draws.random() < 0.5,
        max_num_seqs=draws.choice((4, 9, 16)),
        max_batched_tokens=draws.choice((16, 24, 512)),
        speculation_tokens=draws.choice((1, 3, 7)),
    )
    plain = Rig(FakeEngine(fake_card(num_blocks=256, vocab_size=VOCAB)))
    removed = add_all(rig, plain, seed, draws, most_steps=2)
    rig.run()
    drafter.assert_nothing_held()
    assert drafter.most_used > 0
    assert_same(rig, plain, removed)
    for name in plain.outputs.keys() - removed:
        assert rig.sampled.get(name) == plain.sampled.get(name)


def test_a_text_that_the_draft_model_knows_comes_in_fewer_steps() -> None:
    for runs_ahead in (False, True):
        drafter = CheckedDraftModel(draft_engine(), VOCAB)
        rig = fake_rig(drafter, runs_ahead=runs_ahead, speculation_tokens=7)
        rig.add("a", tokens(0, 9), greedy(65))
        rig.run()
        assert rig.outputs["a"] == expected_output(tokens(0, 9), 65, VOCAB)
        assert len(rig.engine.rows) < 15
        assert rig.drafted() == rig.drafted("accepted_draft") == 65 - 1 - len(rig.engine.rows)
        assert rig.drafted_by("draft-model") == rig.drafted()


def test_a_draft_model_that_is_always_wrong_is_hardly_asked() -> None:
    drafter = CheckedDraftModel(draft_engine(num_right=0), VOCAB)
    rig = fake_rig(drafter)
    rig.add("a", tokens(0, 9), greedy(200))
    rig.run()
    assert rig.outputs["a"] == expected_output(tokens(0, 9), 200, VOCAB)
    assert rig.drafted("accepted_draft") == 0
    assert 0 < rig.drafted() < 60


def test_a_long_text_is_read_in_chunks_and_nothing_drafted_until_then() -> None:
    """The draft model reads a long prompt in chunks of 32 tokens. Meanwhile that sequence has no drafts, and the short one has."""
    steps: list[list[int]] = []
    engine = FakeEngine(
        fake_card(num_blocks=256, vocab_size=VOCAB),
        lambda shares: steps.append([share.num_tokens for share in shares]),
    )
    drafter = CheckedDraftModel(engine, VOCAB, max_step_tokens=32)
    rig = fake_rig(drafter, 256, itl_budget_ms=0)
    rig.add("short", tokens(1, 6), greedy(60))
    rig.add("long", tokens(0, 300), greedy(60))
    for _ in range(9):
        rig.step()
        assert len(rig.outputs["long"]) == len(rig.engine.rows) + 1
    assert len(rig.outputs["short"]) > len(rig.outputs["long"])
    assert max(map(sum, steps)) == 32
    rig.run()
    assert rig.outputs["long"] == expected_output(tokens(0, 300), 60, VOCAB)
    assert len(rig.engine.rows) < 30
    drafter.assert_nothing_held()


def test_who_has_the_same_prompt_is_not_read_again() -> None:
    num_read = 0

    def count(shares: Any) -> None:
        nonlocal num_read
        num_read += sum(share.num_tokens for share in shares if share.num_tokens > 8)

    engine = FakeEngine(fake_card(num_blocks=256, vocab_size=VOCAB), count)
    rig = fake_rig(CheckedDraftModel(engine, VOCAB), 256)
    prompt = tokens(0, 120)
    for name in ("first", "second"):
        rig.add(name, prompt, greedy(40))
        rig.run()
        assert 100 < num_read < 130
    assert rig.outputs["first"] == rig.outputs["second"] == expected_output(prompt, 40, VOCAB)


def test_who_finds_no_room_gets_no_drafts_and_gets_them_when_there_is_some() -> None:
    """The draft model has 8 blocks. A sequence without room generates without drafts, and steps then run ahead."""
    drafter = CheckedDraftModel(draft_engine(8), VOCAB)  # 32 tokens
    rig = fake_rig(drafter, 256, runs_ahead=True, speculation_tokens=3)
    rig.add("fits", tokens(0, 9), greedy(20))
    rig.add("waits", tokens(1, 12), greedy(60))
    rig.add("never fits", tokens(2, 40), greedy(20))
    rig.run()
    for name, prompt, num_tokens in (("fits", 9, 20), ("waits", 12, 60), ("never fits", 40, 20)):
        seed = ("fits", "waits", "never fits").index(name)
        assert rig.outputs[name] == expected_output(tokens(seed, prompt), num_tokens, VOCAB)
    assert rig.drafted("accepted_draft") > 5
    assert 1 in rig.engine.depths
    drafter.assert_nothing_held()


def test_beams_are_not_followed() -> None:
    drafter = CheckedDraftModel(draft_engine(), VOCAB)
    rig, sampling = fake_rig(drafter), beams(3)
    rig.add("search", tokens(0, 9), sampling)
    assert rig.run() == {"search": expected_beams(tokens(0, 9), sampling, VOCAB)}
    assert drafter.most_used == 0


@pytest.mark.parametrize("vocab_size", [VOCAB - 20, VOCAB + 40])
def test_embeddings_of_another_size_harm_nobody(vocab_size: int) -> None:
    """The draft model has fewer or more tokens than the model. All sequences still get the right tokens."""
    drafter = CheckedDraftModel(draft_engine(vocab_size=vocab_size), VOCAB)
    rig = fake_rig(drafter)
    for index in range(3):
        rig.add(f"s{index}", tokens(index, 9), greedy(40))
    rig.run()
    for index in range(3):
        assert rig.outputs[f"s{index}"] == expected_output(tokens(index, 9), 40, VOCAB)
    drafter.assert_nothing_held()


class StrictEngine(MistakenEngine):
    """Has no logits for tokens beyond its vocabulary, as a real engine."""

    ruled: set[int]  # tokens with rules in the last step that had any

    def launch(self, plan: StepPlan) -> LaunchedStep:
        rules = None if plan.sampling is None else plan.sampling.rules
        if rules is not None:
            self.ruled = {*rules.bias_tokens, *rules.allowed_tokens, *rules.forbidden_tokens}
            assert max(self.ruled) < self.card.vocab_size
        return super().launch(plan)


def test_rules_for_tokens_that_the_draft_model_lacks_do_not_fail_its_steps() -> None:
    """Three failed steps would end the drafts of all requests."""
    engine = StrictEngine(ALWAYS_RIGHT, vocab_size=VOCAB - 1, model_id="draft")
    drafter = CheckedDraftModel(engine, VOCAB)
    rig, lacking = fake_rig(drafter), VOCAB - 1
    sampling = greedy(
        40,
        logit_bias=((3, 1.0), (lacking, 1.0)),
        allowed_token_ids=(4, lacking),
        bad_words=((5,), (lacking,), (lacking, 6)),
    )
    rig.add("a", [1, 2, 3, 4, 1, 2, 3, 4], sampling)
    rig.run()
    assert engine.ruled == {3, 4, 5}
    assert rig.drafted_by("draft-model") > 0


def test_texts_longer_than_the_draft_model_takes_go_on_without_it() -> None:
    drafter = CheckedDraftModel(draft_engine(max_model_len=30), VOCAB)
    rig = fake_rig(drafter)
    rig.add("a", tokens(0, 9), greedy(60))
    rig.run()
    assert rig.outputs["a"] == expected_output(tokens(0, 9), 60, VOCAB)
    assert 15 < rig.drafted("accepted_draft") < 30
    drafter.assert_nothing_held()


def failing(num_steps: int) -> Engine:
    left = [False] * 3 + [True] * num_steps + [False] * 10_000

    def fail(shares: Any) -> None:
        if left.pop(0):
            raise OSError("the draft model's device is gone")

    return FakeEngine(fake_card(vocab_size=VOCAB), fail)


@pytest.mark.parametrize(("num_failures", "goes_on"), [(2, True), (3, False)])
def test_a_draft_model_that_fails_costs_drafts_and_no_request(
    num_failures: int, goes_on: bool, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = DraftModel(failing(num_failures), VOCAB, 64, lambda: 0.0, DraftMetrics(CollectorRegistry()))
    rig = fake_rig(drafter)
    for index in range(2):
        rig.add(f"s{index}", tokens(index, 9), greedy(60))
    with caplog.at_level(logging.CRITICAL + 1):
        rig.run()
    for index in range(2):
        assert rig.outputs[f"s{index}"] == expected_output(tokens(index, 9), 60, VOCAB)
    assert (rig.drafted("accepted_draft") > 60) == goes_on
    assert not drafter.blocks.owners()
    drafter.check_integrity()


class Clock:
    """A clock that moves with each step of the draft model."""

    def __init__(self, token_s: float, fixed_s: float) -> None:
        self.now_s = 0.0
        self.token_s, self.fixed_s = token_s, fixed_s

    def __call__(self) -> float:
        return self.now_s

    def on_step(self, shares: Any) -> None:
        self.now_s += self.fixed_s + self.token_s * sum(share.num_tokens for share in shares)


def test_what_takes_as_long_as_the_model_itself_is_not_asked() -> None:
    """The draft model is measured before the first request. A fast one drafts; one as slow as the model hardly drafts."""
    num_drafted = {}
    for fixed_s in (0.001, 0.02):
        clock = Clock(0.0, fixed_s)
        engine = FakeEngine(fake_card(vocab_size=VOCAB), clock.on_step)
        drafter = CheckedDraftModel(engine, VOCAB, clock=clock)
        drafter.measure()
        drafter.assert_nothing_held()
        rig = fake_rig(drafter, pace=FakePace(0.02, 0.001, 0.0001))
        rig.add("a", tokens(0, 9), greedy(60))
        rig.run()
        assert rig.outputs["a"] == expected_output(tokens(0, 9), 60, VOCAB)
        num_drafted[fixed_s] = rig.drafted()
    assert num_drafted[0.001] > 40
    assert num_drafted[0.02] < 8  # only until a step of the model is measured


def test_who_guesses_alone_beside_many_is_not_worth_their_time() -> None:
    """Every row waits for the draft model. Drafting stops if only one of eight sequences would get right drafts."""
    drafts = Drafts([Slow()], 7, DraftMetrics(CollectorRegistry()))
    sequences = [sequence(tokens(seed, 9), []) for seed in range(8)]
    limits, room = dict.fromkeys(sequences, 9), Room(8, 99, None)
    for _ in range(30):
        drafts.row_cost.observe(8, 0.010)
    assert set(drafts.draft(limits, room)) == set(sequences)
    for one in sequences[1:]:
        for _ in range(30):
            drafts.hear(one, 1, 0)
    assert drafts.draft(limits, room) == {}
    assert not drafts.may_draft(sequences, room)
    assert set(drafts.draft({sequences[0]: 9}, Room(1, 99, None))) == {sequences[0]}


class Slow(LookUp):
    """A drafter that takes a fifth of a step, for any number of sequences."""

    name = "slow"
    num_trusted = 8

    def step_s(self, num_sequences: int) -> float:
        return 0.002

    def foresee(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        return (1,) * max_tokens

    def forget(self, sequence: Sequence) -> None:
        pass


def test_one_that_was_slow_for_a_while_is_tried_again() -> None:
    clock = Clock(0.0, 0.001)
    drafter = CheckedDraftModel(FakeEngine(fake_card(vocab_size=VOCAB), clock.on_step), VOCAB, clock=clock)
    drafter.measure()
    one = sequence(tokens(0, 9), [])
    one.chain = HashChain(b"", 4)
    clock.fixed_s = 1.0
    for _ in range(4):
        drafter.propose(Wanted({one: 7}, 7, None))
    assert drafter.step_s(1) > 0.5
    for _ in range(2001):
        drafter.propose(Wanted({}, 7, None))
    assert drafter.step_s(1) == pytest.approx(0.001, rel=0.1)


def test_chunks_take_what_time_there_is() -> None:
    costs = StepCosts()
    assert [chunk_tokens(costs, spare_s, 512) for spare_s in (None, 1.0, float("inf"))] == [32, 32, 512]
    for num_tokens in (8, 16, 32, 64, 64, 64):
        costs.observe(num_tokens, 0.001 + 0.0001 * num_tokens)
    assert chunk_tokens(costs, 0.004, 512) == pytest.approx(30, abs=1)
    assert chunk_tokens(costs, 0.0, 512) == 8
    assert chunk_tokens(costs, 1.0, 512) == 80
    assert chunk_tokens(costs, 1.0, 50) == 50
