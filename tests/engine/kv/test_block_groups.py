"""Blocks with parts in two groups of layers, of which the second needs the last ones only, as one with a window does."""

from __future__ import annotations

import random

import pytest

from kvrelay.common.block_hash import HashChain
from kvrelay.engine.kv.block_manager import BlockManager, Owner, OwnerKind

FULL, WINDOW = 0, 1


def sequence(name: str) -> Owner:
    return Owner(OwnerKind.SEQUENCE, name)


def hashes(*tokens: int) -> list[bytes]:
    return HashChain(b"model", 1).hashes_of_all(tokens)


def two_groups(num_full: int = 8, num_window: int = 4) -> BlockManager:
    return BlockManager(num_full, 1, lambda: 0.0, further_groups=(num_window,))


def test_what_one_group_frees_early_another_sequence_gets() -> None:
    blocks, a, b = two_groups(), sequence("a"), sequence("b")
    first = blocks.allocate(a, 4)
    assert first is not None
    assert blocks.num_allocatable == 0
    assert blocks.allocate(b, 1) is None
    dropped = blocks.owned_blocks(a, WINDOW)[:2]
    blocks.drop(a, WINDOW, 2)
    assert blocks.owned_blocks(a, FULL) == first.block_ids
    assert blocks.owned_blocks(a, WINDOW)[:2] == [None, None]
    assert blocks.num_allocatable == 2
    second = blocks.allocate(b, 2)
    assert second is not None
    assert blocks.owned_blocks(b, WINDOW) == dropped
    assert not {*second.block_ids} & {*first.block_ids}
    assert blocks.ledger(FULL).num_running == 6
    assert blocks.ledger(WINDOW).num_running == 4
    blocks.drop(a, WINDOW, 1)  # fewer than before: no more is given back
    assert blocks.num_allocatable == 0
    blocks.check_integrity()
    for owner in (a, b):
        blocks.release(owner)
    assert [blocks.ledger(group).num_free for group in (FULL, WINDOW)] == [8, 4]


def test_a_part_stays_while_somebody_else_needs_it() -> None:
    blocks, a, b = two_groups(), sequence("a"), sequence("b")
    blocks.allocate(a, 3)
    for index, block_hash in enumerate(hashes(1, 2)):
        blocks.publish(a, index, block_hash)
    shared = blocks.allocate(b, 3, hashes(1, 2))
    assert shared is not None
    assert shared.num_cached == 2
    blocks.drop(a, WINDOW, 2)
    assert blocks.ledger(WINDOW).num_free == 0
    assert blocks.num_cached_prefix(hashes(1, 2)) == 2, "b has them whole"
    blocks.release(b)  # the last who needed them; a still has their other parts
    assert blocks.ledger(WINDOW).num_free == 3
    assert blocks.ledger(FULL).num_running == 3
    assert blocks.num_cached_prefix(hashes(1, 2)) == 0, "nobody can compute behind half a block"
    blocks.check_integrity()


def test_a_block_without_a_part_is_not_kept_as_cache() -> None:
    blocks, a = two_groups(), sequence("a")
    blocks.allocate(a, 3)
    blocks.drop(a, WINDOW, 1)
    for index, block_hash in enumerate(hashes(1, 2, 3)):
        blocks.publish(a, index, block_hash)
    blocks.release(a)
    assert [blocks.ledger(group).num_cached for group in (FULL, WINDOW)] == [2, 2]
    assert blocks.num_cached_prefix(hashes(1)) == 0
    blocks.check_integrity()


def test_the_scarcer_group_evicts_for_both() -> None:
    blocks, a, b = two_groups(num_full=8, num_window=2), sequence("a"), sequence("b")
    blocks.allocate(a, 2)
    for index, block_hash in enumerate(hashes(1, 2)):
        blocks.publish(a, index, block_hash)
    blocks.release(a)
    assert blocks.allocate(b, 2) is not None
    assert [blocks.ledger(group).num_cached for group in (FULL, WINDOW)] == [0, 0]
    assert blocks.ledger(FULL).num_free == 6
    blocks.check_integrity()


def test_who_goes_on_from_a_sequence_needs_no_more_than_that() -> None:
    blocks, a, fork, later = two_groups(), sequence("a"), sequence("fork"), sequence("later")
    blocks.allocate(a, 4)
    blocks.drop(a, WINDOW, 2)
    blocks.fork(a, fork, 3)
    blocks.hand_on(a, later)
    assert blocks.owned_blocks(later, WINDOW)[:2] == blocks.owned_blocks(fork, WINDOW)[:2] == [None, None]
    blocks.check_integrity()
    blocks.drop(later, WINDOW, 4)
    assert blocks.ledger(WINDOW).num_free == 3  # the fork's last one is left
    blocks.check_integrity()


