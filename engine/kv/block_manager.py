"""Who owns which KV block: allocation, reference counts, prefix cache, ledger.

A block is **logical**: some consecutive tokens of a sequence, and one hash. It has a physical block in each group of layers
(:mod:`kvrelay.common.kv_geometry`). All physical blocks have one size and lie in one pool, so a group takes what another leaves.
Where each of them is: :mod:`kvrelay.engine.kv.physical_blocks`.

A group with a **window** needs the last blocks of a sequence only. As a sequence moves on it ``slide``s: it gives back those that
no query will see, and gets further ones in their place. Others may find a prefix here if every full group has all of its
blocks, and every group with a window those that the next token sees.

An **owner** is a sequence or a lease, named by :class:`Owner`; a block may have several sequences as owners when they
share a prefix. A block becomes shareable when it is *published* under its chained hash, that is when its content is
computed or verified. An owner may also be *forked*: the new one shares its blocks, the last one maybe not full; who
writes to a shared block first makes it writable, and gets one of its own for a copy if others hold it (copy on write).

Released published blocks stay as prefix cache, and are reused by priority, within a priority least recently used first, the tail of
a prefix before its head.

Blocks keep their **provenance**: the prefill workers, and which start of each, whose work is in them. An owner has that of what was
shipped to it and of the cached blocks that it began with. What it publishes has its owner's, since K/V follow from all K/V in
front. So everything of a worker that computed wrongly can be dropped.

Thread-safe: the model thread allocates for sequences, the network thread for leases. Every call is short.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.common.clock import Clock
from kvrelay.common.kv_geometry import Window, first_block, num_physical_blocks, reach, window_size
from kvrelay.common.retention import Retention
from kvrelay.engine.kv.ledger import Ledger
from kvrelay.engine.kv.owned_tables import Opening, OwnedTables, Tables
from kvrelay.engine.kv.owners import Owner, OwnerKind
from kvrelay.engine.kv.physical_blocks import PhysicalBlocks
from kvrelay.engine.kv.prefix_cache import claims_of

_MAX_STEP_TOKENS = 2048  # of a sequence, if nothing is said: a large chunk of a prompt


@dataclass(frozen=True, slots=True)
class Allocation:
    """Blocks for one owner: the first ``num_cached`` hold published content, the others must be written."""

    block_tables: Tables
    num_cached: int


class BlockManager:
    """Allocates the pool's blocks. Holds numbers and hashes; the bytes are the pool's."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        clock: Clock,
        *,
        windows: Sequence[Window | None] = (None,),
        max_step_tokens: int = _MAX_STEP_TOKENS,
        max_retained_share: float = 0.5,
    ) -> None:
        """``num_blocks``: physical ones, for all groups together. ``windows``: of each group; None: it has none.

        ``max_step_tokens``: of a sequence that a step computes at most; groups with a window have room for them.
        ``max_retained_share``: of the blocks, that may be cached above the default priority at a time. ``clock``: by which a
        raised priority ends.
        """
        if (
            min(
                num_blocks,
                block_size,
                max_step_tokens,
                *(window_size(window) for window in windows if window is not None),
            )
            < 1
        ):
            raise ValueError(
                f"{num_blocks} blocks of {block_size}, windows {windows}, steps of {max_step_tokens}: each must be at least 1"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.windows = tuple(windows)
        self.set_aside = 0  # blocks that hand-offs leave to a sequence that waits for them; its scheduler's to say
        self._max_step_tokens = max_step_tokens
        self._lock = threading.RLock()
        self._clock = clock
        self._physical = PhysicalBlocks(num_blocks, len(windows), int(num_blocks * max_retained_share), clock)
        self._owned = OwnedTables(self._physical)
        self._distrusted: set[str] = set()

    @property
    def num_groups(self) -> int:
        """Groups of layers."""
        return len(self.windows)

    @property
    def has_windows(self) -> bool:
        """Whether any group needs the last blocks of a sequence only."""
        return self.windows != (None,) * self.num_groups

    @property
    def num_allocatable(self) -> int:
        """Physical blocks that could be allocated now: free or cached."""
        with self._lock:
            return self._physical.num_allocatable

    @property
    def num_next(self) -> int:
        """Allocatable blocks that whoever joins must leave: the next one of every owner, and of the one that joins.

        Without them the owners' next blocks would be taken from sequences that run. Whoever is alone may have all there are.
        """
        with self._lock:
            return (len(self._owned) + 1) * self.num_groups if self._owned else 0

    @property
    def num_promised(self) -> int:
        """Allocatable blocks that a hand-off must leave: also those set aside."""
        with self._lock:
            return self.set_aside + self.num_next

    def num_blocks_for(self, num_tokens: int) -> int:
        """Logical blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def num_physical_for(self, num_tokens: int, *, is_whole: bool = False) -> int:
        """Physical blocks that a sequence of ``num_tokens`` tokens takes at most, of which none are cached.

        ``is_whole``: see ``allocate``.
        """
        if is_whole:
            return self.num_groups * self.num_blocks_for(num_tokens)
        return num_physical_blocks(self.windows, num_tokens, self.block_size, self._max_step_tokens)

    def num_cached_prefix(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks are published here, as far as somebody can go on behind them."""
        with self._lock:
            return self._physical.num_cached_prefix(hashes, self.windows, self.block_size)

    def owned_blocks(self, owner: Owner, group: int = 0) -> list[int | None]:
        """The owner's physical blocks in order (a copy), None where it needs none; empty if it holds none."""
        with self._lock:
            return self._owned[owner].tables[group].by_index() if owner in self._owned else []

    def ledger(self, group: int | None = None) -> Ledger:
        """Counts of blocks by place: of the pool, or of those that a group has."""
        with self._lock:
            return self._physical.ledger(group)

    def owners(self) -> dict[Owner, int]:
        """Every owner with its number of logical blocks."""
        with self._lock:
            return {owner: held.num_blocks for owner, held in self._owned.items()}

    def free_blocks(self) -> list[int]:
        """Physical blocks that no group has."""
        with self._lock:
            return self._physical.free()

    def places(self, group: int = 0) -> dict[str, list[int]]:
        """Where a group's blocks are: ``cached``, or under their owners' names. A shared block is under several."""
        with self._lock:
            owned = {f"{one.kind.value} {one.key}": held.tables[group].needed for one, held in self._owned.items()}
            return {"cached": self._physical.cached(group), **owned}

    @property
    def max_retained(self) -> int:
        """Blocks that may be retained at a time."""
        return self._physical.cache.max_retained

    def retained(self) -> dict[int, int]:
        """Cached blocks that stay before others, with their priority; they count as cached, too."""
        with self._lock:
            return self._physical.cache.retained()

    def allocate(
        self,
        owner: Owner,
        num_blocks: int,
        hashes: Sequence[bytes] = (),
        *,
        spare: int = 0,
        num_computed_tokens: int = 0,
        is_whole: bool = False,
    ) -> Allocation | None:
        """Give ``owner`` blocks: published ones for the leading ``hashes`` found here, fresh ones for the rest.

        A group with a window gets those that tokens see from position ``num_computed_tokens`` on, or from the end of what was
        found; as many as the sequence needs at a time, or if ``is_whole`` all to the end. ``spare``: physical blocks that must be
        allocatable afterwards. Returns None, and changes nothing, if there is not enough room. Raises ValueError if the owner
        already holds blocks or more hashes than blocks are given.
        """
        with self._lock:
            self._require_none(owner)
            if len(hashes) > num_blocks:
                raise ValueError(f"{owner}: {len(hashes)} hashes for {num_blocks} blocks")
            num_cached = self.num_cached_prefix(hashes)
            num_computed_tokens = max(num_computed_tokens, num_cached * self.block_size)
            physical = self._physical
            found: list[Opening] = []
            for group, window in enumerate(self.windows):
                first = min(first_block(window, num_computed_tokens, self.block_size), num_blocks)
                shared = physical.published(group, hashes[first:num_cached])
                end = num_blocks if is_whole else self._end(window, first, num_blocks)
                found.append(Opening(first, shared, max(0, end - first - len(shared))))
            num_revived = sum(not physical.is_owned(block_id) for one in found for block_id in one.shared)
            if sum(one.num_fresh for one in found) > physical.num_allocatable - num_revived - spare:
                return None
            return Allocation(self._owned.open(owner, num_blocks, found), num_cached)

    def extend(self, owner: Owner, num_blocks: int) -> Tables | None:
        """Give ``owner`` fresh blocks, so that it has ``num_blocks`` to the end in every group.

        Returns just the new ones, or None if there is not enough room.
        """
        with self._lock:
            if owner not in self._owned:
                raise ValueError(f"{owner} holds no blocks to extend")
            held = self._owned[owner]
            missing = [max(0, num_blocks - len(table.block_ids)) for table in held.tables]
            if sum(missing) > self.num_allocatable:
                return None
            held.num_blocks = max(held.num_blocks, num_blocks)
            return [self._owned.grow(owner, group, count) for group, count in enumerate(missing)]

    def slide(self, owner: Owner, num_computed_tokens: int) -> Tables:
        """A sequence has so many tokens computed: give back what no later one sees, and get the further blocks that it will need.

        Returns the new ones of each group. Fewer than it needs, if others hold on to what it gave back; it may ask again.
        """
        with self._lock:
            held, fresh = self._owned[owner], []
            for group, (window, table) in enumerate(zip(self.windows, held.tables, strict=True)):
                self._owned.drop_front(owner, group, first_block(window, num_computed_tokens, self.block_size))
                num_wanted = self._end(window, table.first, held.num_blocks) if window is not None else 0
                num_missing = min(num_wanted - len(table.block_ids), self.num_allocatable)
                fresh.append(self._owned.grow(owner, group, max(0, num_missing)))
            return fresh

    def publish(self, owner: Owner, index: int, block_hash: bytes) -> None:
        """Say that the owner's block ``index`` is full and right, so that others may share it from now on.

        If another block is already published under the hash, that one stays the shared one. No effect if a
        distrusted source has worked on the owner's blocks.
        """
        with self._lock:
            held = self._owned[owner]
            if not held.sources.isdisjoint(self._distrusted):
                return
            for table in held.tables:
                if index >= table.first:
                    self._physical.publish(table.block_ids[index], block_hash, held.sources)

    def came_from(self, owner: Owner, source: str) -> None:
        """There is work of ``source`` in what is written to the owner's blocks; said before any of them is published."""
        with self._lock:
            held = self._owned[owner]
            held.sources |= {source}

    def distrust(self, source: str) -> tuple[int, frozenset[Owner]]:
        """Drop all published blocks that ``source`` has worked on, and publish none again.

        Returns how many there were, and who holds blocks that it has worked on: they keep them, until they are released.
        """
        with self._lock:
            self._distrusted.add(source)
            owners = frozenset(owner for owner, held in self._owned.items() if source in held.sources)
            return self._physical.drop_from(source), owners

    def hand_on(self, owner: Owner, new_owner: Owner) -> None:
        """All blocks of ``owner`` become ``new_owner``'s, as when a verified lease becomes a sequence."""
        with self._lock:
            self._require_none(new_owner)
            self._owned.hand_on(owner, new_owner)

    def fork(self, owner: Owner, new_owner: Owner, num_blocks: int) -> Tables:
        """``new_owner`` shares the leading ``num_blocks`` blocks of ``owner``, published or not; returns them.

        Needs no room. It shares what ``owner`` still has: who may go on from an earlier token than it must not let it slide. Raises
        ValueError if the new owner holds blocks already, or the old one has fewer; KeyError if it has none.
        """
        with self._lock:
            self._require_none(new_owner)
            return self._owned.fork(owner, new_owner, num_blocks)

    def make_writable(self, owner: Owner, index: int) -> list[int] | None:
        """See to it that nobody else relies on the owner's block ``index``, before it is written to.

        Returns the physical blocks, by group, that are at ``index`` now: the same ones, where the owner is their only holder and
        nobody can find them by their hash, or fresh ones instead, into which the caller copies their content. None, and nothing
        changes, if there is no room for that.
        """
        with self._lock:
            tables = self._owned[owner].tables
            assert all(table.first <= index for table in tables), (
                f"{owner} writes to its block {index}, which it gave back"
            )
            shared = [group for group, table in enumerate(tables) if self._physical.is_shared(table.block_ids[index])]
            if len(shared) > self.num_allocatable:
                return None
            for group in shared:
                self._owned.replace(owner, group, index)
            return [table.block_ids[index] for table in tables]

    def release(self, owner: Owner, retention: Retention | None = None) -> None:
        """Take all blocks from ``owner``; published ones stay as prefix cache. No effect if it holds none.

        ``retention``: what a sequence's request asks for them, or nothing. A lease asks for nothing.
        """
        with self._lock:
            now_s = 0.0 if retention is None else self._clock()
            claims = claims_of(retention, now_s) if owner.kind is OwnerKind.SEQUENCE else None
            for block_id in self._owned.close(owner):
                if claims is not None:
                    self._physical.claim(block_id, claims)
                self._physical.leave(block_id)

    def check_integrity(self) -> None:
        """Assert that every block is in exactly one place and that the books agree with each other."""
        with self._lock:
            self._owned.check_integrity()

    def _end(self, window: Window | None, first: int, num_blocks: int) -> int:
        """How far a group's table goes that needs block ``first`` and those behind it."""
        if window is None:
            return num_blocks
        return min(num_blocks, first + reach(window, self._max_step_tokens, self.block_size))

    def _require_none(self, owner: Owner) -> None:
        if owner in self._owned:
            raise ValueError(f"{owner} already holds {self._owned[owner].num_blocks} blocks")
