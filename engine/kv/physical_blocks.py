"""The physical blocks of a pool: the group, the holders and the published hash of each.

Each block is in exactly one of three states::

    free ──take──▶ owned (by one or more) ──let go, leave──▶ cached (published) ──evict──▶ owned
      ▲                 └──────let go, leave (unpublished)──▶ free

Released published blocks stay as prefix cache (:mod:`kvrelay.engine.kv.prefix_cache`). Not thread-safe: the block manager calls it
under its lock. It knows no tables: :class:`kvrelay.engine.kv.block_manager.BlockManager` knows which blocks belong together.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Iterable, Sequence

from kvrelay.common.clock import Clock
from kvrelay.common.kv_geometry import Window, first_block
from kvrelay.engine.kv.ledger import Ledger
from kvrelay.engine.kv.lower_tier import Watcher
from kvrelay.engine.kv.owners import Owner, OwnerKind
from kvrelay.engine.kv.prefix_cache import Claim, PrefixCache, merged


class PhysicalBlocks:
    """The states of the blocks. It has numbers and hashes; the pool has the bytes."""

    def __init__(self, num_blocks: int, num_groups: int, max_retained: int, clock: Clock) -> None:
        """``max_retained``: the most blocks that may be cached above the default priority at a time."""
        self.num_blocks = num_blocks
        self.watcher: Watcher | None = None  # hears which blocks are published
        self.cache = PrefixCache(max_retained, clock)  # published blocks without an owner
        self._free = deque(range(num_blocks))
        self._holders: list[set[Owner]] = [set() for _ in range(num_blocks)]
        # For owned blocks: how long they shall stay cached.
        self._claims: list[tuple[Claim, ...] | None] = [None] * num_blocks
        self._hash_of: dict[int, bytes] = {}  # published blocks
        self._sources: dict[int, frozenset[str]] = {}  # for published blocks: the other workers whose work is in them
        self._distrusted: set[str] = set()
        self._block_of: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self._group_of = [0] * num_blocks  # for blocks that are not free
        self._num_taken = [0] * num_groups  # by group: number of blocks that are not free
        self._num_cached = [0] * num_groups
        self._num_leases = [0] * num_blocks  # by block: number of its holders that are leases
        self._num_leased = [0] * num_groups  # by group: number of blocks that a lease holds

    @property
    def num_allocatable(self) -> int:
        """The number of free or cached blocks."""
        return len(self._free) + len(self.cache)

    def free(self) -> list[int]:
        """The blocks that are in no group."""
        return list(self._free)

    def cached(self, group: int) -> list[int]:
        """A group's cached blocks."""
        return [block_id for block_id in self.cache.blocks() if self._group_of[block_id] == group]

    def ledger(self, group: int | None) -> Ledger:
        """Counts by state: for the pool, or for one group."""
        groups = range(len(self._block_of)) if group is None else (group,)
        taken, cached, leased = (
            sum(counts[one] for one in groups) for counts in (self._num_taken, self._num_cached, self._num_leased)
        )
        num_blocks, num_free = (self.num_blocks, len(self._free)) if group is None else (taken, 0)
        return Ledger(num_blocks, num_free, cached, leased, taken - cached - leased)

    def published(self, group: int, block_hashes: Iterable[bytes]) -> list[int]:
        """A group's blocks under these hashes, all of which must be published."""
        block_of = self._block_of[group]
        return [block_of[block_hash] for block_hash in block_hashes]

    def find(self, group: int, block_hash: bytes) -> int | None:
        """A group's block under this hash; None if none is published."""
        return self._block_of[group].get(block_hash)

    def num_cached_prefix(
        self,
        hashes: Sequence[bytes],
        windows: Sequence[Window | None],
        block_size: int,
        elsewhere: Sequence[Container[bytes]] | None = None,
    ) -> int:
        """The number of leading blocks that are published and after which a sequence can continue. ``windows``: per group.

        ``elsewhere``: per group, hashes that count as if they were published.
        """
        num_full = len(hashes)
        windowed: list[tuple[Window, Container[bytes]]] = []
        known: Sequence[Container[bytes]] = self._block_of
        if elsewhere is not None:
            known = [_Either(*pair) for pair in zip(self._block_of, elsewhere, strict=True)]
        for window, block_of in zip(windows, known, strict=True):
            if window is None:
                num_full = next((n for n, one in enumerate(hashes[:num_full]) if one not in block_of), num_full)
            else:
                windowed.append((window, block_of))
        if not windowed:
            return num_full
        num_cached, since = 0, [0] * len(windowed)  # by group: the block from which on none is missing
        for num_blocks, block_hash in enumerate(hashes[:num_full], 1):
            is_whole = True
            for place, (window, block_of) in enumerate(windowed):
                if block_hash not in block_of:
                    since[place] = num_blocks
                is_whole = is_whole and since[place] <= first_block(window, num_blocks * block_size, block_size)
            num_cached = num_blocks if is_whole else num_cached
        return num_cached

    def num_owned(self, group: int) -> int:
        """The number of a group's blocks that have an owner."""
        return self._num_taken[group] - self._num_cached[group]

    def is_owned(self, block_id: int) -> bool:
        """Whether the block has an owner."""
        return bool(self._holders[block_id])

    def is_shared(self, block_id: int) -> bool:
        """Whether other owners rely on the block's content, or may come to."""
        return len(self._holders[block_id]) > 1 or block_id in self._hash_of

    def hold(self, owner: Owner, block_id: int) -> None:
        """Add ``owner`` to the holders of a block that is not free."""
        if not self._holders[block_id] and block_id in self._hash_of:
            self._claims[block_id] = self.cache.remove(block_id)
            self._num_cached[self._group_of[block_id]] -= 1
        self._holders[block_id].add(owner)
        if owner.kind is OwnerKind.LEASE:
            self._num_leases[block_id] += 1
            self._num_leased[self._group_of[block_id]] += self._num_leases[block_id] == 1

    def let_go(self, owner: Owner, block_id: int) -> None:
        """Remove ``owner`` from the block's holders. Call ``leave`` next, unless another owner takes it over."""
        self._holders[block_id].remove(owner)
        if owner.kind is OwnerKind.LEASE:
            self._num_leases[block_id] -= 1
            self._num_leased[self._group_of[block_id]] -= self._num_leases[block_id] == 0

    def leave(self, block_id: int) -> None:
        """After a ``let_go``: the block becomes cached or free, unless others hold it."""
        if self._holders[block_id]:
            return
        if block_id in self._hash_of:
            self.cache.add(block_id, self._claims[block_id])
            self._num_cached[self._group_of[block_id]] += 1
        else:
            self._set_free(block_id)

    def claim(self, block_id: int, claims: tuple[Claim, ...]) -> None:
        """Add the claims of a request that used the block."""
        known = self._claims[block_id]
        if known is not claims:
            self._claims[block_id] = claims if known is None else merged(known, claims)

    def take(self, owner: Owner, group: int, num_blocks: int) -> list[int]:
        """Take ``num_blocks`` blocks for ``owner`` in a group, free ones first. There must be as many allocatable."""
        while len(self._free) < num_blocks:
            block_id = self.cache.evict()
            self._num_cached[self._group_of[block_id]] -= 1
            self._unpublish(block_id)
            self._set_free(block_id)
        fresh = [self._free.popleft() for _ in range(num_blocks)]
        self._num_taken[group] += num_blocks
        for block_id in fresh:
            self._group_of[block_id] = group
            self.hold(owner, block_id)
        return fresh

    def publish(self, block_id: int, block_hash: bytes, sources: frozenset[str]) -> None:
        """Publish the block in its group under ``block_hash``, unless another one already is.

        ``sources``: other workers whose work is in it; no effect if one of them is distrusted. Raises ValueError if the block has
        another hash.
        """
        if not sources.isdisjoint(self._distrusted):
            return
        known = self._hash_of.get(block_id)
        if known is not None and known != block_hash:
            raise ValueError(f"block {block_id} is published as {known.hex()}, not {block_hash.hex()}")
        block_of = self._block_of[self._group_of[block_id]]
        if known is None and block_hash not in block_of:
            self._hash_of[block_id] = block_hash
            block_of[block_hash] = block_id
            if sources:
                self._sources[block_id] = sources
            if self.watcher is not None:
                self.watcher.on_published(block_id, self._group_of[block_id], block_hash, sources)

    def sources(self, block_ids: Iterable[int]) -> frozenset[str]:
        """The other workers whose work is in these blocks."""
        return frozenset().union(*(self._sources.get(block_id, ()) for block_id in block_ids))

    def distrust(self, source: str) -> int:
        """Unpublish all blocks that ``source`` has worked on, and publish none any more; their holders keep them.

        Returns their number.
        """
        self._distrusted.add(source)
        dropped = [block_id for block_id, sources in self._sources.items() if source in sources]
        for block_id in dropped:
            self._unpublish(block_id)
            if not self._holders[block_id]:
                self.cache.remove(block_id)
                self._num_cached[self._group_of[block_id]] -= 1
                self._set_free(block_id)
        return len(dropped)

    def check_integrity(self, held: Iterable[tuple[Owner, int, list[int]]]) -> None:
        """Assert that every block is in exactly one state and that all records agree.

        ``held``: for each owner and group, the blocks in its tables.
        """
        self.cache.check_integrity()
        free, cached = set(self._free), set(self.cache.blocks())
        assert len(free) == len(self._free), f"a block is free twice: {sorted(self._free)}"
        holders: list[set[Owner]] = [set() for _ in range(self.num_blocks)]
        for owner, group, block_ids in held:
            assert len(set(block_ids)) == len(block_ids), f"{owner} holds a block twice: {block_ids}"
            for block_id in block_ids:
                holders[block_id].add(owner)
                assert self._group_of[block_id] == group, f"block {block_id} of group {group} is another's"
        assert holders == self._holders, "owners disagree"
        owned = {block_id for block_id, its in enumerate(holders) if its}
        assert not free & owned | free & cached | owned & cached, f"at two places: {free=}, {owned=}, {cached=}"
        assert free | owned | cached == set(range(self.num_blocks)), f"lost: {free=}, {owned=}, {cached=}"
        published = {block_id: (self._group_of[block_id], one) for block_id, one in self._hash_of.items()}
        found = {number: (group, one) for group, its in enumerate(self._block_of) for one, number in its.items()}
        assert found == published, "published hashes disagree"
        assert cached <= set(published) <= owned | cached, f"cached {cached}, published {sorted(published)}"
        leases = [sum(holder.kind is OwnerKind.LEASE for holder in its) if its else 0 for its in holders]
        assert self._num_leases == leases, "a block's count of leases is wrong"
        leased = [block_id for block_id, count in enumerate(leases) if count]
        by_group = [Counter(map(self._group_of.__getitem__, blocks)) for blocks in (owned | cached, cached, leased)]
        for group in range(len(self._block_of)):
            counts = [self._num_taken[group], self._num_cached[group], self._num_leased[group]]
            assert counts == [count[group] for count in by_group], f"counts of group {group} are wrong"
        assert set(self._sources) <= set(self._hash_of), f"sources of {sorted(self._sources)}, not all published"
        assert self.ledger(None).balances, f"the ledger does not balance: {self.ledger(None)}"

    def _unpublish(self, block_id: int) -> None:
        group, block_hash = self._group_of[block_id], self._hash_of.pop(block_id)
        if self.watcher is not None:
            self.watcher.on_unpublished(block_id, group, block_hash)
        del self._block_of[group][block_hash]
        self._sources.pop(block_id, None)

    def _set_free(self, block_id: int) -> None:
        self._claims[block_id] = None
        self._num_taken[self._group_of[block_id]] -= 1
        self._free.append(block_id)


class _Either:
    """What is in one of two containers."""

    def __init__(self, first: Container[bytes], second: Container[bytes]) -> None:
        self._first, self._second = first, second

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._first or block_hash in self._second
