"""Which blocks of which owner stand at which index: a table for each group of layers.

Not thread-safe: the block manager calls it under its lock, and decides who gets room.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvrelay.engine.kv.owners import Owner
from kvrelay.engine.kv.physical_blocks import PhysicalBlocks

Tables = list[list[int]]
"""Of each group a sequence's physical blocks in order. In front of those that a group needs there is any number."""


@dataclass(slots=True)
class Table:
    """One owner's physical blocks of one group."""

    first: int  # the first that it needs: those before are not its
    block_ids: list[int]  # by index; before ``first`` any number

    @property
    def needed(self) -> list[int]:
        """Those that it holds."""
        return self.block_ids[self.first :]

    def by_index(self) -> list[int | None]:
        """Those that it holds, None in front of them."""
        return [None] * min(self.first, len(self.block_ids)) + self.needed


@dataclass(slots=True)
class Held:
    """What an owner has."""

    num_blocks: int  # logical ones that it asked for; a group with a window may not have come so far yet
    tables: list[Table]  # by group
    sources: frozenset[str] = frozenset()  # whose work is in its blocks, beside this worker's

    def copies(self) -> Tables:
        """For somebody who may change them."""
        return [list(table.block_ids) for table in self.tables]


@dataclass(frozen=True, slots=True)
class Opening:
    """What a new owner gets in one group."""

    first: int  # the first block that it needs
    shared: list[int]  # published ones, from there on
    num_fresh: int  # behind them


class OwnedTables:
    """All owners' tables. A missing owner is a KeyError."""

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
        """All owners, in the order in which they came."""
        return list(self._held.items())

    def open(self, owner: Owner, num_blocks: int, found: list[Opening]) -> Tables:
        """``owner`` gets what was found in each group. First all that is shared: what is taken may evict it."""
        for one in found:
            for block_id in one.shared:
                self._physical.hold(owner, block_id)
        tables = [
            Table(one.first, [0] * one.first + one.shared + self._physical.take(owner, group, one.num_fresh))
            for group, one in enumerate(found)
        ]
        sources = self._physical.sources(block_id for one in found for block_id in one.shared)
        held = self._held[owner] = Held(num_blocks, tables, sources)
        return held.copies()

    def grow(self, owner: Owner, group: int, num_blocks: int) -> list[int]:
        """So many fresh blocks behind those that it has; returns them."""
        fresh = self._physical.take(owner, group, num_blocks)
        self._held[owner].tables[group].block_ids += fresh
        return fresh

    def drop_front(self, owner: Owner, group: int, first: int) -> None:
        """It needs no block before ``first`` any more."""
        table = self._held[owner].tables[group]
        for block_id in table.block_ids[table.first : first]:
            self._physical.let_go(owner, block_id)
            self._physical.leave(block_id)
        table.first = max(table.first, first)

    def hand_on(self, owner: Owner, new_owner: Owner) -> None:
        """All that ``owner`` holds is ``new_owner``'s, who holds nothing yet."""
        held = self._held.pop(owner)
        for table in held.tables:
            for block_id in table.needed:
                self._physical.hold(new_owner, block_id)
                self._physical.let_go(owner, block_id)
        self._held[new_owner] = held

    def fork(self, owner: Owner, new_owner: Owner, num_blocks: int) -> Tables:
        """``new_owner``, who holds nothing yet, holds ``owner``'s leading blocks, too. Raises ValueError if these are fewer."""
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
        """A fresh block in the place of one."""
        block_ids = self._held[owner].tables[group].block_ids
        block_id = block_ids[index]
        (block_ids[index],) = self._physical.take(owner, group, 1)
        self._physical.let_go(owner, block_id)
        self._physical.leave(block_id)

    def close(self, owner: Owner) -> Iterator[int]:
        """Its blocks, each of them let go of before it comes and to ``leave`` before the next; none if it holds none.

        Tail first: the cache then evicts the tail of a prefix before the head, which longer prefixes share.
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
