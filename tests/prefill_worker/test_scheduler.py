"""The prefill scheduler alone: budget, order, cached prefixes, room. No threads, no sockets, no clock."""

from __future__ import annotations

import pytest

from kvrelay.common.block_hash import chain_hashes, root_hash
from kvrelay.common.sampling import FinishReason, SampledToken, SamplingParams
from kvrelay.engine.block_manager import BlockManager, sequence_owner
from kvrelay.engine.sequence import Sequence, SequenceStatus
from kvrelay.prefill_worker.scheduler import Computed, PrefillScheduler
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings

ROOT = root_hash(b"model")
BLOCK = 4


def sequence(name: str, tokens: list[int], max_tokens: int = 8) -> Sequence:
    made = Sequence(name, 1, list(tokens), len(tokens), SamplingParams(max_tokens=max_tokens, temperature=0.0), 0.0)
    made.block_hashes = chain_hashes(ROOT, tokens, BLOCK)
    return made


class Rig:
    """A scheduler over a pool of ``num_blocks``; ``step`` pretends to compute."""

    def __init__(self, num_blocks: int = 64, **settings: int) -> None:
        self.blocks = BlockManager(num_blocks, BLOCK)
        self.scheduler = PrefillScheduler(PrefillSchedulerSettings(**settings), self.blocks, num_blocks * BLOCK)

    def step(self, token: int = 7) -> tuple[list[tuple[str, int]], list[Computed]]:
        """(name, tokens) of the rows, and what came of them."""
        rows, _ = self.scheduler.schedule()
        shares = [(row.sequence.request_id, row.num_tokens) for row in rows]
        computed = self.scheduler.postprocess(rows, [SampledToken(token) if row.samples else None for row in rows])
        self.scheduler.check_integrity()
        return shares, computed


def test_a_long_prompt_is_computed_in_chunks_and_tells_its_ready_blocks() -> None:
    rig = Rig(max_batched_tokens=16)
    rig.scheduler.add(sequence("a", list(range(38))))
    progress = []
    for _ in range(3):
        shares, computed = rig.step()
        progress.append((shares, computed[0].num_ready_blocks, computed[0].token))
    assert progress == [([("a", 16)], 4, None), ([("a", 16)], 8, None), ([("a", 6)], 10, SampledToken(7))]
    assert rig.step() == ([], [])


def test_prompts_share_a_step_in_order_of_arrival() -> None:
    rig = Rig(max_batched_tokens=16)
    for name, length in (("a", 20), ("b", 5), ("c", 30)):
        rig.scheduler.add(sequence(name, [length] * length))
    assert rig.step()[0] == [("a", 16)]
    assert rig.step()[0] == [("a", 4), ("b", 5), ("c", 7)]
    assert rig.step()[0] == [("c", 16)]


def test_no_more_prompts_than_allowed_run() -> None:
    rig = Rig(max_batched_tokens=64, max_num_seqs=2)
    for name in "abc":
        rig.scheduler.add(sequence(name, [ord(name)] * 40))
    assert rig.step()[0] == [("a", 40), ("b", 24)]
    assert rig.step()[0] == [("b", 16), ("c", 40)]


def test_a_cached_prefix_is_skipped_but_the_last_token_is_computed() -> None:
    rig = Rig()
    rig.scheduler.add(sequence("a", list(range(16))))
    rig.step()
    rig.scheduler.add(sequence("b", list(range(16))))  # the same prompt: all four blocks are published
    shares, computed = rig.step()
    assert shares == [("b", 4)]
    assert computed[0].sequence.num_cached_tokens == 12
    assert (
        rig.blocks.owned_blocks(sequence_owner(("a", 1)))[:3] == rig.blocks.owned_blocks(sequence_owner(("b", 1)))[:3]
    )


def test_a_prompt_waits_for_room_and_a_computed_one_keeps_its_blocks() -> None:
    rig = Rig(num_blocks=8)
    rig.scheduler.add(sequence("a", [1] * 24))
    rig.scheduler.add(sequence("b", [2] * 12))
    assert rig.step()[0] == [("a", 24)]
    assert rig.step() == ([], [])  # "a" is computed, but its hand-off still reads the blocks
    rig.blocks.release(sequence_owner(("a", 1)))
    assert rig.step()[0] == [("b", 12)]


@pytest.mark.parametrize("steps", [0, 1])
def test_a_removed_prompt_is_gone_and_its_blocks_stay_held(steps: int) -> None:
    rig = Rig(max_batched_tokens=16)
    rig.scheduler.add(sequence("a", [1] * 40))
    for _ in range(steps):
        rig.step()
    removed = rig.scheduler.remove(("a", 1))
    assert removed is not None
    assert removed.status is SequenceStatus.FINISHED
    assert rig.scheduler.remove(("a", 1)) is None
    assert rig.step() == ([], [])
    assert len(rig.blocks.owned_blocks(sequence_owner(("a", 1)))) == 10 * steps


@pytest.mark.parametrize(
    ("max_tokens", "stop", "reason"), [(1, (), FinishReason.LENGTH), (8, (7,), FinishReason.STOP), (8, (), None)]
)
def test_the_first_token_may_be_the_last(max_tokens: int, stop: tuple[int, ...], reason: FinishReason | None) -> None:
    rig = Rig()
    made = sequence("a", [1] * 8)
    made.sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=stop)
    rig.scheduler.add(made)
    assert rig.step(token=7)[1][0].finish_reason is reason
