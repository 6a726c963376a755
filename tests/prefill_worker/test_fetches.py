"""How often a prompt waits for blocks of the tier below the pool, and what its scheduler hears."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from kvrelay.common.block_hash import HashChain
from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.lower_tier import Fetch
from kvrelay.engine.step.sequence import Sequence
from kvrelay.prefill_worker.fetches import Fetches
from kvrelay.worker.scheduling.sequence_blocks import SequenceBlocks


class PlayedTier:
    """A tier that answers as the test says."""

    def __init__(self) -> None:
        self.answers: list[Fetch | None] = []
        self.asked: list[Seq[bytes]] = []

    def on_published(self, block_id: int, group: int, block_hash: bytes, sources: frozenset[str]) -> None: ...

    def on_unpublished(self, block_id: int, group: int, block_hash: bytes) -> None: ...

    def on_distrusted(self, source: str) -> None: ...

    def fetch(self, hashes: Seq[bytes]) -> Fetch | None:
        self.asked.append(hashes)
        return self.answers.pop(0)


def sequence(name: str, num_tokens: int = 9) -> Sequence:
    tokens = list(range(num_tokens))
    return Sequence(name, 1, tokens, num_tokens, SamplingParams(max_tokens=1), 0.0, chain=HashChain(b"model", 4))


def rig() -> tuple[PlayedTier, Fetches, list[str]]:
    """The tier, what is tested, and the names of prompts whose blocks have come."""
    tier, come = PlayedTier(), list[str]()
    held = SequenceBlocks(BlockManager(8, 4, lambda: 0.0))
    return tier, Fetches(tier, held, lambda one: come.append(one.request_id)), come


def test_a_prompt_waits_until_its_blocks_have_come() -> None:
    (tier, fetches, come), one = rig(), sequence("a")
    fetch = Fetch()
    tier.answers = [fetch, Fetch(is_done=True)]
    assert not fetches.is_under_way(one)
    assert fetches.begin(one)
    assert fetches.begin(one)
    assert fetches.is_under_way(one)
    assert not come
    fetch.is_done = True
    assert not fetches.is_under_way(one)
    assert come == ["a"]
    assert not fetches.begin(one)
    assert not fetches.begin(one)
    assert len(tier.asked) == 2
    assert tier.asked[0] == one.block_hashes(2)  # the last token is always computed


def test_a_prompt_whose_blocks_leave_again_and_again_begins_all_the_same() -> None:
    (tier, fetches, come), one = rig(), sequence("a")
    for _ in range(2):
        fetch = Fetch()
        tier.answers = [fetch]
        assert fetches.begin(one)
        fetch.is_done = True
        assert not fetches.is_under_way(one)
    assert not fetches.begin(one)
    assert come == ["a", "a"]


def test_a_prompt_without_room_is_looked_up_again() -> None:
    (tier, fetches, _), one = rig(), sequence("a")
    tier.answers = [None, None, Fetch()]
    assert [fetches.begin(one) for _ in range(3)] == [False, False, True]


def test_a_later_attempt_with_the_same_name_is_looked_up_anew() -> None:
    (tier, fetches, _), one = rig(), sequence("a")
    tier.answers = [Fetch(), Fetch(is_done=True)]
    assert fetches.begin(one)
    fetches.forget(one.key)
    assert not fetches.begin(one)
    assert not fetches.is_under_way(one)


def test_without_a_tier_nobody_waits() -> None:
    held = SequenceBlocks(BlockManager(8, 4, lambda: 0.0))
    fetches, one = Fetches(None, held, lambda _: None), sequence("a")
    fetches.begin_next([one])
    assert not fetches.begin(one)
    assert not fetches.is_under_way(one)
    fetches.forget(one.key)
