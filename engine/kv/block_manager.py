"""Who owns which KV block: allocation, reference counts, prefix cache, ledger.

A block is **logical**: some consecutive tokens of a sequence, one hash, one entry of the prefix cache. It has a physical block, its
*part*, in each group of layers (:mod:`kvrelay.engine.kv.group_blocks`); block tables and the ledger are per group. Every part is in
exactly one of three places::

    free ──allocate──▶ owned (ref_count ≥ 1) ──release──▶ cached (published, ref_count 0) ──evict──▶ owned
      ▲                  │                 └──release (unpublished)──▶ free
      └────drop──────────┘ (of one group, when nobody needs it)

A block without all its parts can be found by nobody else, and is not cached.

An **owner** is a sequence or a lease, named by :class:`Owner`; a block may have several sequences as owners when they
share a prefix. A block becomes shareable when it is *published* under its chained hash, that is when its content is
computed or verified. An owner may also be *forked*: the new one shares its blocks, the last one maybe not full; who
writes to a shared block first makes it writable, and gets one of its own for a copy if others hold it (copy on write).

Released published blocks stay as prefix cache (:mod:`kvrelay.engine.kv.prefix_cache`) and are reused by priority, within a priority
least recently used first, the tail of a prefix before its head.

Thread-safe: the model thread allocates for sequences, the network thread for leases. Every call is short.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvrelay.common.clock import Clock
from kvrelay.common.retention import Retention
from kvrelay.engine.kv.group_blocks import GroupBlocks, Ledger
from kvrelay.engine.kv.prefix_cache import Claim, PrefixCache, claims_of, merged


class OwnerKind(enum.StrEnum):
    """What holds a block."""

    SEQUENCE = "sequence"
    LEASE = "lease"


class Owner(NamedTuple):
    """A holder of blocks; ``key`` is unique within its kind while it holds any. A tuple: every block's books hash it."""

    kind: OwnerKind
    key: str


def sequence_owner(key: tuple[str, int], beam: int = 0) -> Owner:
    """The owner of a sequence's blocks, by its (request_id, attempt) and its number among the beams of one search."""
    return Owner(OwnerKind.SEQUENCE, f"{key[0]}/{key[1]}#{beam}" if beam else f"{key[0]}/{key[1]}")


@dataclass(frozen=True, slots=True)
class Allocation:
    """Blocks for one owner: the first ``num_cached`` hold published content, the others must be written."""

    block_ids: list[int]  # the first group's
    num_cached: int


