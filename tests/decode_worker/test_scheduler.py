"""The decode scheduler: inflight batching, local prefill, preemption, and no sequence that waits for ever."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvrelay.common.kv_geometry import Chunk
from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.fake.engine import FakeEngine, FakePace, fake_card
from kvrelay.engine.fake.language import expected_output
from kvrelay.engine.kv.owners import Owner, OwnerKind
from kvrelay.engine.step.sequence import SequenceStatus
from kvrelay.worker.model_worker import Remove
from tests.decode_worker.rig import Rig, beams, expected_beams, greedy
from tests.drafters import FakeOracle
from tests.engine.conftest import tokens

VOCAB = 1000
MANY = greedy(100)


def test_sequences_join_and_leave_at_every_step() -> None:
    rig = Rig()
    rig.add("a", tokens(0, 10), greedy(3))
    assert rig.step() == [("a", 1)]
    rig.add("b", tokens(1, 5), MANY)
    assert rig.step() == [("a", 1), ("b", 1)]
    assert rig.ends == {"a": "length"}
    assert rig.step() == [("b", 1)]


def test_no_prompt_delays_a_sequence_that_generates_or_was_handed_over() -> None:
    rig = Rig(max_batched_tokens=16, max_num_seqs=8)
    rig.local("long", tokens(0, 60), MANY)
    assert rig.step() == [("long", 16)]
    rig.add("a", tokens(1, 10), MANY)
    assert rig.step() == [("a", 1), ("long", 15)]
    rig.add("b", tokens(2, 10), MANY)
    assert rig.step() == [("a", 1), ("b", 1), ("long", 14)]


def test_a_finished_sequence_leaves_its_blocks_as_cache_for_the_next_turn() -> None:
    rig = Rig()
    rig.add("a", tokens(0, 10), greedy(7))
    rig.run()
    rig.local("b", [*tokens(0, 10), *rig.outputs["a"], 1, 2, 3], MANY)
    # 10 tokens of the prompt and 6 of the output were computed: four full blocks.
    assert rig.step() == [("b", 20 - 16)]


def test_the_youngest_gives_way_and_the_oldest_is_served() -> None:
    rig = Rig(num_blocks=8)
    rig.add("old", tokens(0, 11), greedy(20))
    rig.add("young", tokens(1, 11), greedy(12))
    results = rig.run()
    assert rig.num_preemptions > 0
    assert list(rig.ends) == ["old", "young"]
    assert results == {
        "old": expected_output(tokens(0, 11), 20, VOCAB), "young": expected_output(tokens(1, 11), 12, VOCAB)
    }  # fmt: skip


def test_who_is_of_a_lower_class_gives_way_before_the_youngest() -> None:
    rig = Rig(num_blocks=12)
    for name, priority in (("low", 10), ("a", 0), ("b", 0)):
        rig.add(name, tokens(ord(name[0]), 8), greedy(10), priority=priority)
    rig.run()
    assert rig.num_preemptions > 0
    assert list(rig.ends) == ["a", "b", "low"]


def test_verified_sequences_that_wait_give_their_blocks_to_the_oldest() -> None:
    """The batch has one place, and two waiting sequences hold blocks. The oldest one gets blocks and finishes first."""
    rig = Rig(num_blocks=13, max_num_seqs=1)
    rig.add("old", tokens(0, 11), greedy(30))
    rig.add("b", tokens(1, 11), greedy(4))
    rig.add("c", tokens(2, 11), greedy(4))
    rig.run()
    assert list(rig.ends) == ["old", "b", "c"]


@pytest.mark.parametrize("status", [SequenceStatus.WAITING, SequenceStatus.RUNNING])
def test_a_removed_sequence_leaves_nothing(status: SequenceStatus) -> None:
    rig = Rig()
    rig.add("a", tokens(0, 10), MANY)
    if status is SequenceStatus.RUNNING:
        rig.step()
    removed = rig.scheduler.remove(("a", 1))
    assert removed is not None
    assert rig.scheduler.remove(("a", 1)) is None
    assert rig.step() == []
    assert rig.blocks.ledger().num_running == 0


def test_leased_blocks_are_waited_for() -> None:
    rig = Rig(num_blocks=8)
    rig.blocks.allocate(Owner(OwnerKind.LEASE, "x"), 6)
    rig.local("a", tokens(0, 20), MANY)
    assert rig.step() == []
    rig.blocks.release(Owner(OwnerKind.LEASE, "x"))
    assert rig.step() == [("a", 20)]


@pytest.mark.parametrize("sampling", [greedy(3), beams(2, 3, stops=())])
def test_the_next_places_are_the_oldest_prompts_however_many_come_complete(sampling: SamplingParams) -> None:
    rig = Rig(num_blocks=512, max_num_seqs=2)
    rig.add("a", tokens(0, 5), greedy(4))
    rig.add("b", tokens(1, 5), greedy(7))
    rig.step()
    rig.local("old", tokens(2, 9), sampling)
    for number in range(40):
        rig.add(f"later{number}", tokens(number, 5), greedy(5))
        rig.step()
        if "old" in rig.ends:
            break
    assert number <= 7 + 3
    rig.run()


@pytest.mark.parametrize("is_preempted", [False, True])
def test_blocks_that_come_free_are_the_oldest_prompts_however_many_hand_offs_come(is_preempted: bool) -> None:
    rig = Rig(num_blocks=24)
    rig.add("a", tokens(0, 20), greedy(12))
    rig.add("b", tokens(1, 20), greedy(16))
    if is_preempted:
        rig.add("old", tokens(2, 20), greedy(20))
        rig.scribble(rig.blocks.num_allocatable)
        while not rig.num_preemptions:
            rig.step()
        rig.let_go()
    else:
        rig.local("old", tokens(2, 44), greedy(20))
    for number in range(200):
        for index in range(3):
            rig.add(f"later{number}.{index}", tokens(3 * number + index, 8), greedy(16))
        rig.step()
        if "old" in rig.ends:
            break
    assert number <= 16 + 2 * 20
    rig.run()


@pytest.mark.parametrize("sampling", [greedy(4), beams(1, 4, stops=())])
def test_so_they_are_where_groups_have_windows_and_a_beam_search_needs_all_of_its_blocks(
    sampling: SamplingParams,
) -> None:
    rig = Rig(num_blocks=28, windows=(None, 4), max_batched_tokens=16, max_num_seqs=16)
    for index in range(2):
        rig.add(f"s{index}", tokens(index, 20), greedy(14))
    rig.step()
    rig.local("old", tokens(2, 80), sampling)
    for number in range(100):
        for index in range(4):
            rig.add(f"later{number}.{index}", tokens(3 * number + index, 8), greedy(16))
        rig.step()
        if "old" in rig.ends:
            break
    assert number <= 16 + 5 + 4
    rig.run()


@given(st.lists(st.tuples(st.integers(1, 30), st.booleans()), min_size=2, max_size=20), st.integers(0, 10))
@example([(8, True), (4, True)], 36)
def test_who_joins_leaves_the_next_block_of_everybody_who_generates(
    lengths: list[tuple[int, bool]], num_leased: int
) -> None:
    rig = Rig(num_blocks=40)
    if num_leased:
        rig.scribble(num_leased)
    for index, (length, is_local) in enumerate(lengths):
        rig.add(f"s{index}", tokens(index, length), MANY, handed_over=not is_local)
    for _ in range(rig.blocks.block_size):
        rig.step()
    assert rig.num_preemptions == 0


PACE = FakePace(step_s=0.018, token_s=3e-4)  # the demo model with four streams, on two cores


def durations(rig: Rig, is_over: Callable[[], bool]) -> list[float]:
    """Run steps until ``is_over``. Returns how long each took."""
    found: list[float] = []
    while not is_over():
        begun_s = rig.now_s
        rig.step()
        found.append(rig.now_s - begun_s)
    return found


def generating(num_streams: int, **settings: float) -> Rig:
    rig = Rig(num_blocks=1024, pace=PACE, **settings)
    for index in range(num_streams):
        rig.add(f"stream{index}", tokens(index, 20), greedy(400))
    for _ in range(5):
        rig.step()
    return rig


@pytest.mark.parametrize("max_gap_ms", [None, 30.0])
def test_prompts_do_not_stall_those_who_generate_and_move_on_beside_them(max_gap_ms: float | None) -> None:
    rig = generating(4) if max_gap_ms is None else generating(4, itl_budget_ms=max_gap_ms)
    for number in range(3):
        name = f"prompt{number}"
        rig.local(name, tokens(10 + number, 1000), greedy(2))
        gaps_s = durations(rig, lambda name=name: bool(rig.outputs[name]))  # type: ignore[misc]
        if max_gap_ms is None:
            assert max(gaps_s) <= 1.6 * PACE.step_s
            assert sum(gaps_s) <= 3.5 * (2 * PACE.step_s + 1000 * PACE.token_s)
        elif number:  # the first prompt runs before a token's cost is known
            assert max(gaps_s) <= 1.1 * max_gap_ms / 1000
    rig.run()


def test_a_preempted_sequence_is_computed_again_without_stalling_others() -> None:
    rig = generating(2)
    rig.add("young", tokens(5, 600), greedy(30))
    rig.scribble(rig.blocks.num_allocatable)
    while not rig.num_preemptions:
        rig.step()
    rig.let_go()
    rig.scribble(rig.blocks.num_allocatable)  # nothing of it stays cached
    rig.let_go()
    num_before = len(rig.outputs["young"])
    gaps_s = durations(rig, lambda: len(rig.outputs["young"]) > num_before)
    assert max(gaps_s) <= 2.5 * PACE.step_s
    assert len(gaps_s) > 5
    rig.run()


def test_prompts_have_whole_steps_while_nobody_generates() -> None:
    rig = Rig(num_blocks=1024, pace=PACE)
    rig.local("a", tokens(0, 1000), greedy(2))
    assert [rig.step() for _ in range(2)] == [[("a", 512)], [("a", 488)]]


def test_a_short_prompt_does_not_wait_for_a_long_one_and_both_move_on() -> None:
    rig = Rig(num_blocks=1024, max_batched_tokens=64)
    rig.local("long", tokens(0, 1000), greedy(2))
    assert rig.step() == [("long", 64)]
    rig.local("middle", tokens(1, 600), greedy(2))
    rig.local("short", tokens(2, 80), greedy(1))
    # "middle" came before "short": it has its blocks, and no tokens yet.
    assert [rig.step() for _ in range(3)] == [
        [("short", 32), ("long", 32)],
        [("short", 32), ("long", 32)],
        [("short", 16), ("long", 48)],
    ]
    assert list(rig.ends) == ["short"]
    # "middle" is more than half as long as the rest of "long".
    assert rig.step() == [("long", 64)]
    rig.run()
    assert list(rig.ends) == ["short", "long", "middle"]


def test_a_short_prompt_overtakes_nobody_who_waits_for_blocks() -> None:
    rig = Rig(num_blocks=64, max_batched_tokens=16)
    rig.local("long", tokens(0, 100), greedy(2))
    rig.step()
    rig.local("waits", tokens(1, 200), greedy(2))
    rig.local("short", tokens(2, 20), greedy(2))
    assert rig.step() == [("long", 16)]
    assert [one.request_id for one in rig.scheduler.waiting] == ["waits", "short"]
    rig.run()


def test_prompts_of_keys_that_are_ahead_let_others_pass_while_they_compute() -> None:
    rig = Rig(num_blocks=1024, max_batched_tokens=64)
    rig.local("a1", tokens(0, 64), greedy(1), key="a")
    for number in range(2):
        rig.local(f"f{number}", tokens(1 + number, 128), greedy(1), key="flood")
    assert [rig.step() for _ in range(4)] == [[("a1", 64)], [("f0", 64)], [("f0", 64)], [("f1", 64)]]
    rig.local("a2", tokens(4, 64), greedy(1), key="a")
    assert [rig.step() for _ in range(2)] == [[("a2", 64)], [("f1", 64)]]


def test_it_is_told_what_prompts_would_get() -> None:
    rig = Rig(num_blocks=1024, pace=PACE)
    assert rig.scheduler.prompt_tokens_per_s is None
    for index in range(4):
        rig.local(f"prompt{index}", tokens(index, 500), greedy(1))
    rig.run()
    assert rig.scheduler.prompt_tokens_per_s == pytest.approx(512 / (PACE.step_s + 512 * PACE.token_s), rel=0.02)
    for index in range(4):
        rig.add(f"stream{index}", tokens(10 + index, 20), greedy(20))
    for _ in range(5):
        rig.step()
    assert rig.scheduler.prompt_tokens_per_s == pytest.approx(
        0.4 * PACE.step_s / PACE.token_s / (1.4 * PACE.step_s), rel=0.15
    )
    rig.run()


class Everything(RuleBasedStateMachine):
    """All kinds of requests run in a pool that is too small for them, while a lease takes blocks now and then."""

    rig: Rig

    @initialize(
        max_num_seqs=st.sampled_from([5, 8, 12]),
        max_batched_tokens=st.sampled_from([16, 64]),
        runs_ahead=st.booleans(),
        windows=st.sampled_from([(None,), (None, 7), (None, 12, 3), (6,), (None, Chunk(8))]),
        drafts=st.booleans(),
    )
    def begin(
        self,
        max_num_seqs: int,
        max_batched_tokens: int,
        runs_ahead: bool,
        windows: tuple[int | None, ...],
        drafts: bool,
    ) -> None:
        engine = FakeEngine(fake_card(num_blocks=28, windows=windows), runs_ahead=runs_ahead)
        drafter = FakeOracle(VOCAB) if drafts else None
        self.rig = Rig(engine, drafter=drafter, max_num_seqs=max_num_seqs, max_batched_tokens=max_batched_tokens)
        self.wanted: dict[str, tuple[list[int], SamplingParams]] = {}
        self.num_made = 0

    @rule(
        seed=st.integers(0, 3),  # few seeds: prompts share prefixes
        length=st.integers(1, 40),
        width=st.sampled_from([0, 0, 1, 2, 3, 5]),
        max_tokens=st.integers(2, 14),
        stops=st.sampled_from([(), (7,), tuple(range(0, VOCAB, 12))]),
        is_local=st.booleans(),
    )
    @precondition(lambda self: len(self.wanted) < 12)
    def arrive(
        self, seed: int, length: int, width: int, max_tokens: int, stops: tuple[int, ...], is_local: bool
    ) -> None:
        self.num_made += 1
        name, prompt = f"s{self.num_made}", tokens(seed, length)
        sampling = beams(width, max_tokens, stops) if width else greedy(max_tokens)
        if is_local or not self.rig.add(name, prompt, sampling):
            self.rig.local(name, prompt, sampling)
        self.wanted[name] = (prompt, sampling)

    @rule(count=st.integers(1, 4), num_leased=st.integers(0, 6))
    def compute(self, count: int, num_leased: int) -> None:
        self.rig.let_go()
        if num_leased:
            self.rig.scribble(num_leased)
        for _ in range(count):
            self.rig.step()

    @rule(number=st.integers(0, 50))
    def cancel(self, number: int) -> None:
        if here := self.rig.names:
            name = here[number % len(here)]
            self.rig.worker.handle(Remove((name, 1)))
            self.wanted.pop(name, None)

    def teardown(self) -> None:
        self.rig.let_go()
        results = self.rig.run()
        assert not self.rig.failed
        for name, (prompt, sampling) in self.wanted.items():
            if sampling.beam_search is None:
                assert results[name] == expected_output(prompt, sampling.max_tokens, VOCAB)
            else:
                assert results[name] == expected_beams(prompt, sampling, VOCAB)


TestEverything = Everything.TestCase
TestEverything.settings = settings(stateful_step_count=30)
