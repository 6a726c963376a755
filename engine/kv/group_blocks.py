"""The physical blocks of one group of layers (:mod:`kvrelay.common.kv_geometry`), and which logical block each is a part of.

A logical block has a part in every group, until all who hold it need that part no more. Owners drop leading blocks only, as those
fall out of a window. Not thread-safe: the block manager's lock is around it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

Holder = TypeVar("Holder")


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where all physical blocks of a group are. A block that sequences share counts once, as running."""

    num_blocks: int
    num_free: int
    num_cached: int
    num_leased: int
    num_running: int

    @property
    def balances(self) -> bool:
        """free + cached + leased + running == all blocks."""
        return self.num_free + self.num_cached + self.num_leased + self.num_running == self.num_blocks


class GroupBlocks(Generic[Holder]):
    """Free, or a part of a logical block."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = deque(range(num_blocks))
        self.part_of: dict[int, int] = {}  # by logical block
        self._num_dropped: dict[Holder, int] = {}  # of owners that need some no more

    def give(self, block_ids: Iterable[int]) -> None:
        """A part for each of these logical blocks, which have none. There must be as many free ones."""
        for block_id in block_ids:
            self.part_of[block_id] = self.free.popleft()

    def take_back(self, block_id: int) -> None:
        """Free the logical block's part, if it has one."""
        part = self.part_of.pop(block_id, None)
        if part is not None:
            self.free.append(part)

    def num_dropped(self, owner: Holder) -> int:
        """How many of the owner's leading blocks it needs no more."""
        return self._num_dropped.get(owner, 0)

    def drop(self, owner: Holder, num_blocks: int) -> None:
        """The owner needs so many of its leading blocks no more, or is there no more, if 0."""
        if num_blocks:
            self._num_dropped[owner] = num_blocks
        else:
            self._num_dropped.pop(owner, None)

    def is_needed(self, index: int, holders: Iterable[Holder]) -> bool:
        """Whether one of the block's holders, who all have it at ``index``, needs its part."""
        return any(self._num_dropped.get(holder, 0) <= index for holder in holders)

    def ledger(self, num_cached: int, num_leased: int) -> Ledger:
        """The rest of the parts is of sequences. Cached and leased blocks have all their parts."""
        num_running = len(self.part_of) - num_cached - num_leased
        return Ledger(self.num_blocks, len(self.free), num_cached, num_leased, num_running)

    def check_integrity(self, needed: set[int]) -> None:
        """Assert that exactly the ``needed`` logical blocks have a part, each its own, and that all others are free."""
        free, parts = set(self.free), set(self.part_of.values())
        assert len(free) == len(self.free), f"a block is free twice: {sorted(self.free)}"
        assert len(parts) == len(self.part_of), f"a block is a part twice: {sorted(self.part_of.values())}"
        assert not free & parts, f"free and a part: {sorted(free & parts)}"
        assert free | parts == set(range(self.num_blocks)), f"lost: {set(range(self.num_blocks)) - free - parts}"
        assert set(self.part_of) == needed, (
            f"{set(self.part_of) - needed} have parts for nobody, {needed - set(self.part_of)} none"
        )
