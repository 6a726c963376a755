"""Closed loops: a prefill and a decode worker on a device each are about as fast as workers that do both."""

from __future__ import annotations

import pytest

from .closed_loops import LOOPS, ONE_EACH, ONE_OF_BOTH, POOLS, run


@pytest.mark.parametrize(("name", "most_ttft", "most_run"), [("64x300", 2.0, 1.2), ("8x3000", 1.25, 1.2)])
def test_without_a_budget_two_pools_come_near_one(name: str, most_ttft: float, most_run: float) -> None:
    """Tokens counted twice in a batch, or an idle decode worker, would make two pools two to six times as slow."""
    two, one = (run(LOOPS[name], split, itl_budget_ms=0) for split in (POOLS, ONE_OF_BOTH))
    assert two.ttft_p50_s <= most_ttft * one.ttft_p50_s
    assert two.run_s <= most_run * one.run_s


def test_with_the_default_budget_two_pools_have_the_sooner_first_token() -> None:
    two, one = (run(LOOPS["16x400"], split, itl_budget_ms=None) for split in (POOLS, ONE_OF_BOTH))
    assert two.ttft_p50_s <= 0.5 * one.ttft_p50_s
    assert two.run_s <= one.run_s


def test_two_pools_are_as_good_as_two_workers_that_do_both_at_like_gaps() -> None:
    pools, each = (run(LOOPS["16x400"], split, itl_budget_ms=40) for split in (POOLS, ONE_EACH))
    assert pools.gap_p99_s <= 1.1 * each.gap_p99_s
    assert pools.ttft_p50_s <= 1.1 * each.ttft_p50_s
    assert pools.run_s <= 1.05 * each.run_s
