"""Forecasts of requests' costs from those of similar requests."""

from __future__ import annotations

import pytest

from kvrelay.gateway.routing.forecast import Forecast, Need, Pace, Served, Supply, kind_of
from kvrelay.gateway.workers.load import WorkerView

SHORT, LONG = kind_of(100, 1000), kind_of(7000, 64)


def test_requests_are_alike_within_a_factor() -> None:
    assert kind_of(70, 1000) == kind_of(127, 600)
    assert len({kind_of(100, 1000), kind_of(1000, 1000), kind_of(100, 10)}) == 3


def test_output_is_what_others_generated_and_not_more_than_is_asked_for() -> None:
    pace = Pace()
    assert (pace.output_tokens(SHORT, 1000), pace.output_tokens(SHORT, 10)) == (128, 10)
    for _ in range(200):
        pace.on_served(SHORT, Served(100, 40, 0.5, 1.0), 0.0)
    assert (pace.output_tokens(SHORT, 1000), pace.output_tokens(SHORT, 10)) == (40, 10)
    assert pace.output_tokens(LONG, 64) == 40, "nothing is known of its kind: as others"


def test_an_answer_takes_its_prompts_time_and_its_outputs() -> None:
    pace = Pace()
    pace.on_served(SHORT, Served(100, 40, 1.0, 3.0), 0.0)
    assert pace.service_s(SHORT, 200, 20, 1.0) == pytest.approx(2.0 + 1.0)
    assert pace.service_s(LONG, 7000, 64, 1.0) is None
    assert (pace.durations_s(SHORT), pace.durations_s(LONG)) == ([3.0], [3.0])


def test_what_nothing_confirms_is_not_known_any_more() -> None:
    pace = Pace()
    pace.on_served(SHORT, Served(100, 40, 1.0, 30.0), 0.0)
    assert pace.is_known(SHORT, 39.0)
    assert not pace.is_known(SHORT, 41.0)
    assert pace.service_s(SHORT, 100, 40, 41.0) is None


def test_room_is_counted_as_groups_with_windows_take_it() -> None:
    """With Gemma 3's windows a sequence of 32k tokens keeps a quarter of its blocks. Two of them fit; a third waits."""
    decode = WorkerView("", b"", 3, 0, 1024, 3000, 16, max_running=64, windows=(None, *[1024] * 5))
    forecast = Forecast(Supply.of([], [decode], 0.0), [], 0.0)
    assert [forecast.place(Need(0, 2**15, [5.0])) for _ in range(3)] == [0.0, 0.0, 5.0]
