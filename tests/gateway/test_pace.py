"""Estimates behind admission."""

from __future__ import annotations

import pytest

from kvrelay.gateway.pace import Pace


def test_work_is_the_prompt_and_the_output_as_usual() -> None:
    pace = Pace()
    assert pace.work_of(100, 10_000) == 228, "a first guess"
    assert pace.work_of(100, 10) == 110, "not more than it asks for"
    for _ in range(200):
        pace.on_finished(100, 40, 1.0, 0.0)
    assert pace.work_of(100, 10_000) == pytest.approx(140)


def test_the_wait_is_the_work_ahead_by_the_work_that_got_places() -> None:
    pace = Pace()
    assert pace.wait_s(1e9, 0.0) == 0, "nothing is known yet"
    for second in range(20):
        pace.on_admitted(500, 1.0, float(second))
    assert pace.wait_s(1000, 19.0) == pytest.approx(2.0)
    for second in range(20, 60):
        pace.on_admitted(1000, 1.0, float(second))
    assert pace.wait_s(1000, 59.0) == pytest.approx(1.0, rel=0.05), "the latest counts most"


def test_the_answer_takes_its_tokens_time() -> None:
    pace = Pace()
    assert pace.service_s(100, 0.0) == 0
    pace.on_finished(50, 50, 2.0, 0.0)
    assert pace.service_s(300, 1.0) == pytest.approx(6.0)


def test_what_nothing_confirms_is_forgotten() -> None:
    pace = Pace()
    pace.on_admitted(10, 60.0, 0.0)
    pace.on_finished(10, 10, 600.0, 0.0)
    assert pace.wait_s(1000, 1.0) > 600
    assert pace.service_s(100, 1.0) > 600
    assert pace.wait_s(1000, 11.0) == pace.service_s(100, 11.0) == 0
