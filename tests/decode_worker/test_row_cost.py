"""The cost of rows is learned although steps are disturbed, and kept while steps do not differ."""

from __future__ import annotations

import random

import pytest

from kvrelay.decode_worker.row_cost import RowCost


@pytest.mark.parametrize("ratio", [0.002, 0.02, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_the_rows_share_is_found_though_steps_are_disturbed(ratio: float, seed: int) -> None:
    draws, cost = random.Random(seed), RowCost()
    for _ in range(300):
        num_rows = draws.choice((1, 4, 8, 32))
        disturbed = draws.choice((1.0, 1.0, 1.0, 1.05, 3.0))
        cost.observe(num_rows, 0.01 * (1 + ratio * num_rows) * disturbed)
    assert cost.share(32) == pytest.approx(32 * ratio / (1 + 32 * ratio), abs=0.08)


def test_steps_that_are_alike_tell_nothing_though_all_become_slower() -> None:
    cost = RowCost()
    before = cost.share(1)
    for number in range(200):
        cost.observe(1, 0.01 + number * 0.001)
    assert cost.share(1) == before


def test_a_clock_that_stands_still_tells_nothing() -> None:
    cost = RowCost()
    before = cost.share(8)
    for num_rows in range(1, 100):
        cost.observe(num_rows, 0.0)
    assert cost.share(8) == before
