"""Allocation and ownership of KV blocks: reference counts, prefix cache, ledger.

A block is **logical**: some consecutive tokens of a sequence, with one hash. It has a physical block in each group of layers
(:mod:`kvrelay.common.kv_geometry`). All physical blocks have one size and are in one pool, so a group can use blocks that another
does not need. :mod:`kvrelay.engine.kv.physical_blocks` keeps the state of each.

A group with a **window** needs only the last blocks of a sequence. As a sequence advances it ``slide``s: it gives back the blocks
that no later query sees, and gets further ones instead. A prefix is found if every full group has all of its blocks, and every
group with a window has those that the next token sees.

A block that a sequence gives back does not come free while another one holds it. The sequence is **owed** its next block then. If
new owners took these blocks, sequences could wait for each other for good. A worker that preempts nobody keeps them
(``leaves_owed``).

An **owner** is a sequence or a lease, named by :class:`Owner`. Sequences that share a prefix share blocks, so a block may have
several owners. A block can be shared once it is *published* under its chained hash, when its content is computed or verified. An
owner may also be *forked*: the new owner shares its blocks, including a last one that is not full. An owner that writes to a shared
block first makes it writable, and gets a copy if others hold the block (copy on write).

Released published blocks stay as prefix cache. They are reused by priority. Within a priority the least recently used go first, and
the tail of a prefix before its head.

Blocks keep their **provenance**: the prefill workers (and which start of each) whose work is in them. An owner has the provenance
of what was shipped to it, and of the cached blocks that it began with. Blocks that it publishes inherit it, because K/V depend on
all K/V before them. So all work of a worker that computed wrongly can be dropped.

A **tier** below the pool may have copies of published blocks (:mod:`kvrelay.engine.kv.lower_tier`). It hears what is published, and
brings blocks back as an owner of its own.

Thread-safe: the model thread allocates for sequences, the network thread for leases; a tier's thread publishes. Every call is
short.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from kvrelay.common.clock import Clock
from kvrelay.common.kv_geometry import Window, first_block, num_physical_blocks, window_size
from kvrelay.common.retention import Retention
from kvrelay.engine.kv.ledger import Ledger
from kvrelay.engine.kv.lower_tier import LowerTier
from kvrelay.engine.kv.openings import Opening, Openings
from kvrelay.engine.kv.owned_tables import OwnedTables, Tables
from kvrelay.engine.kv.owners import Owner, OwnerKind
from kvrelay.engine.kv.physical_blocks import PhysicalBlocks
from kvrelay.engine.kv.prefix_cache import claims_of

_MAX_STEP_TOKENS = 2048  # default: a large chunk of a prompt


@dataclass(frozen=True, slots=True)
class Allocation:
    """Blocks for one owner: the first ``num_cached`` hold published content, the others must be written."""

    block_tables: Tables
    num_cached: int


@dataclass(frozen=True, slots=True)
class Missing:
    """A physical block that its owner must fill with published content."""

    group: int
    block_hash: bytes
    block_id: int


class BlockManager:
    """Allocates the pool's blocks. It has numbers and hashes; the pool has the bytes."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        clock: Clock,
        *,
        windows: Sequence[Window | None] = (None,),
        max_step_tokens: int = _MAX_STEP_TOKENS,
        max_retained_share: float = 0.5,
        has_states: bool = False,
    ) -> None:
        """``num_blocks``: physical blocks of all groups together. ``windows``: per group; None: no window.

        ``max_step_tokens``: most tokens of a sequence that a step computes; groups with a window keep room for them.
        ``max_retained_share``: the share of blocks that may be cached above the default priority at a time. ``clock``: times the
        end of raised priorities. ``has_states``: see the attribute.
        """
        sizes = (window_size(window) for window in windows if window is not None)
        if min(num_blocks, block_size, max_step_tokens, *sizes) < 1:
            raise ValueError(
                f"{num_blocks} blocks of {block_size}, windows {windows}, steps of {max_step_tokens}: each must be at least 1"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.windows = tuple(windows)
        self.set_aside = 0  # blocks that hand-offs must leave for a waiting sequence; its scheduler sets this
        self.leaves_owed = False  # whether new owners leave what is owed; a scheduler that preempts nobody sets this
        self.has_states = has_states  # whether blocks hold states: a token that is computed again needs a block's start
        self.tier: LowerTier | None = None  # keeps copies of published blocks; see ``attach``
        self._max_step_tokens = max_step_tokens
        self._lock = threading.RLock()
        self._clock = clock
        self._physical = PhysicalBlocks(num_blocks, len(windows), int(num_blocks * max_retained_share), clock)
        self._owned = OwnedTables(self._physical)
        self._openings = Openings(self._physical, self.windows, block_size, max_step_tokens)

    @property
    def num_groups(self) -> int:
        """The number of layer groups."""
        return len(self.windows)

    @property
    def has_windows(self) -> bool:
        """Whether some group needs only the last blocks of a sequence."""
        return self.windows != (None,) * self.num_groups

    @property
    def num_allocatable(self) -> int:
        """Physical blocks that could be allocated now: free or cached ones."""
        with self._lock:
            return self._physical.num_allocatable

    @property
    def num_next(self) -> int:
        """Allocatable blocks that a new owner must leave: the next block of every owner, including the new one.

        Without this reserve, the owners' next blocks would be taken from running sequences. A sole owner may use all blocks.
        """
        with self._lock:
            return (len(self._owned) + 1) * self.num_groups if self._owned else 0

    @property
    def num_promised(self) -> int:
        """Allocatable blocks that a hand-off must leave, including those set aside."""
        with self._lock:
            return self.set_aside + self.num_next

    def num_blocks_for(self, num_tokens: int) -> int:
        """Logical blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def num_physical_for(self, num_tokens: int, *, is_whole: bool = False) -> int:
        """The most physical blocks that a sequence of ``num_tokens`` takes if none are cached.

        ``is_whole``: see ``allocate``.
        """
        if is_whole:
            return self.num_groups * self.num_blocks_for(num_tokens)
        return num_physical_blocks(self.windows, num_tokens, self.block_size, self._max_step_tokens)

    def attach(self, tier: LowerTier) -> None:
        """Let a tier below the pool hear of all blocks that are published from now on. Call it before any is."""
        self.tier = self._physical.watcher = tier

    def num_cached_prefix(self, hashes: Sequence[bytes], elsewhere: Sequence[Container[bytes]] | None = None) -> int:
        """The number of leading blocks that are published here and after which a sequence can continue.

        ``elsewhere``: per group, hashes that count as if they were published here.
        """
        with self._lock:
            return self._physical.num_cached_prefix(hashes, self.windows, self.block_size, elsewhere)

    def owned_blocks(self, owner: Owner, group: int = 0) -> list[int | None]:
        """The owner's physical blocks in order (a copy), with None where it needs none. Empty if it holds none."""
        with self._lock:
            return self._owned[owner].tables[group].by_index() if owner in self._owned else []

    def ledger(self, group: int | None = None) -> Ledger:
        """Counts of blocks by state: for the pool, or for one group."""
        with self._lock:
            return self._physical.ledger(group)

    def owners(self) -> dict[Owner, int]:
        """The number of logical blocks of every owner."""
        with self._lock:
            return {owner: held.num_blocks for owner, held in self._owned.items()}

    def free_blocks(self) -> list[int]:
        """Physical blocks that are in no group."""
        with self._lock:
            return self._physical.free()

    def places(self, group: int) -> dict[str, list[int]]:
        """A group's blocks: under ``cached``, or under their owners' names. A shared block appears several times."""
        with self._lock:
            owned = {f"{one.kind.value} {one.key}": held.tables[group].needed for one, held in self._owned.items()}
            return {"cached": self._physical.cached(group), **owned}

    @property
    def max_retained(self) -> int:
        """The most blocks that may be retained at a time."""
        return self._physical.cache.max_retained

    def retained(self) -> dict[int, int]:
        """Cached blocks above the default priority, with their priority. They also count as cached."""
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

        A group with a window gets the blocks that tokens see from position ``num_computed_tokens`` on, or from the end of the found
        prefix. It gets as many as the sequence needs at a time or, if ``is_whole``, all to the end. ``spare``: physical blocks that
        must be allocatable afterwards, beside those owed if it ``leaves_owed``. Returns None and changes nothing if there is not
        enough room. Raises ValueError if the owner already holds blocks, or if there are more hashes than blocks.
        """
        with self._lock:
            self._require_none(owner)
            if len(hashes) > num_blocks:
                raise ValueError(f"{owner}: {len(hashes)} hashes for {num_blocks} blocks")
            num_cached = self.num_cached_prefix(hashes)
            start = max(num_computed_tokens, num_cached * self.block_size)
            found = self._openings.of_sequence(num_blocks, hashes[:num_cached], start, is_whole=is_whole)
            if not self._has_room(num_blocks, found, spare):
                return None
            return Allocation(self._owned.open(owner, num_blocks, found), num_cached)

    def begin_return(self, owner: Owner, hashes: Sequence[bytes]) -> list[Missing] | None:
        """Give ``owner`` what a sequence needs to go on behind the blocks with these ``hashes``: published blocks, and fresh ones.

        Returns the fresh ones. The caller fills what it can, and calls ``end_return`` in any case. Returns None and changes nothing
        if there is not enough room. Raises ValueError if the owner already holds blocks.
        """
        with self._lock:
            self._require_none(owner)
            found = self._openings.of_return(hashes)
            if not self._has_room(len(hashes), found, 0):
                return None
            tables = self._owned.open(owner, len(hashes), found)
            return [
                Missing(group, hashes[index], tables[group][index])
                for group, opening in enumerate(found)
                for index, block_id in enumerate(opening.found, opening.first)
                if block_id is None
            ]

    def end_return(self, owner: Owner, arrived: Iterable[tuple[Missing, frozenset[str]]]) -> None:
        """Publish the blocks of a ``begin_return`` whose content is there, and release all of the owner's.

        ``arrived``: also with the other workers whose work is in it; what a distrusted one has worked on is not published.
        """
        with self._lock:
            for one, sources in arrived:
                self._physical.publish(one.block_id, one.block_hash, sources)
            self.release(owner)

    def _has_room(self, num_blocks: int, found: list[Opening], spare: int) -> bool:
        """Whether a new owner of ``num_blocks`` may take these blocks; see ``allocate``."""
        physical = self._physical
        num_revived = sum(not physical.is_owned(block_id) for one in found for block_id in one.shared)
        num_left = physical.num_allocatable - num_revived - sum(one.num_fresh for one in found)
        return num_left >= spare + (self._owned.num_owed(num_blocks, found) if self.leaves_owed else 0)

    def extend(self, owner: Owner, num_blocks: int) -> Tables | None:
        """Give ``owner`` fresh blocks, so that it has ``num_blocks`` in every group.

        Returns only the new ones, or None if there is not enough room.
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
        """A sequence has computed ``num_computed_tokens``: give back blocks that no later token sees, and get the next ones that it
        needs.

        Returns the new ones of each group. Unless it ``leaves_owed``, they may be fewer than needed if other owners still hold the
        given blocks; then call again.
        """
        with self._lock:
            held, fresh = self._owned[owner], []
            for group, (window, table) in enumerate(zip(self.windows, held.tables, strict=True)):
                self._owned.drop_front(owner, group, first_block(window, num_computed_tokens, self.block_size))
                num_wanted = self._openings.end(window, table.first, held.num_blocks) if window is not None else 0
                num_missing = min(num_wanted - len(table.block_ids), self.num_allocatable)
                fresh.append(self._owned.grow(owner, group, max(0, num_missing)))
            return fresh

    def publish(self, owner: Owner, index: int, block_hash: bytes) -> None:
        """Declare the owner's block ``index`` full and correct, so that others may share it.

        If another block is already published under the hash, that one stays the shared one. No effect if a distrusted source has
        worked on the owner's blocks.
        """
        with self._lock:
            held = self._owned[owner]
            for table in held.tables:
                if index >= table.first:
                    self._physical.publish(table.block_ids[index], block_hash, held.sources)

    def came_from(self, owner: Owner, source: str) -> None:
        """Record that the owner's blocks contain work of ``source``. Call it before any of them is published."""
        with self._lock:
            held = self._owned[owner]
            held.sources |= {source}

    def distrust(self, source: str) -> tuple[int, frozenset[Owner]]:
        """Drop all published blocks that ``source`` has worked on, and never publish such blocks again.

        Returns their number, and the owners of such blocks. The owners keep them until they are released.
        """
        with self._lock:
            owners = frozenset(owner for owner, held in self._owned.items() if source in held.sources)
            num_dropped = self._physical.distrust(source)
            if self.tier is not None:  # only now: no copy of these blocks is under way any more
                self.tier.on_distrusted(source)
            return num_dropped, owners

    def hand_on(self, owner: Owner, new_owner: Owner) -> None:
        """All blocks of ``owner`` become ``new_owner``'s, as when a verified lease becomes a sequence."""
        with self._lock:
            self._require_none(new_owner)
            self._owned.hand_on(owner, new_owner)

    def fork(self, owner: Owner, new_owner: Owner, num_blocks: int) -> Tables:
        """``new_owner`` shares the leading ``num_blocks`` blocks of ``owner``, published or not. Returns them.

        Needs no room. It shares only what ``owner`` still has, so ``owner`` must not slide past the token where the new one
        continues. Raises ValueError if the new owner holds blocks already, or the old one has fewer; KeyError if the old one has
        none.
        """
        with self._lock:
            self._require_none(new_owner)
            return self._owned.fork(owner, new_owner, num_blocks)

    def make_writable(self, owner: Owner, index: int) -> list[int] | None:
        """Ensure that no other owner relies on the owner's block ``index``, before it is written to.

        Returns the physical blocks now at ``index``, by group. They are the same if the owner is their only holder and their hash
        is not published. Otherwise they are fresh, and the caller copies the content. Returns None and changes nothing if there is
        no room.
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

        ``retention``: how long a sequence's request wants them cached. A lease passes none.
        """
        with self._lock:
            now_s = 0.0 if retention is None else self._clock()
            claims = claims_of(retention, now_s) if owner.kind is OwnerKind.SEQUENCE else None
            for block_id in self._owned.close(owner):
                if claims is not None:
                    self._physical.claim(block_id, claims)
                self._physical.leave(block_id)

    def check_integrity(self) -> None:
        """Assert that every block is in exactly one state and that all records agree."""
        with self._lock:
            self._owned.check_integrity()

    def _require_none(self, owner: Owner) -> None:
        if owner in self._owned:
            raise ValueError(f"{owner} already holds {self._owned[owner].num_blocks} blocks")
