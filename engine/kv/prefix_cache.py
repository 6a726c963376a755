"""Which cached block to give up next: by priority, within a priority the least recently used.

Every block here is published and nobody's. It has a rank, ``(priority, when it came)``, and the lowest rank goes first::

    ranked     below the default, and those of the default whose raised priority is over: a heap
    default    nearly all blocks, in the order in which they came: no heap, one dictionary operation each way
    retained   above the default: a heap, evicted only when there is nothing else

A block that several requests used keeps the highest priority that holds. What they asked for are its **claims**: a raised one may
have an end, afterwards the next lower one counts, at the latest the default. Ends are looked at when a block is needed, so time
costs nothing and no thread has a timer. A raised block whose time is over ranks as if it had never been raised, by when it came.

At most ``max_retained`` blocks are retained at a time. One more makes the lowest of them as default: nobody can fill a pool with
high priorities, and who asks for more keeps the head of the prefix, since the tail comes first.

Not thread-safe: the block manager's lock is around it. Knows no hashes and no owners.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from typing import Generic, TypeVar

from kvrelay.common.clock import Clock
from kvrelay.common.retention import DEFAULT_PRIORITY, Retention

# (priority, when it ends, on the manager's clock). A block's claims fall in priority and rise in end, so that the first that holds
# is the highest; the last one never ends.
Claim = tuple[int, float]
Rank = tuple[int, int]  # (priority, turn)
K = TypeVar("K", Rank, float)

DEFAULT_CLAIMS: tuple[Claim, ...] = ((DEFAULT_PRIORITY, math.inf),)
_MIN_STALE = 64  # entries of a heap that nobody looks through for stale ones


def claims_of(retention: Retention | None, now_s: float) -> tuple[Claim, ...]:
    """What a request that ends now claims for its blocks."""
    if retention is None or retention.priority == DEFAULT_PRIORITY:
        return DEFAULT_CLAIMS
    if retention.priority < DEFAULT_PRIORITY or retention.ttl_s is None:
        return ((retention.priority, math.inf),)
    return ((retention.priority, now_s + retention.ttl_s), *DEFAULT_CLAIMS)


def merged(claims: tuple[Claim, ...], others: tuple[Claim, ...]) -> tuple[Claim, ...]:
    """What is claimed for a block that two requests used."""
    kept: list[Claim] = []
    for claim in sorted({*claims, *others}, key=lambda one: (-one[0], -one[1])):
        if not kept or claim[1] > kept[-1][1]:
            kept.append(claim)
    return tuple(kept)


class PrefixCache:
    """The blocks of one pool that hold something worth keeping and that nobody holds."""

    def __init__(self, max_retained: int, clock: Clock) -> None:
        self.max_retained = max_retained
        self._clock = clock
        self._turn = 0
        self._default: OrderedDict[int, int] = OrderedDict()  # block -> turn
        self._ranked: _RankedBlocks[Rank] = _RankedBlocks()
        self._retained: _RankedBlocks[Rank] = _RankedBlocks()
        self._ends: _RankedBlocks[float] = _RankedBlocks()  # of the retained ones that have an end
        self._claims: dict[int, tuple[Claim, ...]] = {}  # of all but those in ``_default``

    def __len__(self) -> int:
        return len(self._default) + len(self._ranked) + len(self._retained)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._default or block_id in self._ranked or block_id in self._retained

    def blocks(self) -> list[int]:
        """All blocks, in no order."""
        return [*self._default, *self._ranked.ranks, *self._retained.ranks]

    @property
    def num_entries(self) -> int:
        """What is kept of blocks that are ranked, those included that are not here any more."""
        return self._ranked.num_entries + self._retained.num_entries + self._ends.num_entries

    def retained(self) -> dict[int, int]:
        """The blocks that stay before others, with the priority that holds now."""
        self._end_claims()
        return {block_id: rank[0] for block_id, rank in self._retained.ranks.items()}

    def add(self, block_id: int, claims: tuple[Claim, ...] | None) -> None:
        """Keep a block from now on; of blocks that come together the tail of a prefix comes first."""
        self._turn += 1
        if claims is None or claims == DEFAULT_CLAIMS:
            self._default[block_id] = self._turn
        else:
            self._claims[block_id] = claims
            self._place(block_id, self._turn)

    def remove(self, block_id: int) -> tuple[Claim, ...]:
        """Take a block out, for somebody who needs what is in it; returns its claims."""
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
        """Assert that every block is in one place, and where its claims put it."""
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
        """Put a block where its claims say."""
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
        """Lower the blocks whose raised priority is over."""
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
    """Blocks by rank, lowest first: a heap whose entries count only while ``ranks`` says the same of the block."""

    def __init__(self) -> None:
        self.ranks: dict[int, K] = {}
        self._heap: list[tuple[K, int]] = []

    def __len__(self) -> int:
        return len(self.ranks)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self.ranks

    @property
    def num_entries(self) -> int:
        """Of the heap, those included that do not count any more."""
        return len(self._heap)

    def add(self, block_id: int, rank: K) -> None:
        self.ranks[block_id] = rank
        heapq.heappush(self._heap, (rank, block_id))

    def discard(self, block_id: int) -> None:
        if self.ranks.pop(block_id, None) is not None and len(self._heap) > 2 * len(self.ranks) + _MIN_STALE:
            self._heap = [(rank, one) for one, rank in self.ranks.items()]
            heapq.heapify(self._heap)

    def first(self) -> tuple[int, K]:
        """The block of the lowest rank, which stays. Raises IndexError if there is none."""
        while self.ranks.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        rank, block_id = self._heap[0]
        return block_id, rank
