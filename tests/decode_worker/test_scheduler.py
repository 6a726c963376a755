"""The decode scheduler alone: inflight batching, local prefill, preemption. No threads, no sockets, no clock."""

from __future__ import annotations

import random

import pytest

from kvrelay.common.block_hash import root_hash
from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.decode_worker.scheduler import DecodeScheduler
from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.engine.block_manager import BlockManager, Owner, OwnerKind, sequence_owner
from kvrelay.engine.sequence import Sequence, SequenceStatus

ROOT = root_hash(b"model")
BLOCK = 4


def sequence(name: str, length: int, arrival_s: float, max_tokens: int = 100) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    tokens = [hash((name, index)) % 1000 for index in range(length)]
    return Sequence(name, 1, tokens, length, sampling, arrival_s)


class Rig:
    """A scheduler over a pool of ``num_blocks``; ``step`` pretends to compute."""

    def __init__(self, num_blocks: int = 64, **settings: int) -> None:
        self.blocks = BlockManager(num_blocks, BLOCK)
        self.scheduler = DecodeScheduler(DecodeSchedulerSettings(**settings), self.blocks, ROOT, num_blocks * BLOCK)
        self.finished: list[str] = []
        self.num_preemptions = 0

    def step(self) -> list[tuple[str, int]]:
        """(name, tokens) of the rows."""
        plan = self.scheduler.schedule()
        self.num_preemptions += len(plan.preempted)
        for row in plan.rows:
            covered = len(row.sequence.block_table) * BLOCK
            assert covered >= row.sequence.num_computed_tokens + row.num_tokens
            assert row.sequence.block_table == self.blocks.owned_blocks(sequence_owner(row.sequence.key))
        told = self.scheduler.postprocess(plan.rows, [SampledToken(7) if row.samples else None for row in plan.rows])
        self.finished += [one.sequence.request_id for one in told if one.sequence.finish_reason is not None]
        self.scheduler.check_integrity()
        return [(row.sequence.request_id, row.num_tokens) for row in plan.rows]

    def hand_over(self, name: str, length: int, arrival_s: float, max_tokens: int = 100) -> Sequence:
        """A verified sequence: its blocks are there and computed, its first token is sampled."""
        made = sequence(name, length, arrival_s, max_tokens)
        allocation = self.blocks.allocate(Owner(OwnerKind.LEASE, name), length // BLOCK + 1)
        assert allocation is not None
        self.blocks.hand_on(Owner(OwnerKind.LEASE, name), sequence_owner(made.key))
        made.block_table = allocation.block_ids
        made.num_computed_tokens = length
        made.token_ids.append(7)
        self.scheduler.add(made)
        return made


def test_sequences_join_and_leave_at_every_step() -> None:
    rig = Rig()
    rig.hand_over("a", 10, 0.0, max_tokens=3)
    assert rig.step() == [("a", 1)]
    rig.hand_over("b", 5, 1.0)
    assert rig.step() == [("a", 1), ("b", 1)]
    assert rig.finished == ["a"]
    assert rig.step() == [("b", 1)]


def test_no_prompt_delays_a_sequence_that_generates_or_was_handed_over() -> None:
    rig = Rig(max_batched_tokens=16, max_num_seqs=8)
    rig.scheduler.add(sequence("long", 60, 0.0))
    assert rig.step() == [("long", 16)]
    rig.hand_over("a", 10, 1.0)
    assert rig.step() == [("a", 1), ("long", 15)]
    rig.hand_over("b", 10, 2.0)
    assert rig.step() == [("a", 1), ("b", 1), ("long", 14)]


def test_a_finished_sequence_leaves_its_blocks_as_cache_for_the_next_turn() -> None:
    rig = Rig()
    first = rig.hand_over("a", 10, 0.0, max_tokens=7)
    while rig.finished != ["a"]:
        rig.step()
    next_turn = sequence("b", 1, 1.0)
    next_turn.token_ids = [*first.token_ids, 1, 2, 3]
    next_turn.num_prompt_tokens = len(next_turn.token_ids)
    rig.scheduler.add(next_turn)
    rig.step()
    # 10 tokens of the prompt and 6 of the output were computed: four full blocks.
    assert next_turn.num_cached_tokens == 16


def test_the_youngest_gives_way_and_the_oldest_is_served() -> None:
    rig = Rig(num_blocks=8)
    rig.hand_over("old", 11, 0.0, max_tokens=40)
    rig.hand_over("young", 11, 1.0, max_tokens=12)
    order: list[str] = []
    for _ in range(200):
        if not (rig.scheduler.running or rig.scheduler.waiting):
            break
        rig.step()
        order = rig.finished
    assert rig.num_preemptions > 0
    assert sorted(order) == ["old", "young"]
    ledger = rig.blocks.ledger()
    assert ledger.num_running == 0


def test_verified_sequences_that_wait_give_their_blocks_to_the_oldest() -> None:
    """The batch holds one; two more hold blocks while they wait; the oldest still gets what it needs."""
    rig = Rig(num_blocks=9, max_num_seqs=1)
    rig.hand_over("old", 11, 0.0, max_tokens=20)
    rig.hand_over("b", 11, 1.0, max_tokens=4)
    rig.hand_over("c", 11, 2.0, max_tokens=4)
    for _ in range(200):
        if not (rig.scheduler.running or rig.scheduler.waiting):
            break
        rig.step()
    assert rig.finished == ["old", "b", "c"]


@pytest.mark.parametrize("status", [SequenceStatus.WAITING, SequenceStatus.RUNNING])
def test_a_removed_sequence_leaves_nothing(status: SequenceStatus) -> None:
    rig = Rig()
    made = rig.hand_over("a", 10, 0.0)
    if status is SequenceStatus.RUNNING:
        rig.step()
    assert made.status is status
    assert rig.scheduler.remove(("a", 1)) is made
    assert rig.scheduler.remove(("a", 1)) is None
    assert rig.step() == []
    assert rig.blocks.ledger().num_running == 0


def test_leased_blocks_are_waited_for() -> None:
    rig = Rig(num_blocks=8)
    rig.blocks.allocate(Owner(OwnerKind.LEASE, "x"), 6)
    rig.scheduler.add(sequence("a", 20, 0.0))
    assert rig.step() == []
    rig.blocks.release(Owner(OwnerKind.LEASE, "x"))
    assert rig.step() == [("a", 20)]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_everybody_finishes(seed: int) -> None:
    """Random arrivals, kinds, lengths and removals on a small pool; the ledger is checked after every step."""
    rng = random.Random(seed)
    rig = Rig(num_blocks=24, max_num_seqs=rng.choice([1, 3, 8]), max_batched_tokens=16)
    expected: set[str] = set()
    for turn in range(400):
        if turn < 120 and rng.random() < 0.3:
            name = f"s{turn}"
            length, max_tokens = rng.randint(1, 40), rng.randint(2, 30)
            fits = rig.blocks.num_allocatable >= length // BLOCK + 1
            if rng.random() < 0.5 and fits:
                rig.hand_over(name, length, float(turn), max_tokens)
            else:
                rig.scheduler.add(sequence(name, length, float(turn), max_tokens))
            expected.add(name)
        if rng.random() < 0.02 and expected:
            name = rng.choice(sorted(expected))
            if rig.scheduler.remove((name, 1)) is not None:
                expected.remove(name)
        rig.step()
    for _ in range(3000):
        if not (rig.scheduler.running or rig.scheduler.waiting):
            break
        rig.step()
    assert set(rig.finished) == expected
    ledger = rig.blocks.ledger()
    assert ledger.num_free + ledger.num_cached == ledger.num_blocks
