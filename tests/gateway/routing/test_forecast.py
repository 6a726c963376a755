"""What requests cost, by what others like them took."""

from __future__ import annotations

import pytest

from kvrelay.gateway.routing.forecast import Pace, Served, kind_of

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
