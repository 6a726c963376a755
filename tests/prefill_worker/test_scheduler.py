"""The prefill scheduler alone: budget, order, cached prefixes and free blocks, without threads, sockets and a clock."""

from __future__ import annotations

import pytest

from kvrelay.common.block_hash import HashChain
from kvrelay.common.fair_queue import Flow
from kvrelay.common.sampling import BeamSearch, FinishReason, SampledToken, SamplingParams
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.owners import sequence_owner
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.plan import RowResult
from kvrelay.engine.step.sequence import Sequence, SequenceStatus
from kvrelay.prefill_worker.scheduler import PrefillScheduler
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings
from kvrelay.worker.scheduling.scheduler import Progress

BLOCK = 4


def sequence(name: str, tokens: list[int], arrival_s: float = 0.0, flow: Flow | None = None) -> Sequence:
    params, chain = SamplingParams(max_tokens=8, temperature=0.0), HashChain(b"model", BLOCK)
    return Sequence(name, 1, list(tokens), len(tokens), params, arrival_s, chain=chain, flow=flow or Flow())


class Rig:
    """A scheduler over a pool of ``num_blocks``; ``step`` pretends to compute."""

    def __init__(
        self,
        num_blocks: int = 64,
        windows: tuple[int | None, ...] = (None,),
        has_states: bool = False,
        **settings: int,
    ) -> None:
        of_scheduler = PrefillSchedulerSettings(**settings)
        self.blocks = BlockManager(
            num_blocks,
            BLOCK,
            lambda: 0.0,
            windows=windows,
            max_step_tokens=of_scheduler.max_batched_tokens or 512,
            has_states=has_states,
        )
        self.scheduler = PrefillScheduler(of_scheduler, self.blocks, num_blocks * BLOCK, "cpu")

    def learn(self, token_s: float) -> None:
        """Let the scheduler observe steps that take ``token_s`` for each token."""
        for num_tokens in (4, 8, 16, 32):
            self.scheduler.observe([StepRow(sequence("any", [1]), num_tokens)], num_tokens * token_s)

    def step(self, token: int = 7, now_s: float = 0.0) -> tuple[list[tuple[str, int]], list[Progress]]:
        """Schedule a step and pretend to compute it. Returns (name, tokens) of its rows, and the scheduler's progress."""
        rows = self.scheduler.schedule(now_s).rows
        shares = [(row.sequence.request_id, row.num_tokens) for row in rows]
        results = [RowResult((SampledToken(token),) if row.samples else ()) for row in rows]
        computed = self.scheduler.postprocess(rows, results)
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


def test_a_beam_search_needs_no_more_room_than_any_prompt() -> None:
    """A prefill worker computes only the prompt of a search, not its beams. It starts in a pool too small for all its blocks."""
    rig = Rig(16, windows=(None, 8), max_batched_tokens=8)
    search = sequence("search", list(range(40)))
    search.sampling = SamplingParams(max_tokens=8, temperature=0.0, beam_search=BeamSearch(width=2, num_return=1))
    rig.scheduler.add(search)
    shares = [rig.step()[0] for _ in range(5)]
    assert shares == [[("search", 8)]] * 5


def test_keys_share_and_a_better_class_comes_before_all_of_a_lower_one() -> None:
    rig = Rig(max_batched_tokens=16)
    names = [("f1", "flood", 0), ("f2", "flood", 0), ("f3", "flood", 0), ("a1", "a", 0), ("h1", "flood", -10)]
    for place, (name, key, priority) in enumerate(names):
        rig.scheduler.add(sequence(name, [place] * 16, place / 100, Flow(key, priority)))
    assert [rig.step(now_s=0.1)[0] for _ in range(3)] == [[(name, 16)] for name in ("h1", "f1", "a1")]
    # "flood" has had its share, so its prompts get half of each step while others may come.
    assert [rig.step(now_s=0.2)[0] for _ in range(4)] == [[(name, 8)] for name in ("f2", "f2", "f3", "f3")]


