from __future__ import annotations

import pytest
from gateway_figures import added


def test_what_is_added_is_a_time_less_the_median_without_a_gateway() -> None:
    direct = [0.001, 0.002, 0.009]  # 2 ms, whatever the worst one was
    least = [0.0025, 0.003, 0.010]  # 1 ms more
    through = [0.005, 0.0035, 0.004, 0.0045, 0.102]
    figures = added("first token", direct, least, through)
    assert figures["first token direct ms"] == pytest.approx(2.0)
    assert figures["first token least p50 ms"] == pytest.approx(1.0)
    assert figures["first token p50 ms"] == pytest.approx(2.5)
    assert figures["first token max ms"] == pytest.approx(100.0)
    assert figures["first token p50 to least"] == pytest.approx(2.5)
    assert 3.0 < figures["first token p99 ms"] <= 100.0
