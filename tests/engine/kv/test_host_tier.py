"""Blocks that leave the pool come back from the host's memory with the right bytes, or do not come back."""

from __future__ import annotations

import pytest

from kvrelay.engine.kv.owners import sequence_owner

from .host_rig import BLOCK, WAYS, Rig, Windows, tokens_of


@pytest.mark.parametrize("windows", [(None,), (None, 6), (6, 2)])
@pytest.mark.parametrize("way", WAYS)
def test_what_left_the_pool_comes_back(way: str, windows: Windows) -> None:
    rig = Rig(windows, way=way)
    text, other = tokens_of(1, 6), tokens_of(2, 8)
    rig.compute(text)
    rig.work()
    assert rig.told == {"kept": 6 * len(windows)}
    rig.compute(other)  # takes all blocks
    assert rig.blocks.num_cached_prefix(rig.hashes(text)) == 0
    fetch = rig.fetch(text)
    assert fetch is not None
    assert fetch.is_done
    assert rig.blocks.num_cached_prefix(rig.hashes(text)) == 6
    assert rig.told["tokens"] == 6 * BLOCK
    assert rig.num_returned == 1
    num_seen = sum(6 if window is None else -(-(window - 1) // BLOCK) for window in windows)
    assert rig.told["returned"] == num_seen  # a group with a window gets what the next token sees
    rig.check()
    if way == "direct":
        assert rig.device is not None
        assert rig.device.num_direct == 6 * len(windows) + num_seen + rig.told["kept"] - 6 * len(windows)
    rig.tier.close()
    assert rig.device is None or not rig.device.registered


def test_only_what_the_pool_lacks_is_copied() -> None:
    rig = Rig()
    text = tokens_of(1, 6)
    rig.compute(text)
    rig.work()
    rig.compute(tokens_of(2, 4))  # the pool's tail of the first one goes
    assert rig.blocks.num_cached_prefix(rig.hashes(text)) == 4
    rig.fetch(text)
    assert rig.told["returned"] == 2
    assert rig.compute(text) == 6
    rig.check()


def test_what_is_not_worth_it_is_not_fetched() -> None:
    rig = Rig(num_blocks=20)
    rig.compute(tokens_of(1, 2))
    rig.work()
    rig.compute(tokens_of(2, 20))
    long = [*tokens_of(1, 2), *tokens_of(3, 17)]
    for tokens, is_worth_it in ((tokens_of(4, 2), False), (long, False), (long[: 16 * BLOCK], True)):
        before = rig.num_returned
        fetch = rig.fetch(tokens)
        assert fetch is not None
        assert fetch.is_done
        assert rig.num_returned - before == is_worth_it
    assert rig.fetch(long[: 16 * BLOCK]).is_done  # type: ignore[union-attr]
    assert rig.num_returned == 1  # the pool has it now
    rig.check()


def test_without_room_nothing_is_fetched_and_nothing_changes() -> None:
    rig = Rig()
    text = tokens_of(1, 6)
    rig.compute(text)
    rig.work()
    rig.compute(tokens_of(2, 8))
    owner = sequence_owner(("runs", 1))
    rig.blocks.allocate(owner, 3)
    before = rig.blocks.ledger()
    assert rig.tier.fetch(rig.hashes(text)) is None
    assert rig.blocks.ledger() == before
    rig.blocks.release(owner)
    assert rig.fetch(text) is not None
    assert rig.compute(text) == 6
    rig.check()


def test_two_prompts_share_a_fetch() -> None:
    rig = Rig()
    text = tokens_of(1, 6)
    rig.compute(text)
    rig.work()
    rig.compute(tokens_of(2, 8))
    first, second = rig.tier.fetch(rig.hashes(text)), rig.tier.fetch(rig.hashes(text[: 4 * BLOCK]))
    assert first is second is not None
    rig.work()
    assert (first.is_done, rig.told["returned"]) == (True, 6)
    rig.check()


def test_copies_out_hold_no_block() -> None:
    """A full pool that is still being copied has room for a sequence as large as the pool."""
    rig = Rig()
    rig.compute(tokens_of(1, 8))
    assert rig.tier.num_queued == 8
    assert rig.blocks.num_allocatable == 8
    rig.compute(tokens_of(2, 8))
    assert rig.told == {"missed": 8}
    rig.work()
    assert rig.told == {"missed": 8, "kept": 8}
    rig.check()


def test_the_least_recently_used_leave_first_and_of_a_prefix_its_tail() -> None:
    rig = Rig(num_kept=12)
    first, second, third = (tokens_of(text, 6) for text in (1, 2, 3))
    for text in (first, second, third):  # each takes blocks of the one before
        rig.compute(text)
        rig.work()
    kept = [[one in rig.tier._kept.by_group[0] for one in rig.hashes(text)] for text in (first, second, third)]
    assert kept == [[False] * 6, [True] * 6, [True] * 6]
    rig.compute(tokens_of(4, 3))
    rig.work()
    kept = [[one in rig.tier._kept.by_group[0] for one in rig.hashes(text)] for text in (second, third)]
    assert kept == [[True] * 3 + [False] * 3, [True] * 6], "a block without those before it is of no use"
    rig.check()


def test_a_sender_reads_the_same_block_meanwhile() -> None:
    """A hand-off's read of a block and the tier's share one copy, and each ends its own."""
    rig = Rig(way="staged")
    owner, hashes = sequence_owner(("a", 1)), rig.hashes(tokens_of(1, 2))
    allocation = rig.blocks.allocate(owner, 2, hashes)
    assert allocation is not None
    ((block_id, _),) = allocation.block_tables
    rig.pool.blocks[block_id] = rig.content(0, hashes[0])
    read = rig.pool.open_read(block_id)
    rig.blocks.publish(owner, 0, hashes[0])
    rig.work()
    view = read.wait(_Reader(), 1.0)  # type: ignore[union-attr]
    assert view is not None
    assert bytes(view) == rig.content(0, hashes[0]).numpy().tobytes()
    rig.pool.close_read(block_id)
    rig.blocks.release(owner)
    assert rig.told == {"kept": 1}
    rig.check()


class _Reader:
    is_done = False
