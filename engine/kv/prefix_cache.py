"""Chooses which cached block to evict next: by priority, and within a priority the least recently used.

Every block here is published and has no owner. It has a rank, ``(priority, turn)``, and the lowest rank is evicted first::

    ranked     below the default, and default blocks whose raised priority has ended: a heap
    default    nearly all blocks, in the order in which they came: no heap, one dictionary operation each way
    retained   above the default: a heap, evicted only when there is nothing else

A block that several requests used keeps the highest priority that is valid. The requests' wishes are its **claims**. A raised claim
may end; then the next lower one counts, at last the default. Ends are checked when a block is needed, so there is no timer. A block
whose raised priority has ended ranks by its arrival, as if it had never been raised.

At most ``max_retained`` blocks are retained at a time. One more lowers the lowest of them to the default. So no client can fill a
pool with high priorities. A client that asks for more keeps the head of its prefix, because the tail comes first.

Not thread-safe: the block manager calls it under its lock. It knows no hashes and no owners.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from typing import Generic, TypeVar

from kvrelay.common.clock import Clock
from kvrelay.common.retention import DEFAULT_PRIORITY, Retention

# (priority, end on the manager's clock). A block's claims fall in priority and rise in end, so the first valid one is the
# highest. The
# last one never ends.
Claim = tuple[int, float]
Rank = tuple[int, int]  # (priority, turn)
K = TypeVar("K", Rank, float)

DEFAULT_CLAIMS: tuple[Claim, ...] = ((DEFAULT_PRIORITY, math.inf),)
_MIN_STALE = 64  # a heap is cleaned of stale entries only above this many


def claims_of(retention: Retention | None, now_s: float) -> tuple[Claim, ...]:
    """The claims of a request that ends now."""
    if retention is None or retention.priority == DEFAULT_PRIORITY:
        return DEFAULT_CLAIMS
    if retention.priority < DEFAULT_PRIORITY or retention.ttl_s is None:
        return ((retention.priority, math.inf),)
    return ((retention.priority, now_s + retention.ttl_s), *DEFAULT_CLAIMS)


def merged(claims: tuple[Claim, ...], others: tuple[Claim, ...]) -> tuple[Claim, ...]:
    """The claims for a block that two requests used."""
    kept: list[Claim] = []
    for claim in sorted({*claims, *others}, key=lambda one: (-one[0], -one[1])):
        if not kept or claim[1] > kept[-1][1]:
            kept.append(claim)
    return tuple(kept)


class PrefixCache:
    """The published blocks of one pool that have no owner."""

    def __init__(self, max_retained: int, clock: Clock) -> None:
        self.max_retained = max_retained
        self._clock = clock
        self._turn = 0
        self._default: OrderedDict[int, int] = OrderedDict()  # block -> turn
        self._ranked: _RankedBlocks[Rank] = _RankedBlocks()
        self._retained: _RankedBlocks[Rank] = _RankedBlocks()
        self._ends: _RankedBlocks[float] = _RankedBlocks()  # retained blocks whose priority ends
        self._claims: dict[int, tuple[Claim, ...]] = {}  # for all blocks except those in ``_default``

    def __len__(self) -> int:
        return len(self._default) + len(self._ranked) + len(self._retained)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._default or block_id in self._ranked or block_id in self._retained

    def blocks(self) -> list[int]:
        """All blocks, in any order."""
        return [*self._default, *self._ranked.ranks, *self._retained.ranks]

    @property
    def num_entries(self) -> int:
        """Entries of the heaps, including stale ones."""
        return self._ranked.num_entries + self._retained.num_entries + self._ends.num_entries

    def retained(self) -> dict[int, int]:
        """The retained blocks, with their current priority."""
        self._end_claims()
        return {block_id: rank[0] for block_id, rank in self._retained.ranks.items()}

    def add(self, block_id: int, claims: tuple[Claim, ...] | None) -> None:
        """Add a block. Of blocks that come together, add the tail of a prefix first."""
        self._turn += 1
        if claims is None or claims == DEFAULT_CLAIMS:
            self._default[block_id] = self._turn
        else:
            self._claims[block_id] = claims
            self._place(block_id, self._turn)

    def remove(self, block_id: int) -> tuple[Claim, ...]:
        """Take out a block whose content is needed; returns its claims."""
        if self._default.pop(block_id, None) is not None:
            return DEFAULT_CLAIMS
        for ranked in (self._ranked, self._retained, self._ends):
            ranked.discard(block_id)
        return self._claims.pop(block_id)

    def evict(self) -> int:
        """Take out the block of the lowest rank. Raises IndexError if there is none."""
        if self._ends:
            self._end_claims()
        if self._ranked:
            block_id, rank = self._ranked.first()
            if not self._default or rank < (DEFAULT_PRIORITY, next(iter(self._default.values()))):
                self.remove(block_id)
                return block_id
        if self._default:
            return self._default.popitem(last=False)[0]
        block_id, _ = self._retained.first()
        self.remove(block_id)
        return block_id

    def check_integrity(self) -> None:
        """Assert that every block is in one place, as its claims require."""
        places = [set(self._default), set(self._ranked.ranks), set(self._retained.ranks)]
        assert sum(map(len, places)) == len(set().union(*places)), f"a block is cached twice: {places}"
        assert set(self._claims) == places[1] | places[2], f"claims of {sorted(self._claims)}, ranks of {places[1:]}"
        assert len(self._retained) <= self.max_retained, f"{len(self._retained)} retained, {self.max_retained} allowed"
        assert all(rank[0] > DEFAULT_PRIORITY for rank in self._retained.ranks.values()), self._retained.ranks
        assert all(rank[0] <= DEFAULT_PRIORITY for rank in self._ranked.ranks.values()), self._ranked.ranks
        ends = {one: self._claims[one][0][1] for one in places[2] if not math.isinf(self._claims[one][0][1])}
        assert self._ends.ranks == ends, f"the ends are {self._ends.ranks}, but the claims' {ends}"
        assert list(self._default.values()) == sorted(self._default.values()), "the default's order is not of arrival"

    def _place(self, block_id: int, turn: int) -> None:
        """Put a block where its claims require."""
        claims = self._claims[block_id]
        now_s = self._clock() if claims[0][1] < math.inf else 0.0
        claims = self._claims[block_id] = tuple(claim for claim in claims if claim[1] > now_s)
        priority, end_s = claims[0]
        if priority <= DEFAULT_PRIORITY:
            self._ranked.add(block_id, (priority, turn))
            return
        self._retained.add(block_id, (priority, turn))
        if end_s < math.inf:
            self._ends.add(block_id, end_s)
        if len(self._retained) > self.max_retained:
            if self._ends:
                self._end_claims()
            if len(self._retained) > self.max_retained:
                lowest, (_, its_turn) = self._retained.first()
                self._lower(lowest, DEFAULT_CLAIMS, its_turn)

    def _end_claims(self) -> None:
        """Lower the blocks whose raised priority has ended."""
        now_s = self._clock()
        while self._ends and self._ends.first()[1] <= now_s:
            block_id, _ = self._ends.first()
            self._lower(block_id, self._claims[block_id], self._retained.ranks[block_id][1])

    def _lower(self, block_id: int, claims: tuple[Claim, ...], turn: int) -> None:
        self._retained.discard(block_id)
        self._ends.discard(block_id)
        self._claims[block_id] = claims
        self._place(block_id, turn)


class _RankedBlocks(Generic[K]):
    """Blocks by rank, lowest first: a heap whose entries count only while ``ranks`` has the same rank for the block."""

    def __init__(self) -> None:
        self.ranks: dict[int, K] = {}
        self._heap: list[tuple[K, int]] = []

    def __len__(self) -> int:
        return len(self.ranks)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self.ranks

    @property
    def num_entries(self) -> int:
        """Entries of the heap, including stale ones."""
        return len(self._heap)

    def add(self, block_id: int, rank: K) -> None:
        self.ranks[block_id] = rank
        heapq.heappush(self._heap, (rank, block_id))

    def discard(self, block_id: int) -> None:
        if self.ranks.pop(block_id, None) is not None and len(self._heap) > 2 * len(self.ranks) + _MIN_STALE:
            self._heap = [(rank, one) for one, rank in self.ranks.items()]
            heapq.heapify(self._heap)

    def first(self) -> tuple[int, K]:
        """The block of the lowest rank, without removing it. Raises IndexError if there is none."""
        while self.ranks.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        rank, block_id = self._heap[0]
        return block_id, rank
