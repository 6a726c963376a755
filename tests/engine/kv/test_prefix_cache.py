"""Internals of the prefix cache: how claims are merged and kept. The tests of the block manager cover its order."""

from __future__ import annotations

import math

import pytest

from kvrelay.common.retention import Retention
from kvrelay.engine.kv.prefix_cache import DEFAULT_CLAIMS, PrefixCache, claims_of, merged

FOREVER = math.inf


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (Retention(priority=80), Retention(priority=60), ((80, FOREVER),)),
        (Retention(priority=10), Retention(priority=20), ((20, FOREVER),)),
        (Retention(priority=10), None, DEFAULT_CLAIMS),
        (Retention(priority=10, ttl_s=5.0), Retention(priority=20), ((20, FOREVER),)),
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


def test_without_a_share_nothing_is_retained_but_low_priorities_still_go_first() -> None:
    cache = PrefixCache(0, lambda: 0.0)
    for block_id, retention in enumerate((None, Retention(priority=99), Retention(priority=1))):
        cache.add(block_id, claims_of(retention, 0.0))
    assert cache.retained() == {}
    assert [cache.evict() for _ in range(3)] == [2, 0, 1]
    with pytest.raises(IndexError):
        cache.evict()


def test_heaps_do_not_grow_with_what_comes_and_goes() -> None:
    cache = PrefixCache(10, lambda: 0.0)
    cache.add(0, claims_of(Retention(priority=80, ttl_s=1e6), 0.0))
    cache.add(1, claims_of(Retention(priority=10), 0.0))
    for _ in range(10_000):
        for block_id in (0, 1):
            cache.add(block_id, cache.remove(block_id))
    cache.check_integrity()
    assert cache.num_entries < 500
    assert [cache.evict() for _ in range(2)] == [1, 0]
