"""Which cached block goes first: priority, then least recently used; ends of claims, and the bound on retained blocks."""

from __future__ import annotations

import math

import pytest

from kvrelay.common.retention import Retention
from kvrelay.engine.prefix_cache import DEFAULT_CLAIMS, PrefixCache, claims_of, merged

FOREVER = math.inf


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def cache_of(clock: Clock, retentions: list[Retention | None], max_retained: int = 10) -> PrefixCache:
    """Blocks 0, 1, … that came in this order."""
    cache = PrefixCache(max_retained, clock)
    for block_id, retention in enumerate(retentions):
        cache.add(block_id, claims_of(retention, clock()))
        cache.check_integrity()
    return cache


def evicted(cache: PrefixCache) -> list[int]:
    order: list[int] = []
    while len(cache):
        order.append(cache.evict())
        assert order[-1] not in cache
        cache.check_integrity()
    return order


def test_the_least_recently_used_goes_first() -> None:
    cache = cache_of(Clock(), [None] * 4)
    assert cache.remove(1) == DEFAULT_CLAIMS
    cache.add(1, DEFAULT_CLAIMS)
    assert evicted(cache) == [0, 2, 3, 1]


def test_the_lowest_priority_goes_first() -> None:
    high, low, lowest = Retention(priority=80), Retention(priority=20), Retention(priority=0)
    cache = cache_of(Clock(), [high, None, low, high, lowest, None, Retention(priority=36)])
    assert cache.retained() == {0: 80, 3: 80, 6: 36}
    assert evicted(cache) == [4, 2, 1, 5, 6, 0, 3]


def test_a_raised_priority_ends_and_the_block_is_as_if_it_had_never_been_raised() -> None:
    clock = Clock()
    cache = cache_of(clock, [None, Retention(priority=80, ttl_s=10.0), None, Retention(priority=60)])
    clock.now_s += 9.9
    assert cache.retained() == {1: 80, 3: 60}
    clock.now_s += 0.2
    assert cache.retained() == {3: 60}
    cache.check_integrity()
    assert evicted(cache) == [0, 1, 2, 3]


def test_an_end_that_nobody_looked_at_counts_all_the_same() -> None:
    clock = Clock()
    cache = cache_of(clock, [Retention(priority=80, ttl_s=10.0), None])
    clock.now_s += 11.0
    assert evicted(cache) == [0, 1]


def test_below_the_default_an_end_says_nothing() -> None:
    clock = Clock()
    cache = cache_of(clock, [None, Retention(priority=10, ttl_s=5.0)])
    clock.now_s += 6.0
    assert evicted(cache) == [1, 0]


def test_one_more_than_may_be_retained_makes_the_lowest_as_default() -> None:
    cache = cache_of(
        Clock(), [Retention(priority=80), Retention(priority=50), Retention(priority=80), None], max_retained=2
    )
    assert cache.retained() == {0: 80, 2: 80}
    cache.add(4, claims_of(Retention(priority=80), 0.0))  # of one priority the least recently used
    assert cache.retained() == {2: 80, 4: 80}
    cache.add(5, claims_of(Retention(priority=60), 0.0))  # itself the lowest
    assert cache.retained() == {2: 80, 4: 80}
    cache.check_integrity()
    assert evicted(cache) == [0, 1, 3, 5, 2, 4]


def test_what_has_ended_takes_nobodys_place() -> None:
    clock = Clock()
    cache = cache_of(clock, [Retention(priority=90, ttl_s=1.0), Retention(priority=50)], max_retained=2)
    clock.now_s += 2.0
    cache.add(2, claims_of(Retention(priority=40), clock()))
    assert cache.retained() == {1: 50, 2: 40}


def test_without_a_share_nothing_is_retained_but_low_priorities_still_go_first() -> None:
    cache = cache_of(Clock(), [None, Retention(priority=99), Retention(priority=1)], max_retained=0)
    assert cache.retained() == {}
    assert evicted(cache) == [2, 0, 1]


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (Retention(priority=80), Retention(priority=60), ((80, FOREVER),)),
        (Retention(priority=10), Retention(priority=20), ((20, FOREVER),)),
        (Retention(priority=10), None, DEFAULT_CLAIMS),
        (Retention(priority=80, ttl_s=5.0), None, ((80, 5.0), (35, FOREVER))),
        (Retention(priority=80, ttl_s=5.0), Retention(priority=10), ((80, 5.0), (35, FOREVER))),
        (Retention(priority=80, ttl_s=5.0), Retention(priority=60), ((80, 5.0), (60, FOREVER))),
        (Retention(priority=80, ttl_s=5.0), Retention(priority=60, ttl_s=4.0), ((80, 5.0), (35, FOREVER))),
        (Retention(priority=80, ttl_s=5.0), Retention(priority=80, ttl_s=9.0), ((80, 9.0), (35, FOREVER))),
    ],
)
def test_the_highest_priority_that_holds_counts(
    one: Retention, other: Retention | None, both: tuple[tuple[int, float], ...]
) -> None:
    assert merged(claims_of(one, 0.0), claims_of(other, 0.0)) == both
    assert merged(claims_of(other, 0.0), claims_of(one, 0.0)) == both


def test_when_the_higher_claim_ends_the_lower_one_counts() -> None:
    clock = Clock()
    cache = PrefixCache(4, clock)
    claims = merged(claims_of(Retention(priority=80, ttl_s=5.0), clock()), claims_of(Retention(priority=60), clock()))
    cache.add(0, claims)
    clock.now_s += 6.0
    assert cache.retained() == {0: 60}
    assert cache.remove(0) == ((60, FOREVER),)
    cache.check_integrity()


def test_heaps_do_not_grow_with_what_comes_and_goes() -> None:
    clock = Clock()
    cache = cache_of(clock, [Retention(priority=80, ttl_s=1e6), Retention(priority=10)])
    for _ in range(10_000):
        for block_id in (0, 1):
            cache.add(block_id, cache.remove(block_id))
    cache.check_integrity()
    assert cache.num_entries < 500
    assert evicted(cache) == [1, 0]
    with pytest.raises(IndexError):
        cache.evict()
