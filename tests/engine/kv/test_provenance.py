"""The source of each block: all blocks of a distrusted source are dropped, no others are, and the books agree."""

from __future__ import annotations

import pytest

from kvrelay.common.block_hash import HashChain
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.owners import Owner, OwnerKind, sequence_owner

NUM_BLOCKS = 24
WRONG, RIGHT = "prefill-1", "prefill-2"


def lease(name: str) -> Owner:
    return Owner(OwnerKind.LEASE, name)


def sequence(name: str) -> Owner:
    return sequence_owner((name, 1))


class Rig:
    """Blocks of one token, in one or more groups."""

    def __init__(self, windows: tuple[int | None, ...] = (None,)) -> None:
        self.blocks = BlockManager(NUM_BLOCKS, 1, lambda: 0.0, windows=windows)

    def hold(self, owner: Owner, tokens: list[int], source: str | None = None) -> int:
        """Allocate and publish blocks for all tokens. Returns how many were cached before."""
        hashes = HashChain(b"model", 1).hashes_of_all(tokens)
        allocation = self.blocks.allocate(owner, len(tokens), hashes)
        assert allocation is not None
        if source is not None:
            self.blocks.came_from(owner, source)
        self.publish(owner, tokens)
        return allocation.num_cached

    def publish(self, owner: Owner, tokens: list[int]) -> None:
        for index, block_hash in enumerate(HashChain(b"model", 1).hashes_of_all(tokens)):
            self.blocks.publish(owner, index, block_hash)

    def num_cached(self, tokens: list[int]) -> int:
        """The number of these tokens that a new sequence finds cached."""
        found = self.hold(sequence("looks"), tokens)
        self.blocks.release(sequence("looks"))
        return found

    def assert_all_free(self) -> None:
        self.blocks.check_integrity()
        ledger = self.blocks.ledger()
        assert (ledger.num_free, ledger.num_cached) == (NUM_BLOCKS, 0)


@pytest.mark.parametrize("windows", [(None,), (None, 4)])
def test_what_was_shipped_and_what_was_computed_from_it_is_dropped(windows: tuple[int | None, ...]) -> None:
    rig = Rig(windows)
    rig.hold(lease("a"), [1, 2, 3], WRONG)
    rig.blocks.release(lease("a"))
    assert rig.hold(sequence("b"), [1, 2, 3, 4, 5]) == 3
    rig.blocks.release(sequence("b"))
    assert rig.blocks.distrust(WRONG) == (5 * len(windows), frozenset())
    rig.assert_all_free()
    assert rig.num_cached([1, 2, 3, 4, 5]) == 0


def test_all_else_stays() -> None:
    rig = Rig()
    rig.hold(lease("a"), [1, 2], RIGHT)
    rig.hold(sequence("b"), [7, 8])
    rig.hold(lease("c"), [1, 2, 3], WRONG)  # its first two blocks are from the other source
    for owner in (lease("a"), sequence("b"), lease("c")):
        rig.blocks.release(owner)
    assert rig.blocks.distrust(WRONG) == (1, frozenset())
    rig.blocks.check_integrity()
    assert rig.blocks.ledger().num_cached == 4
    assert (rig.num_cached([1, 2, 3, 4]), rig.num_cached([7, 8, 9])) == (2, 2)


def test_who_holds_such_blocks_keeps_them_and_leaves_none_behind() -> None:
    rig = Rig()
    rig.hold(lease("a"), [1, 2, 3], WRONG)
    rig.hold(sequence("b"), [7, 8])
    assert rig.blocks.distrust(WRONG) == (3, frozenset({lease("a")}))
    rig.blocks.check_integrity()
    assert rig.blocks.ledger().num_free == NUM_BLOCKS - 5
    rig.publish(lease("a"), [1, 2, 3])
    rig.blocks.release(lease("a"))
    rig.blocks.check_integrity()
    assert rig.num_cached([1, 2, 3, 4]) == 0
    rig.blocks.release(sequence("b"))
    assert rig.num_cached([7, 8, 9]) == 2


def test_blocks_that_are_handed_on_or_shared_keep_their_provenance() -> None:
    rig = Rig()
    rig.hold(lease("a"), [1, 2, 3], WRONG)
    rig.blocks.hand_on(lease("a"), sequence("a"))
    rig.blocks.fork(sequence("a"), sequence("beam"), 2)
    assert rig.hold(sequence("b"), [1, 2, 9]) == 2
    holders = frozenset({sequence("a"), sequence("beam"), sequence("b")})
    assert rig.blocks.distrust(WRONG) == (4, holders)
    for owner in holders:
        rig.blocks.release(owner)
    rig.assert_all_free()


def test_an_evicted_block_s_provenance_is_forgotten() -> None:
    rig = Rig()
    rig.hold(lease("a"), [1, 2, 3], WRONG)
    rig.blocks.release(lease("a"))
    rig.hold(sequence("b"), [100 + token for token in range(NUM_BLOCKS)])
    rig.blocks.release(sequence("b"))
    assert rig.blocks.distrust(WRONG) == (0, frozenset())
    rig.blocks.check_integrity()
    assert rig.blocks.ledger().num_cached == NUM_BLOCKS
