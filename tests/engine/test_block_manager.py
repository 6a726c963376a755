"""Who owns which block: allocation, sharing, cache order, ledger; at random against what must always hold."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvrelay.common.block_hash import chain_hashes
from kvrelay.engine.block_manager import BlockManager, Ledger, Owner, OwnerKind, sequence_owner

BLOCK = 4


def owner(name: str, kind: OwnerKind = OwnerKind.SEQUENCE) -> Owner:
    return Owner(kind, name)


def hashes(*tokens: int) -> list[bytes]:
    """One hash per token: block i holds ``tokens[i]`` four times."""
    return chain_hashes(b"root", [token for token in tokens for _ in range(BLOCK)], BLOCK)


def publish_all(blocks: BlockManager, who: Owner, chain: list[bytes]) -> None:
    for index, block_hash in enumerate(chain):
        blocks.publish(who, index, block_hash)


def test_released_blocks_are_free_or_cached() -> None:
    blocks = BlockManager(8, BLOCK, lambda: 0.0)
    given = blocks.allocate(owner("a"), 3)
    assert given is not None
    assert (len(set(given.block_ids)), given.num_cached) == (3, 0)
    publish_all(blocks, owner("a"), hashes(1, 2))
    assert blocks.ledger() == Ledger(8, num_free=5, num_cached=0, num_leased=0, num_running=3)
    blocks.release(owner("a"))
    blocks.release(owner("a"))
    assert blocks.ledger() == Ledger(8, num_free=6, num_cached=2, num_leased=0, num_running=0)
    assert blocks.num_allocatable == 8
    blocks.check_integrity()


def test_a_published_prefix_is_shared_while_it_runs_and_after() -> None:
    blocks = BlockManager(8, BLOCK, lambda: 0.0)
    first = blocks.allocate(owner("a"), 3, hashes(1, 2, 3))
    publish_all(blocks, owner("a"), hashes(1, 2, 3))
    second = blocks.allocate(owner("b"), 4, hashes(1, 2, 9))
    assert first is not None
    assert second is not None
    assert (second.num_cached, second.block_ids[:2]) == (2, first.block_ids[:2])
    assert blocks.ledger().num_running == 5
    blocks.release(owner("a"))
    third = blocks.allocate(owner("c"), 3, hashes(1, 2, 3))
    assert third is not None
    assert (third.num_cached, third.block_ids) == (3, first.block_ids)
    blocks.check_integrity()


def test_no_room_changes_nothing() -> None:
    blocks = BlockManager(4, BLOCK, lambda: 0.0)
    blocks.allocate(owner("a"), 2)
    publish_all(blocks, owner("a"), hashes(1, 2))
    blocks.release(owner("a"))
    blocks.allocate(owner("b"), 2)
    before = blocks.ledger()
    # Two cached blocks would be shared, so only they are left to take the third one from.
    assert blocks.allocate(owner("c"), 3, hashes(1, 2)) is None
    assert blocks.extend(owner("b"), 3) is None
    assert blocks.ledger() == before
    assert blocks.num_cached_prefix(hashes(1, 2)) == 2
    blocks.check_integrity()


def test_the_tail_of_the_oldest_prefix_is_evicted_first() -> None:
    blocks = BlockManager(4, BLOCK, lambda: 0.0)
    for name, chain in (("a", hashes(1, 2)), ("b", hashes(8, 9))):
        blocks.allocate(owner(name), 2, chain)
        publish_all(blocks, owner(name), chain)
        blocks.release(owner(name))
    blocks.allocate(owner("c"), 1)
    assert (blocks.num_cached_prefix(hashes(1, 2)), blocks.num_cached_prefix(hashes(8, 9))) == (1, 2)
    blocks.release(owner("c"))
    blocks.allocate(owner("d"), 1, hashes(1))  # touched: now the most recently used
    blocks.release(owner("d"))
    blocks.allocate(owner("e"), 3)
    assert (blocks.num_cached_prefix(hashes(1)), blocks.num_cached_prefix(hashes(8))) == (1, 0)
    blocks.check_integrity()


def test_extending_evicts_what_is_cached() -> None:
    blocks = BlockManager(4, BLOCK, lambda: 0.0)
    blocks.allocate(owner("a"), 3)
    publish_all(blocks, owner("a"), hashes(1, 2, 3))
    blocks.release(owner("a"))
    blocks.allocate(owner("b"), 1)
    fresh = blocks.extend(owner("b"), 2)
    assert fresh is not None
    assert blocks.num_cached_prefix(hashes(1, 2, 3)) == 1
    blocks.check_integrity()
    assert blocks.extend(owner("b"), 2) is None
    assert blocks.num_cached_prefix(hashes(1, 2, 3)) == 1
    blocks.check_integrity()


def test_a_lease_becomes_a_sequence() -> None:
    blocks = BlockManager(4, BLOCK, lambda: 0.0)
    lease = owner("1", OwnerKind.LEASE)
    given = blocks.allocate(lease, 2)
    assert given is not None
    assert blocks.ledger().num_leased == 2
    blocks.hand_on(lease, owner("a"))
    assert blocks.ledger().num_leased == 0
    assert blocks.owned_blocks(owner("a")) == given.block_ids
    assert blocks.owners() == {owner("a"): 2}
    fresh = blocks.extend(owner("a"), 1)
    assert fresh is not None
    assert blocks.owned_blocks(owner("a")) == given.block_ids + fresh
    blocks.check_integrity()


def test_a_fork_shares_and_who_writes_gets_a_block_of_its_own() -> None:
    blocks = BlockManager(4, BLOCK, lambda: 0.0)
    first = blocks.allocate(owner("a"), 2)
    assert first is not None
    assert blocks.fork(owner("a"), owner("b"), 2) == first.block_ids
    assert blocks.fork(owner("a"), owner("c"), 1) == first.block_ids[:1]
    assert blocks.ledger() == Ledger(4, num_free=2, num_cached=0, num_leased=0, num_running=2)
    own = blocks.make_writable(owner("a"), 1)
    assert own not in (None, *first.block_ids)
    assert blocks.owned_blocks(owner("a")) == [first.block_ids[0], own]
    assert blocks.make_writable(owner("b"), 1) == first.block_ids[1]  # the only holder by now
    assert blocks.ledger().num_running == 3
    for name in "abc":
        blocks.release(owner(name))
    blocks.check_integrity()
    assert blocks.ledger().num_free == 4


def test_a_block_that_others_may_find_is_never_written_to() -> None:
    blocks = BlockManager(3, BLOCK, lambda: 0.0)
    first = blocks.allocate(owner("a"), 1)
    assert first is not None
    publish_all(blocks, owner("a"), hashes(1))
    own = blocks.make_writable(owner("a"), 0)
    assert own not in (None, *first.block_ids)
    assert blocks.ledger() == Ledger(3, num_free=1, num_cached=1, num_leased=0, num_running=1)
    found = blocks.allocate(owner("b"), 1, hashes(1))
    assert found is not None
    assert found.block_ids == first.block_ids
    blocks.check_integrity()


def test_without_room_a_shared_block_stays_as_it_is() -> None:
    blocks = BlockManager(2, BLOCK, lambda: 0.0)
    first = blocks.allocate(owner("a"), 2)
    assert first is not None
    blocks.fork(owner("a"), owner("b"), 2)
    assert blocks.make_writable(owner("b"), 1) is None
    assert blocks.owned_blocks(owner("b")) == first.block_ids
    blocks.check_integrity()


def test_beams_of_one_search_are_owners_of_their_own() -> None:
    names = {sequence_owner(("r/1", 2), beam).key for beam in range(3)} | {sequence_owner(("r", 1), 2).key}
    assert names == {"r/1/2", "r/1/2#1", "r/1/2#2", "r/1#2"}


def test_two_blocks_of_one_content_are_both_fine() -> None:
    blocks = BlockManager(4, BLOCK, lambda: 0.0)
    for name in ("a", "b"):
        blocks.allocate(owner(name), 1)
        publish_all(blocks, owner(name), hashes(1))
    for name in ("b", "a"):
        blocks.release(owner(name))
    assert blocks.ledger() == Ledger(4, num_free=3, num_cached=1, num_leased=0, num_running=0)
    blocks.check_integrity()


def test_misuse_raises() -> None:
    blocks = BlockManager(4, BLOCK, lambda: 0.0)
    blocks.allocate(owner("a"), 1)
    with pytest.raises(ValueError, match="already holds 1 blocks"):
        blocks.allocate(owner("a"), 1)
    with pytest.raises(ValueError, match="2 hashes for 1 blocks"):
        blocks.allocate(owner("b"), 1, hashes(1, 2))
    with pytest.raises(ValueError, match="holds no blocks"):
        blocks.extend(owner("b"), 1)
    blocks.publish(owner("a"), 0, b"x" * 16)
    with pytest.raises(ValueError, match="is published as"):
        blocks.publish(owner("a"), 0, b"y" * 16)
    blocks.allocate(owner("b"), 1)
    with pytest.raises(ValueError, match="already holds"):
        blocks.hand_on(owner("a"), owner("b"))
    with pytest.raises(ValueError, match="must be at least 1"):
        BlockManager(0, BLOCK, lambda: 0.0)
    blocks.check_integrity()


class RandomUse(RuleBasedStateMachine):
    """Owners come, grow, publish, change and go; the books are checked after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(12, BLOCK, lambda: 0.0)
        self.chains: dict[Owner, list[bytes]] = {}  # what each owner's blocks hold, or will
        self.content: dict[int, bytes] = {}  # what was written into each block last
        self.count = 0

    def pick(self, number: int) -> Owner | None:
        owners = sorted(self.chains, key=lambda one: one.key)
        return owners[number % len(owners)] if owners else None

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=5), leased=st.booleans())
    def allocate(self, tokens: list[int], leased: bool) -> None:
        self.count += 1
        who = owner(f"{self.count:04d}", OwnerKind.LEASE if leased else OwnerKind.SEQUENCE)
        chain = hashes(*tokens)
        room = self.blocks.num_allocatable
        given = self.blocks.allocate(who, len(chain), chain)
        if given is None:
            assert room < len(chain) + 5  # never refused with room to spare
            return
        for block_id, block_hash in zip(given.block_ids[: given.num_cached], chain, strict=False):
            assert self.content[block_id] == block_hash, "a shared block holds something else"
        for block_id, block_hash in zip(given.block_ids[given.num_cached :], chain[given.num_cached :], strict=True):
            self.content[block_id] = block_hash
        self.chains[who] = chain

    @rule(number=st.integers(0, 20), upto=st.integers(0, 5))
    def publish(self, number: int, upto: int) -> None:
        who = self.pick(number)
        if who is not None:
            publish_all(self.blocks, who, self.chains[who][:upto])

    @rule(number=st.integers(0, 20))
    def release(self, number: int) -> None:
        who = self.pick(number)
        if who is not None:
            self.blocks.release(who)
            del self.chains[who]

    @rule(number=st.integers(0, 20))
    def hand_on(self, number: int) -> None:
        who = self.pick(number)
        if who is not None:
            self.count += 1
            new = owner(f"{self.count:04d}")
            self.blocks.hand_on(who, new)
            self.chains[new] = self.chains.pop(who)

    @rule(number=st.integers(0, 20), num_blocks=st.integers(1, 3))
    def extend(self, number: int, num_blocks: int) -> None:
        who = self.pick(number)
        if who is not None:
            for block_id in self.blocks.extend(who, num_blocks) or []:
                self.content[block_id] = b"fresh"

    @invariant()
    def books_agree(self) -> None:
        self.blocks.check_integrity()
        assert set(self.blocks.owners()) == set(self.chains)
        for who, chain in self.chains.items():
            held = self.blocks.owned_blocks(who)
            assert [self.content[block_id] for block_id in held[: len(chain)]] == chain


TestRandomUse = RandomUse.TestCase
TestRandomUse.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
