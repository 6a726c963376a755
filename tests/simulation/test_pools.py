"""Choosing the sooner way for each prompt meets the latency promise about as often as the better fixed policy."""

from __future__ import annotations

from functools import cache

import pytest

from .pools import MIXES, Mix, Pools, Result, run, ways

SECONDS = 10.0
WORST = 0.95  # of the better fixed policy's goodput, less one request


@cache
def result(pools: Pools, mix: Mix) -> Result:
    """Cached: the colocated pools are the same for both shapes."""
    return run(pools, mix, SECONDS)


@pytest.mark.parametrize(
    "mix", [pytest.param(mix, marks=[] if mix.name == "bursts" else pytest.mark.full, id=mix.name) for mix in MIXES]
)
@pytest.mark.parametrize(
    "shape", [pytest.param((4, 4), marks=pytest.mark.full, id="4 + 4"), pytest.param((2, 6), id="2 + 6")]
)
def test_the_sooner_way_is_never_much_worse_than_one_way_for_all(shape: tuple[int, int], mix: Mix) -> None:
    handed_over, colocated, sooner = (result(pools, mix) for pools in ways(*shape))
    assert sooner.goodput >= WORST * max(handed_over.goodput, colocated.goodput) - 1 / SECONDS