class BlockManager:
    """Allocates the pool's blocks. Holds numbers and hashes; the bytes are the pool's.

    Numbers that it takes or gives are those of physical blocks, of the first group where no group is named.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        clock: Clock,
        *,
        further_groups: Sequence[int] = (),
        max_retained_share: float = 0.5,
    ) -> None:
        """``num_blocks``: physical blocks of the first group; ``further_groups``: of each other one.

        ``max_retained_share``: of the blocks, that may be cached above the default priority at a time. ``clock``: by which a
        raised priority ends.
        """
        if min(num_blocks, block_size, *further_groups) < 1:
            raise ValueError(f"blocks {num_blocks, *further_groups} and block_size {block_size} must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.set_aside = 0  # blocks that hand-offs leave to a sequence that waits for them; its scheduler's to say
        self._lock = threading.RLock()
        self._groups = [GroupBlocks[Owner](count) for count in (num_blocks, *further_groups)]
        self._clock = clock
        self._cached = PrefixCache(int(num_blocks * max_retained_share), clock)  # ref_count 0, published
        # From here on all numbers are those of logical blocks, which are used again.
        self._unused = list(range(num_blocks))
        self._claims: list[tuple[Claim, ...] | None] = [None] * num_blocks  # of owned blocks: how long they shall stay
        self._owned: dict[Owner, list[int]] = {}
        self._holders: list[set[Owner]] = [set() for _ in range(num_blocks)]
        self._hash_of: dict[int, bytes] = {}  # published blocks
        self._block_of: dict[bytes, int] = {}
        self._num_leases = [0] * num_blocks  # by block: how many of its holders are leases
        self._num_leased = 0  # blocks with at least one lease as holder
        self._incomplete: set[int] = set()  # owned blocks without all their parts

    # -- queries ---------------------------------------------------------------------------------------------------

    @property
    def num_allocatable(self) -> int:
        """Blocks that could be allocated now: as many as every group has free and cached."""
        with self._lock:
            return min([len(group.free) for group in self._groups]) + len(self._cached)

    @property
    def num_next(self) -> int:
        """Allocatable blocks that whoever joins must leave: the next one of every owner, and of the one that joins.

        Without them the owners' next blocks would be taken from sequences that run. Whoever is alone may have all there are.
        """
        with self._lock:
            return len(self._owned) + 1 if self._owned else 0

    @property
    def num_promised(self) -> int:
        """Allocatable blocks that a hand-off must leave: also those set aside."""
        with self._lock:
            return self.set_aside + self.num_next

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def num_cached_prefix(self, hashes: Sequence[bytes]) -> int:
        """How many leading hashes are published here."""
        with self._lock:
            for index, block_hash in enumerate(hashes):
                if block_hash not in self._block_of:
                    return index
            return len(hashes)

    @property
    def num_groups(self) -> int:
        """Groups of layers."""
        return len(self._groups)

    def owned_blocks(self, owner: Owner, group: int = 0) -> list[int | None]:
        """The owner's blocks in order (a copy), None where it dropped one; empty if it holds none."""
        with self._lock:
            its, block_ids = self._groups[group], self._owned.get(owner, ())
            num_dropped = min(its.num_dropped(owner), len(block_ids))
            return [None] * num_dropped + self._parts(block_ids[num_dropped:], group)

    def ledger(self, group: int = 0) -> Ledger:
        """Counts of a group's blocks by place."""
        with self._lock:
            return self._groups[group].ledger(len(self._cached), self._num_leased)

    def owners(self) -> dict[Owner, int]:
        """Every owner with its number of blocks."""
        with self._lock:
            return {owner: len(blocks) for owner, blocks in self._owned.items()}

    def places(self, group: int = 0) -> dict[str, list[int]]:
        """Where a group's blocks are: ``free``, ``cached``, or under their owners' names. A shared block is under several."""
        with self._lock:
            its = self._groups[group]
            owned = {
                f"{owner.kind.value} {owner.key}": self._parts(block_ids[its.num_dropped(owner) :], group)
                for owner, block_ids in self._owned.items()
            }
            return {"free": list(its.free), "cached": self._parts(self._cached.blocks(), group), **owned}

    @property
    def max_retained(self) -> int:
        """Blocks that may be retained at a time."""
        return self._cached.max_retained

    def retained(self) -> dict[int, int]:
        """Cached blocks that stay before others, with their priority; they count as cached, too."""
        with self._lock:
            retained = self._cached.retained()
            return dict(zip(self._parts(retained), retained.values(), strict=True))

    # -- changes ---------------------------------------------------------------------------------------------------

    def allocate(
        self, owner: Owner, num_blocks: int, hashes: Sequence[bytes] = (), *, spare: int = 0
    ) -> Allocation | None:
        """Give ``owner`` blocks: published ones for the leading ``hashes`` found here, fresh ones for the rest.

        ``spare``: blocks that must be allocatable afterwards. Returns None, and changes nothing, if there is not enough
        room. Raises ValueError if the owner already holds blocks or more hashes than blocks are given.
        """
        with self._lock:
            if owner in self._owned:
                raise ValueError(f"{owner} already holds {len(self._owned[owner])} blocks")
            if len(hashes) > num_blocks:
                raise ValueError(f"{owner}: {len(hashes)} hashes for {num_blocks} blocks")
            num_cached = self.num_cached_prefix(hashes)
            shared = [self._block_of[block_hash] for block_hash in hashes[:num_cached]]
            num_fresh = num_blocks - num_cached
            num_revived = sum(1 for block_id in shared if not self._holders[block_id])
            if num_fresh > self.num_allocatable - num_revived - spare:
                return None
            for block_id in shared:
                self._hold(owner, block_id)
            block_ids = shared + self._take_fresh(owner, num_fresh)
            self._owned[owner] = block_ids
            return Allocation(block_ids=self._parts(block_ids), num_cached=num_cached)

    def extend(self, owner: Owner, num_blocks: int) -> list[int] | None:
        """Give ``owner`` more fresh blocks; returns just the new ones, or None if there is not enough room."""
        with self._lock:
            if owner not in self._owned:
                raise ValueError(f"{owner} holds no blocks to extend")
            if num_blocks > self.num_allocatable:
                return None
            fresh = self._take_fresh(owner, num_blocks)
            self._owned[owner].extend(fresh)
            return self._parts(fresh)

    def publish(self, owner: Owner, index: int, block_hash: bytes) -> None:
        """Say that the owner's block ``index`` is full and right, so that others may share it from now on.

        If another block is already published under the hash, that one stays the shared one.
        """
        with self._lock:
            block_id = self._owned[owner][index]
            known = self._hash_of.get(block_id)
            if known is not None:
                if known != block_hash:
                    raise ValueError(f"block {block_id} is published as {known.hex()}, not {block_hash.hex()}")
                return
            if block_hash not in self._block_of and block_id not in self._incomplete:
                self._hash_of[block_id] = block_hash
                self._block_of[block_hash] = block_id

    def hand_on(self, owner: Owner, new_owner: Owner) -> None:
        """All blocks of ``owner`` become ``new_owner``'s, as when a verified lease becomes a sequence."""
        with self._lock:
            if new_owner in self._owned:
                raise ValueError(f"{new_owner} already holds {len(self._owned[new_owner])} blocks")
            block_ids = self._owned.pop(owner)
            for group in self._groups:
                group.drop(new_owner, group.num_dropped(owner))
            for block_id in block_ids:
                self._hold(new_owner, block_id)
                self._let_go(owner, block_id)
            for group in self._groups:
                group.drop(owner, 0)
            self._owned[new_owner] = block_ids

    def drop(self, owner: Owner, group: int, num_blocks: int) -> None:
        """A sequence needs its leading ``num_blocks`` blocks no more in ``group``; those that nobody else needs are free at once.

        They stay its blocks: their other parts, and their numbers in its tables. Raises ValueError if it has fewer, or is a lease.
        """
        with self._lock:
            its, block_ids = self._groups[group], self._owned.get(owner, ())
            if owner.kind is not OwnerKind.SEQUENCE or num_blocks > len(block_ids):
                raise ValueError(f"{owner}, of {len(block_ids)} blocks, cannot drop {num_blocks}")
            before = its.num_dropped(owner)
            its.drop(owner, max(before, num_blocks))
            for index in range(before, num_blocks):
                self._free_unneeded(index, block_ids[index])

    def fork(self, owner: Owner, new_owner: Owner, num_blocks: int) -> list[int]:
        """``new_owner`` shares the leading ``num_blocks`` blocks of ``owner``, published or not; returns them.

        Needs no room. Raises ValueError if the new owner holds blocks already, or the old one has fewer; KeyError if it has none,
        or they lack a part in the first group.
        """
        with self._lock:
            if new_owner in self._owned:
                raise ValueError(f"{new_owner} already holds {len(self._owned[new_owner])} blocks")
            block_ids = self._owned[owner][:num_blocks]
            if len(block_ids) < num_blocks:
                raise ValueError(f"{owner} holds {len(block_ids)} blocks, not {num_blocks}")
            parts = self._parts(block_ids)
            for block_id in block_ids:
                self._hold(new_owner, block_id)
            for group in self._groups:
                group.drop(new_owner, min(group.num_dropped(owner), num_blocks))
            self._owned[new_owner] = block_ids
            return parts

    def make_writable(self, owner: Owner, index: int) -> int | None:
        """See to it that nobody else relies on the owner's block ``index``, before it is written to.

        Returns the block that is at ``index`` now: the same one, if the owner is its only holder and nobody can find it by
        its hash, or a fresh one instead, into which the caller copies its content. None, and nothing changes, if there is no
        room for that.
        """
        with self._lock:
            block_id = self._owned[owner][index]
            assert block_id not in self._incomplete, (
                f"{owner} writes to its block {index}, which was dropped in a group"
            )
            if len(self._holders[block_id]) == 1 and block_id not in self._hash_of:
                return self._parts([block_id])[0]
            if not self.num_allocatable:
                return None
            (fresh,) = self._take_fresh(owner, 1)
            self._let_go(owner, block_id)
            self._owned[owner][index] = fresh
            if self._holders[block_id]:
                self._free_unneeded(index, block_id)
            else:
                self._cached.add(block_id, self._claims[block_id])
            return self._parts([fresh])[0]

    def release(self, owner: Owner, retention: Retention | None = None) -> None:
        """Take all blocks from ``owner``; published ones stay as prefix cache. No effect if it holds none.

        ``retention``: what a sequence's request asks for them, or nothing. A lease asks for nothing.
        """
        with self._lock:
            claims = None
            if owner.kind is OwnerKind.SEQUENCE:
                claims = claims_of(retention, 0.0 if retention is None else self._clock())
            # Tail first: of one prefix, the cache then evicts the tail before the head that longer prefixes share.
            block_ids = self._owned.pop(owner, [])
            for index in range(len(block_ids) - 1, -1, -1):
                block_id = block_ids[index]
                self._let_go(owner, block_id)
                known = self._claims[block_id]
                if claims is not None and known is not claims:
                    self._claims[block_id] = claims if known is None else merged(known, claims)
                if self._holders[block_id]:
                    self._free_unneeded(index, block_id)
                elif block_id in self._hash_of:
                    self._cached.add(block_id, self._claims[block_id])
                else:
                    self._free(block_id)
            for group in self._groups:
                group.drop(owner, 0)

    def check_integrity(self) -> None:
        """Assert that every block is in exactly one place and that the books agree with each other."""
        with self._lock:
            self._cached.check_integrity()
            cached = set(self._cached.blocks())
            held = {block_id for block_id, holders in enumerate(self._holders) if holders}
            assert not held & cached, f"cached and owned: {sorted(held & cached)}"
            unused = set(self._unused)
            assert len(unused) == len(self._unused), f"a number is unused twice: {sorted(self._unused)}"
            assert unused == set(range(len(self._holders))) - held - cached, f"unused numbers: {sorted(unused)}"
            index_of: dict[int, int] = {}
            from_owners: dict[int, set[Owner]] = {}
            for owner, block_ids in self._owned.items():
                assert len(set(block_ids)) == len(block_ids), f"{owner} holds a block twice: {block_ids}"
                for index, block_id in enumerate(block_ids):
                    assert index_of.setdefault(block_id, index) == index, f"block {block_id} is at two places"
                    from_owners.setdefault(block_id, set()).add(owner)
            assert from_owners == {block_id: self._holders[block_id] for block_id in held}, "owners disagree"
            assert self._block_of == {h: b for b, h in self._hash_of.items()}, "published hashes disagree"
            assert cached <= set(self._hash_of), f"cached but unpublished: {cached - set(self._hash_of)}"
            assert set(self._hash_of) <= held | cached, f"unused but published: {unused & set(self._hash_of)}"
            leases = [sum(holder.kind is OwnerKind.LEASE for holder in holders) for holders in self._holders]
            assert self._num_leases == leases, "a block's count of leases is wrong"
            assert self._num_leased == sum(1 for count in leases if count), "leased count is wrong"
            for group in self._groups:
                needed = {block_id for block_id in held if group.is_needed(index_of[block_id], self._holders[block_id])}
                group.check_integrity(needed | cached)
            everywhere = set.intersection(*(set(group.part_of) for group in self._groups))
            assert self._incomplete == held - everywhere, (
                f"without all parts: {held - everywhere}, not {self._incomplete}"
            )
            assert not self._incomplete & set(self._hash_of), "published without all its parts"
            for number in range(self.num_groups):
                assert self.ledger(number).balances, f"the ledger does not balance: {self.ledger(number)}"

    # -- inside ----------------------------------------------------------------------------------------------------

    def _parts(self, block_ids: Iterable[int], group: int = 0) -> list[int]:
        """The physical blocks of logical ones. Raises KeyError if one has none in this group."""
        part_of = self._groups[group].part_of
        return [part_of[block_id] for block_id in block_ids]

    def _hold(self, owner: Owner, block_id: int) -> None:
        if not self._holders[block_id] and block_id in self._hash_of:
            self._claims[block_id] = self._cached.remove(block_id)
        self._holders[block_id].add(owner)
        if owner.kind is OwnerKind.LEASE:
            self._num_leases[block_id] += 1
            self._num_leased += self._num_leases[block_id] == 1

    def _let_go(self, owner: Owner, block_id: int) -> None:
        self._holders[block_id].remove(owner)
        if owner.kind is OwnerKind.LEASE:
            self._num_leases[block_id] -= 1
            self._num_leased -= self._num_leases[block_id] == 0

    def _take_fresh(self, owner: Owner, num_blocks: int) -> list[int]:
        for group in self._groups:
            while len(group.free) < num_blocks:
                self._free(self._cached.evict())
        while len(self._unused) < num_blocks:
            self._add_number()
        fresh = [self._unused.pop() for _ in range(num_blocks)]
        for group in self._groups:
            group.give(fresh)
        for block_id in fresh:
            self._hold(owner, block_id)
        return fresh

    def _add_number(self) -> None:
        """There are more blocks than the first group has, as some have no part in it any more."""
        self._unused.append(len(self._holders))
        self._claims.append(None)
        self._holders.append(set())
        self._num_leases.append(0)

    def _free(self, block_id: int) -> None:
        """Nobody holds or caches the block any more."""
        self._claims[block_id] = None
        self._unpublish(block_id)
        for group in self._groups:
            group.take_back(block_id)
        self._incomplete.discard(block_id)
        self._unused.append(block_id)

    def _free_unneeded(self, index: int, block_id: int) -> None:
        """Free the parts of a block that none of its holders needs, who all have it at ``index``."""
        for group in self._groups:
            if not group.is_needed(index, self._holders[block_id]):
                group.take_back(block_id)
                self._incomplete.add(block_id)
                self._unpublish(block_id)

    def _unpublish(self, block_id: int) -> None:
        block_hash = self._hash_of.pop(block_id, None)
        if block_hash is not None:
            del self._block_of[block_hash]
