"""The slots of the tier in the host's memory: which block leaves, and when its memory is used again."""

from __future__ import annotations

from kvrelay.engine.kv.host.blocks import HostBlock, HostBlocks

NOBODY = frozenset[str]()


def made(num_slots: int, num_kept: int) -> tuple[HostBlocks, list[HostBlock]]:
    """Slots, and blocks that the pool has lost, the least recently used first."""
    blocks, kept = HostBlocks(memoryview(bytearray(16 * num_slots)), 16, (16, 8)), list[HostBlock]()
    for number in range(num_kept):
        block = blocks.open(0, bytes([number]), NOBODY)
        assert block is not None
        blocks.keep(block, b"digests")
        block.is_in_pool = False
        kept.append(block)
    return blocks, kept


def test_a_smaller_group_uses_a_part_of_its_slot() -> None:
    blocks, _ = made(2, 0)
    sizes = [block.memory.nbytes for group in (0, 1) if (block := blocks.open(group, b"a", NOBODY)) is not None]
    assert sizes == [16, 8]
    assert blocks.open(0, b"b", NOBODY) is None


def test_a_block_that_is_read_does_not_leave() -> None:
    blocks, (first, second) = made(2, 2)
    assert blocks.lend(0, first.block_hash) is first
    blocks.touch(0, second.block_hash, is_in_pool=False)
    opened = blocks.open(0, b"new", NOBODY)
    assert opened is not None
    assert opened.slot == second.slot
    assert blocks.open(0, b"newer", NOBODY) is None
    blocks.give_back(first)
    blocks.abandon(opened)
    blocks.check_integrity()


def test_the_memory_of_a_dropped_block_is_free_once_its_readers_are_done() -> None:
    blocks, (first, *_) = made(2, 2)
    assert blocks.lend(0, first.block_hash) is blocks.lend(0, first.block_hash) is first
    blocks.drop(first)
    blocks.drop(first)
    assert blocks.lend(0, first.block_hash) is None
    blocks.give_back(first)
    assert first.slot not in blocks._free
    blocks.give_back(first)
    assert blocks._free == [first.slot]
    blocks.check_integrity()


def test_blocks_that_the_pool_has_leave_only_if_there_are_hardly_others() -> None:
    blocks, kept = made(100, 100)
    for block in kept[:50]:
        blocks.touch(0, block.block_hash, is_in_pool=True)
    left = []
    for number in range(60):
        block = blocks.open(1, bytes([number]), NOBODY)
        assert block is not None
        blocks.keep(block, b"")
        left.append(block.slot)
    assert left[:50] == [block.slot for block in kept[50:]]
    blocks.check_integrity()