def test_prompts_of_keys_that_are_ahead_leave_half_of_each_step_to_others() -> None:
    rig = Rig(max_batched_tokens=16)
    for place, (name, key) in enumerate((("f1", "flood"), ("a1", "a"), ("f2", "flood"), ("f3", "flood"))):
        rig.scheduler.add(sequence(name, [place] * 16, place / 100, Flow(key)))
    assert [rig.step(now_s=0.1)[0] for _ in range(2)] == [[("f1", 16)], [("a1", 16)]]
    assert [rig.step(now_s=0.2)[0] for _ in range(3)] == [[("f2", 8)], [("f2", 8)], [("f3", 8)]]
    rig.scheduler.add(sequence("a2", [7] * 4, 0.3, Flow("a")))
    assert rig.step(now_s=0.3)[0] == [("a2", 4), ("f3", 4)]


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
    assert computed[0].num_cached_tokens == 12
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


@pytest.mark.parametrize(("num_blocks", "order"), [(16, ["a", "urgent"]), (24, ["urgent", "a"])])
def test_prompts_that_share_a_window_s_blocks_all_end(num_blocks: int, order: list[str]) -> None:
    """The second has room beside what it shares with the first, but would have none for its next blocks."""
    rig, prefix, computed = Rig(num_blocks, windows=(32,), max_batched_tokens=8), list(range(64)), list[str]()
    rig.scheduler.add(sequence("first", prefix))
    for _ in range(8):
        rig.step()
    rig.blocks.release(sequence_owner(("first", 1)))
    rig.scheduler.add(sequence("a", [*prefix, *[1] * 80]))
    assert rig.step()[0] == [("a", 8)]
    rig.scheduler.add(sequence("urgent", [*prefix, *[2] * 80], flow=Flow(priority=-10)))
    for _ in range(40):
        for item in rig.step()[1]:
            if item.token is not None:
                computed.append(item.key[0])
                rig.blocks.release(sequence_owner(item.key))
    assert computed == order


def test_nobody_starts_before_one_that_has_no_room() -> None:
    rig = Rig(num_blocks=8)
    for name, length in (("a", 24), ("b", 20), ("c", 4)):
        rig.scheduler.add(sequence(name, [ord(name)] * length))
    assert rig.step()[0] == [("a", 24)]
    assert rig.step() == ([], [])  # two blocks are free: "c" would fit
    rig.blocks.release(sequence_owner(("a", 1)))
    assert rig.step()[0] == [("b", 20), ("c", 4)]


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


def test_steps_become_small_when_tokens_take_long() -> None:
    rig = Rig(max_batched_tokens=64, ttft_budget_ms=1000)
    rig.scheduler.add(sequence("a", [1] * 200))
    assert rig.step()[0] == [("a", 64)]
    rig.learn(0.01)
    assert rig.step()[0] == [("a", 28)]  # a quarter of the budget is 25 tokens: seven blocks


@pytest.mark.parametrize(
    ("max_batched_tokens", "chunks"), [(6, [4, 4, 5]), (4, [4, 4, 4, 1]), (11, [8, 5]), (13, [13])]
)
def test_with_states_a_chunk_ends_with_a_block_or_with_the_prompt(max_batched_tokens: int, chunks: list[int]) -> None:
    rig = Rig(windows=(None, 2), has_states=True, max_batched_tokens=max_batched_tokens)
    rig.scheduler.add(sequence("a", list(range(13))))
    assert [rig.step()[0] for _ in chunks] == [[("a", count)] for count in chunks]


def test_with_states_a_prompt_gets_a_block_even_if_its_share_is_less() -> None:
    rig = Rig(windows=(None, 2), has_states=True, max_batched_tokens=8)
    rig.scheduler.add(sequence("a", list(range(3))))
    rig.scheduler.add(sequence("b", list(range(20, 33))))
    assert rig.step()[0] == [("a", 3), ("b", 4)]
    rig.scheduler.add(sequence("c", list(range(40, 43))))
    assert [rig.step()[0] for _ in range(2)] == [[("b", 8)], [("b", 1), ("c", 3)]]


def test_with_states_a_step_has_no_more_tokens_than_it_may_if_a_prefix_is_no_longer_cached() -> None:
    rig, prompt = Rig(windows=(None, 2), has_states=True, max_batched_tokens=8), list(range(100, 113))
    rig.scheduler.add(sequence("before", prompt))
    rig.step()
    rig.step()
    rig.blocks.release(sequence_owner(("before", 1)))
    rig.scheduler.add(sequence("a", list(range(6))))
    rig.scheduler.add(sequence("b", prompt))
    other = sequence_owner(("other", 1))
    assert rig.blocks.allocate(other, 32, is_whole=True) is not None
    rig.blocks.release(other)
    assert [rig.step()[0] for _ in range(3)] == [[("a", 6)], [("b", 8)], [("b", 5)]]


