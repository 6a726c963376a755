"""A worker's speed, as it is told to gateways."""

from __future__ import annotations

import pytest

from kvrelay.prefill_worker.speed import Speed


def test_speed_is_tokens_by_seconds_of_computing() -> None:
    speed = Speed()
    assert speed.tokens_per_s is None
    for _ in range(100):
        speed.observe(512, 0.5)
    assert speed.tokens_per_s == pytest.approx(1024)
    for _ in range(100):
        speed.observe(512, 1.0)
    assert speed.tokens_per_s == pytest.approx(512, rel=0.01)
    speed.observe(512, 60.0)
    assert speed.tokens_per_s == pytest.approx(512 / 60)
    speed.observe(0, 0.0)  # a report without a step
    assert speed.tokens_per_s == pytest.approx(512 / 60)
