"""A flood from one API key over two gateways hardly delays the other keys, and costs little throughput."""

from __future__ import annotations

import pytest

from .floods import FLOOD, OTHERS, OTHERS_ALONE, Result, run

pytestmark = pytest.mark.full  # a minute

SECONDS = 12.0
SEEDS = (1, 2)


@pytest.fixture(scope="module")
def flooded() -> list[Result]:
    """One run with the flood for each seed."""
    return [run([*OTHERS_ALONE, FLOOD], SECONDS, seed=seed) for seed in SEEDS]


def test_a_flood_delays_the_others_by_a_fifth_at_most(flooded: list[Result]) -> None:
    alone = sum((run(OTHERS_ALONE, SECONDS, seed=seed) for seed in SEEDS), Result())
    assert sum(flooded, Result()).ttft_s(OTHERS) <= 1.2 * alone.ttft_s(OTHERS)


def test_nobody_waits_more_than_four_times_its_fair_share(flooded: list[Result]) -> None:
    assert max(share for one in flooded for share in one.shares()) <= 4


def test_room_for_others_costs_a_tenth_of_the_throughput_at_most(flooded: list[Result]) -> None:
    as_one_key = run([*OTHERS_ALONE, FLOOD], SECONDS, has_keys=False, seed=SEEDS[0])
    everybody = [*OTHERS, FLOOD.key]
    assert flooded[0].rate(everybody) > 0.9 * as_one_key.rate(everybody)
    assert flooded[0].ttft_s(OTHERS) < as_one_key.ttft_s(OTHERS) / 4  # the longer the flood, the smaller this share