def test_a_short_prompt_overtakes_a_long_one_and_chunks_stay_whole_blocks() -> None:
    rig = Rig(max_batched_tokens=64, ttft_budget_ms=1000)
    rig.learn(0.01)
    rig.scheduler.add(sequence("long", [1] * 200))
    assert rig.step()[0] == [("long", 28)]
    rig.scheduler.add(sequence("short", [2] * 9, arrival_s=0.3))
    shares, computed = rig.step(now_s=0.3)
    assert shares == [("short", 9), ("long", 16)]  # 19 are left for it, which is four blocks
    assert [item.num_ready_blocks for item in computed] == [3, 11]
    assert rig.step(now_s=0.6)[0] == [("long", 28)]


def test_what_is_cached_does_not_count_for_who_is_short() -> None:
    rig = Rig(num_blocks=128, max_batched_tokens=64, ttft_budget_ms=1000)
    rig.scheduler.add(sequence("chat", [2] * 60))
    rig.step()
    rig.blocks.release(sequence_owner(("chat", 1)))
    rig.learn(0.01)
    rig.scheduler.add(sequence("long", [1] * 100))
    rig.step()
    for name, first in (("new", 3), ("again", 2)):
        rig.scheduler.add(sequence(name, [first] * 60, arrival_s=0.3))
    assert rig.step(now_s=0.3)[0] == [("again", 4), ("long", 24)]


def test_a_long_prompt_that_waits_for_room_gets_it_before_short_ones() -> None:
    """Short prompts may overtake "a" and take blocks. Once "b" is next, they do not take the blocks that it waits for."""
    rig = Rig(num_blocks=64, max_batched_tokens=16, ttft_budget_ms=1000)
    rig.learn(0.05)
    rig.scheduler.add(sequence("a", [1] * 120))
    rig.step()
    rig.scheduler.add(sequence("b", [2] * 200, arrival_s=0.1))  # does not fit beside "a"
    overtook, computed_at = 0, dict[tuple[str, int], int]()
    for number in range(200):
        rig.scheduler.add(sequence(f"short{number}", [10 + number] * 4, arrival_s=0.2 + number))
        shares, computed = rig.step(now_s=0.2 + number)
        computed_at |= {item.key: number for item in computed if item.token is not None}
        overtook += any(name.startswith("short") for name, _ in shares)
        for key in [key for key, ended in computed_at.items() if ended == number - 4]:
            rig.blocks.release(sequence_owner(key))  # the hand-off ends while more short prompts wait
    assert ("b", 1) in computed_at
    # Four steps until the blocks of "a" are free, then 200 tokens at four tokens a step.
    assert computed_at["b", 1] - computed_at["a", 1] <= 4 + 200 / 4 + 2
    assert overtook > 5


def test_a_prompt_that_could_not_start_leaves_its_share_to_the_one_it_would_overtake() -> None:
    rig = Rig(max_batched_tokens=64, ttft_budget_ms=1000, max_num_seqs=1)
    rig.learn(0.01)
    rig.scheduler.add(sequence("long", [1] * 200))
    rig.step()
    rig.scheduler.add(sequence("short", [2] * 9, arrival_s=0.3))
    assert rig.step(now_s=0.3)[0] == [("long", 28)]


def test_without_a_budget_steps_are_full_and_nobody_overtakes() -> None:
    rig = Rig(max_batched_tokens=32, ttft_budget_ms=0)
    rig.learn(1.0)
    rig.scheduler.add(sequence("long", [1] * 100))
    rig.step()
    rig.scheduler.add(sequence("short", [2] * 5))
    assert rig.step(now_s=100.0)[0] == [("long", 32)]


def test_a_block_as_large_as_a_step_is_computed_in_pieces() -> None:
    rig = Rig(max_batched_tokens=16)
    rig.blocks = BlockManager(64, 64, lambda: 0.0)
    rig.scheduler = PrefillScheduler(PrefillSchedulerSettings(max_batched_tokens=16), rig.blocks, 4096, "cpu")
    made = sequence("a", [1] * 40)
    made.chain = HashChain(b"model", 64)
    rig.scheduler.add(made)
    assert [rig.step()[0] for _ in range(3)] == [[("a", 16)], [("a", 16)], [("a", 8)]]
