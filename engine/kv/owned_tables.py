"""The block tables of all owners, one for each layer group.

Not thread-safe: the block manager calls it under its lock, and decides who gets room.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvrelay.engine.kv.openings import Opening
from kvrelay.engine.kv.owners import Owner
from kvrelay.engine.kv.physical_blocks import PhysicalBlocks

Tables = list[list[int]]
"""Per group: a sequence's physical blocks in order. Entries before the blocks that a group needs are arbitrary."""


@dataclass(slots=True)
class Table:
    """One owner's physical blocks in one group."""

    first: int  # index of the first block that it needs; earlier ones are not its own
    block_ids: list[int]  # by index; arbitrary before ``first``

    @property
    def needed(self) -> list[int]:
        """The blocks that it holds."""
        return self.block_ids[self.first :]

    def by_index(self) -> list[int | None]:
        """The blocks that it holds, with None before them."""
        return [None] * min(self.first, len(self.block_ids)) + self.needed


@dataclass(slots=True)
class Held:
    """What an owner holds."""

    num_blocks: int  # logical blocks that it asked for; a group with a window may have fewer so far
    tables: list[Table]  # by group
    sources: frozenset[str] = frozenset()  # other workers whose work is in its blocks

    def copies(self) -> Tables:
        """The tables, copied."""
        return [list(table.block_ids) for table in self.tables]


class OwnedTables:
    """The tables of all owners. A missing owner raises KeyError."""

    def __init__(self, physical: PhysicalBlocks) -> None:
        self._physical = physical
        self._held: dict[Owner, Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, owner: Owner) -> bool:
        return owner in self._held

    def __getitem__(self, owner: Owner) -> Held:
        return self._held[owner]

    def items(self) -> list[tuple[Owner, Held]]:
        """All owners, in the order of arrival."""
        return list(self._held.items())

    def num_owed(self, num_blocks: int, found: list[Opening]) -> int:
        """The most blocks that owners still take without giving any back, once a new one of ``num_blocks`` has ``found``.

        An owner that slides past a block takes its next one, even if another owner keeps the first. So a group is owed at most one
        for each further holder of a block, and at most the blocks that its owners do not have yet.
        """
        num_owed = 0
        for group, new in enumerate(found):
            num_shared = sum(map(self._physical.is_owned, new.shared)) - self._physical.num_owned(group)
            num_missing = num_blocks - new.first - len(new.found)
            for held in self._held.values():
                table = held.tables[group]
                num_shared += len(table.block_ids) - table.first
                num_missing += held.num_blocks - len(table.block_ids)
            num_owed += min(num_shared, num_missing)
        return num_owed

    def open(self, owner: Owner, num_blocks: int, found: list[Opening]) -> Tables:
        """Give ``owner`` the blocks of each group's opening. Shared blocks come first, because taking fresh ones may evict them."""
        shared = [block_id for one in found for block_id in one.shared]
        for block_id in shared:
            self._physical.hold(owner, block_id)
        tables = []
        for group, one in enumerate(found):
            fresh = iter(self._physical.take(owner, group, one.num_fresh))
            block_ids = [next(fresh) if block_id is None else block_id for block_id in one.found]
            tables.append(Table(one.first, [0] * one.first + block_ids))
        sources = self._physical.sources(shared)
        held = self._held[owner] = Held(num_blocks, tables, sources)
        return held.copies()

    def grow(self, owner: Owner, group: int, num_blocks: int) -> list[int]:
        """Add ``num_blocks`` fresh blocks after the owner's last one; returns them."""
        fresh = self._physical.take(owner, group, num_blocks)
        self._held[owner].tables[group].block_ids += fresh
        return fresh

    def drop_front(self, owner: Owner, group: int, first: int) -> None:
        """Release the owner's blocks before ``first``."""
        table = self._held[owner].tables[group]
        for block_id in table.block_ids[table.first : first]:
            self._physical.let_go(owner, block_id)
            self._physical.leave(block_id)
        table.first = max(table.first, first)

    def hand_on(self, owner: Owner, new_owner: Owner) -> None:
        """Give all that ``owner`` holds to ``new_owner``, which holds nothing yet."""
        held = self._held.pop(owner)
        for table in held.tables:
            for block_id in table.needed:
                self._physical.hold(new_owner, block_id)
                self._physical.let_go(owner, block_id)
        self._held[new_owner] = held

    def fork(self, owner: Owner, new_owner: Owner, num_blocks: int) -> Tables:
        """``new_owner``, which holds nothing yet, also holds ``owner``'s leading blocks. Raises ValueError if there are fewer."""
        held = self._held[owner]
        if any(len(table.block_ids) < num_blocks for table in held.tables):
            raise ValueError(f"{owner} holds {held.num_blocks} blocks, not {num_blocks}")
        tables = [Table(min(one.first, num_blocks), one.block_ids[:num_blocks]) for one in held.tables]
        for table in tables:
            for block_id in table.needed:
                self._physical.hold(new_owner, block_id)
        forked = self._held[new_owner] = Held(num_blocks, tables, held.sources)
        return forked.copies()

    def replace(self, owner: Owner, group: int, index: int) -> None:
        """Replace one block by a fresh one."""
        block_ids = self._held[owner].tables[group].block_ids
        block_id = block_ids[index]
        (block_ids[index],) = self._physical.take(owner, group, 1)
        self._physical.let_go(owner, block_id)
        self._physical.leave(block_id)

    def close(self, owner: Owner) -> Iterator[int]:
        """Yield the owner's blocks; none if it holds none. The owner lets go of each
        before it is yielded; the caller lets it ``leave`` before the next one.

        The tail comes first. So the cache evicts the tail of a prefix before the head, which longer prefixes share.
        """
        held = self._held.pop(owner, None)
        if held is None:
            return
        for index in range(held.num_blocks - 1, -1, -1):
            for table in held.tables:
                if table.first <= index < len(table.block_ids):
                    self._physical.let_go(owner, table.block_ids[index])
                    yield table.block_ids[index]

    def check_integrity(self) -> None:
        """Assert that tables and physical blocks agree."""
        for owner, held in self._held.items():
            longest = max(len(table.block_ids) for table in held.tables)
            assert longest <= held.num_blocks, f"{owner} holds more than its {held.num_blocks} blocks"
        self._physical.check_integrity(
            (owner, group, table.needed)
            for owner, held in self._held.items()
            for group, table in enumerate(held.tables)
        )
