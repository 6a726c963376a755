"""The blocks of the tier in the host's memory: which are there, where, and which leaves next.

The memory is cut into slots of one physical block each. A block is known by its layer group and its hash, and has the digests that
were made when it was copied out (:mod:`kvrelay.common.block_digests`). A slot is in one of three states::

    free ──open──▶ being filled ──keep──▶ kept, perhaps lent to readers ──drop──▶ free, once nobody reads it
                        └──abandon──▶ free

The least recently used block leaves for a new one, and one that the pool still has only if there are hardly others: it is used
there. Retention hints do not count here, because a request tells them when its blocks are copied already. Not thread-safe:
:class:`kvrelay.engine.kv.host.tier.HostTier` calls it under its lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

_MAX_SPARED = 64  # blocks that are looked at for one to leave; more are in the pool only if the tier is hardly larger


@dataclass(slots=True, eq=False)
class HostBlock:
    """One physical block's content in a slot."""

    group: int
    block_hash: bytes
    sources: frozenset[str]  # other workers whose work is in it
    slot: int
    memory: memoryview  # what the group uses of the slot
    digests: bytes = b""  # set when it is kept
    is_kept: bool = False
    is_in_pool: bool = True
    num_readers: int = 0


class HostBlocks:
    """The slots, and what they hold."""

    def __init__(self, memory: memoryview, slot_nbytes: int, group_nbytes: Sequence[int]) -> None:
        """``memory``: flat bytes. ``slot_nbytes``: of a physical block. ``group_nbytes``: what each group uses of it."""
        self.num_slots = memory.nbytes // slot_nbytes
        self.by_group: list[dict[bytes, HostBlock]] = [{} for _ in group_nbytes]  # kept blocks, by hash
        self._memory = memory
        self._slot_nbytes = slot_nbytes
        self._group_nbytes = list(group_nbytes)
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._kept: OrderedDict[HostBlock, None] = OrderedDict()  # the least recently used first

    def __len__(self) -> int:
        return len(self._kept)

    def open(self, group: int, block_hash: bytes, sources: frozenset[str]) -> HostBlock | None:
        """A slot to fill, if need be that of the least recently used block; None if all are being filled or read."""
        if not self._free:
            oldest = self._next_to_leave()
            if oldest is None:
                return None
            self.drop(oldest)
        slot = self._free.pop()
        start = slot * self._slot_nbytes
        memory = self._memory[start : start + self._group_nbytes[group]]
        return HostBlock(group, block_hash, sources, slot, memory)

    def keep(self, block: HostBlock, digests: bytes) -> None:
        """An open block is filled with what has these ``digests``; it may be lent from now on."""
        assert block.block_hash not in self.by_group[block.group], f"{block.block_hash.hex()} is kept twice"
        block.digests, block.is_kept = digests, True
        self.by_group[block.group][block.block_hash] = block
        self._kept[block] = None

    def abandon(self, block: HostBlock) -> None:
        """An open block will not be filled. Nobody may write to its memory any more."""
        self._free.append(block.slot)

    def touch(self, group: int, block_hash: bytes, *, is_in_pool: bool) -> None:
        """The block, if it is here, is the most recently used one. ``is_in_pool``: whether the pool has it, too."""
        if (block := self.by_group[group].get(block_hash)) is not None:
            self._kept.move_to_end(block)
            block.is_in_pool = is_in_pool

    def lend(self, group: int, block_hash: bytes) -> HostBlock | None:
        """A block to read until it is given back; None if it is not here."""
        block = self.by_group[group].get(block_hash)
        if block is not None:
            self._kept.move_to_end(block)
            block.num_readers += 1
        return block

    def give_back(self, block: HostBlock) -> None:
        """One reader of a lent block is done."""
        block.num_readers -= 1
        self._free_if_unused(block)

    def drop(self, block: HostBlock) -> None:
        """Forget a block. Its slot comes free once nobody reads it. No effect if it was dropped before."""
        if block.is_kept:
            block.is_kept = False
            del self.by_group[block.group][block.block_hash]
            del self._kept[block]
            self._free_if_unused(block)

    def drop_from(self, source: str) -> int:
        """Drop all blocks that ``source`` has worked on. Returns their number."""
        dropped = [block for block in self._kept if source in block.sources]
        for block in dropped:
            self.drop(block)
        return len(dropped)

    def clear(self) -> None:
        """Drop all blocks."""
        for block in list(self._kept):
            self.drop(block)

    def check_integrity(self) -> None:
        """Assert that every slot is in one state. While no block is being filled or lent."""
        kept = [block.slot for block in self._kept]
        assert sorted([*self._free, *kept]) == list(range(self.num_slots)), f"free {self._free}, kept {kept}"
        assert not any(block.num_readers for block in self._kept), "a block is lent"
        found = {id(block) for its in self.by_group for block in its.values()}
        assert found == {id(block) for block in self._kept}, "hashes and slots disagree"

    def _next_to_leave(self) -> HostBlock | None:
        spared: HostBlock | None = None
        for _ in range(min(_MAX_SPARED, len(self._kept))):
            oldest = next(iter(self._kept))
            if not (oldest.is_in_pool or oldest.num_readers):
                return oldest
            self._kept.move_to_end(oldest)
            if spared is None and oldest.num_readers == 0:
                spared = oldest
        return spared

    def _free_if_unused(self, block: HostBlock) -> None:
        if not block.is_kept and block.num_readers == 0:
            self._free.append(block.slot)