def test_there_may_be_more_blocks_than_the_first_group_has() -> None:
    """A model of windows only: a sequence is as long as it likes, in as many blocks as its window has."""
    blocks, a = BlockManager(2, 1, lambda: 0.0), sequence("a")
    blocks.allocate(a, 2)
    for num_dropped in range(1, 20):
        blocks.drop(a, FULL, num_dropped)
        assert blocks.extend(a, 1) is not None
        blocks.check_integrity()
    assert blocks.ledger().num_running == 2
    with pytest.raises(KeyError):  # nobody else can begin with what is gone
        blocks.fork(a, sequence("fork"), 20)
    blocks.check_integrity()
    assert list(blocks.owners()) == [a]
    blocks.release(a)
    assert blocks.ledger().num_free == 2
    blocks.check_integrity()


def test_only_a_sequence_drops_blocks_and_only_those_it_has() -> None:
    blocks, a, lease = two_groups(), sequence("a"), Owner(OwnerKind.LEASE, "1")
    blocks.allocate(a, 1)
    blocks.allocate(lease, 1)
    for owner, count in ((a, 2), (lease, 1), (sequence("nobody"), 1)):
        with pytest.raises(ValueError, match=f"cannot drop {count}"):
            blocks.drop(owner, WINDOW, count)
    with pytest.raises(ValueError, match="must be at least 1"):
        two_groups(num_window=0)


class AtRandom:
    """Blocks are known by their numbers in the first group, which drops nothing."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.blocks = two_groups(num_full=9, num_window=6)
        self.dropped: dict[Owner, int] = {}
        self.count = 0

    def new_owner(self) -> Owner:
        self.count += 1
        return sequence(str(self.count))

    def pick(self) -> Owner:
        return self.chance.choice(list(self.dropped))

    def allocate(self) -> None:
        owner, chain = self.new_owner(), hashes(*self.chance.choices((0, 1), k=self.chance.randint(1, 4)))
        if self.blocks.allocate(owner, len(chain), chain) is not None:
            self.dropped[owner] = 0
            for index, block_hash in enumerate(chain[: self.chance.choice((0, 4))]):
                self.blocks.publish(owner, index, block_hash)

    def extend(self) -> None:
        self.blocks.extend(self.pick(), 1)

    def release(self) -> None:
        owner = self.pick()
        self.blocks.release(owner)
        del self.dropped[owner]

    def drop(self) -> None:
        owner = self.pick()
        count = self.chance.randint(0, len(self.blocks.owned_blocks(owner)))
        self.blocks.drop(owner, WINDOW, count)
        self.dropped[owner] = max(self.dropped[owner], count)

    def fork(self) -> None:
        owner, child = self.pick(), self.new_owner()
        count = self.chance.randint(0, len(self.blocks.owned_blocks(owner)))
        self.blocks.fork(owner, child, count)
        self.dropped[child] = min(self.dropped[owner], count)

    def hand_on(self) -> None:
        owner, later = self.pick(), self.new_owner()
        self.blocks.hand_on(owner, later)
        self.dropped[later] = self.dropped.pop(owner)

    def make_writable(self) -> None:
        owner = self.pick()
        last = len(self.blocks.owned_blocks(owner)) - 1
        if self.dropped[owner] <= last:
            self.blocks.make_writable(owner, last)

    def agrees(self) -> None:
        self.blocks.check_integrity()
        parts: dict[int | None, int | None] = {}
        for owner, count in self.dropped.items():
            full, window = self.blocks.owned_blocks(owner, FULL), self.blocks.owned_blocks(owner, WINDOW)
            assert window[:count] == [None] * count
            for block_id, part in zip(full[count:], window[count:], strict=True):
                assert part is not None
                assert parts.setdefault(block_id, part) == part, "owners of a block disagree about its part"
        assert len(set(parts.values())) == len(parts), "two blocks have one part"
        ledger = self.blocks.ledger(WINDOW)
        assert ledger.num_running == len(parts)
        assert ledger.num_cached == self.blocks.ledger(FULL).num_cached
        assert ledger.num_free == 6 - len(parts) - ledger.num_cached


@pytest.mark.parametrize("seed", range(20))
def test_each_group_holds_what_somebody_needs_or_is_cached(seed: int) -> None:
    books = AtRandom(random.Random(seed))
    acts = (books.extend, books.release, books.drop, books.drop, books.fork, books.hand_on, books.make_writable)
    for _ in range(400):
        if not books.dropped or books.chance.random() < 0.3:
            books.allocate()
        else:
            books.chance.choice(acts)()
        books.agrees()
