from __future__ import annotations

from typing import cast

import pytest
from fleet import Fleet, Trial, highest_rate, why_not_held

from kvrelay.launcher.bench.records import RequestRecord, RunResult
from kvrelay.launcher.bench.summary import summarize

STEP_S = 0.02


def record(index: int, ttft_s: float = 0.1, **changes: object) -> RequestRecord:
    """An answer of 64 tokens at the engine's pace, ``ttft_s`` after it was due."""
    due_s = 0.1 * index
    values: dict[str, object] = {
        "index": index,
        "stream": "main",
        "due_s": due_s,
        "sent_s": due_s,
        "finished_s": due_s + ttft_s + 63 * STEP_S,
        "prompt_tokens": 128,
        "planned_output_tokens": 64,
        "output_tokens": 64,
        "chunk_s": [due_s + ttft_s + place * STEP_S for place in range(64)],
    }
    return RequestRecord(**{**values, **changes})  # type: ignore[arg-type]


def run_of(*records: RequestRecord) -> RunResult:
    return RunResult(
        name="fleet",
        started_at="2026-01-01T00:00:00+00:00",
        duration_s=10.0,
        url="http://127.0.0.1:1",
        model="m",
        settings={},
        environment={},
        slo={},
        requests=list(records),
        cpu=None,
        warnings=[],
    )


def test_a_rate_is_held_if_99_of_100_are_served_in_time() -> None:
    served = [record(index) for index in range(99)]
    assert why_not_held(run_of(*served, record(99, 1.5)), STEP_S) == []
    late = [record(99, 1.5), record(100, 1.5)]
    assert why_not_held(run_of(*served, *late), STEP_S) == ["only 98.0 % of the requests were served in time"]
    # In time for its first token, and slower than half the engine's pace behind it.
    slow = [record(index, finished_s=0.1 * index + 0.1 + 63 * STEP_S * 3) for index in range(10)]
    assert why_not_held(run_of(*slow), STEP_S) == ["only 0.0 % of the requests were served in time"]


def test_failures_a_growing_queue_and_a_late_generator_are_named() -> None:
    failed = record(99, error="http 503", output_tokens=0, chunk_s=[])
    assert why_not_held(run_of(*(record(index) for index in range(199)), failed), STEP_S) == [
        "1 of 200 requests failed (http 503)"
    ]
    growing = [record(index, 0.1 + 0.01 * index) for index in range(60)]
    assert why_not_held(run_of(*growing), STEP_S) == ["the median TTFT grew from 195 to 595 ms"]
    late = [record(index, sent_s=0.1 * index + 0.3, ttft_s=0.35) for index in range(9)]
    assert why_not_held(run_of(*late), STEP_S) == ["the generator was late by 0.30 s"]
    assert why_not_held(run_of(*growing, record(99, is_warmup=True, error="timeout")), STEP_S) == [
        "the median TTFT grew from 195 to 595 ms"
    ]


class Limited:
    """A fleet that holds ``limit`` requests per second, and less in a long run."""

    def __init__(self, limit: float, long_limit: float) -> None:
        self.limits = {5.0: limit, 60.0: long_limit}
        self.tried: list[tuple[float, float]] = []

    def try_rate(self, rate: float, seconds: float) -> Trial:
        self.tried.append((rate, seconds))
        result = run_of(record(0))
        failures = [] if rate <= self.limits[seconds] else ["too much"]
        return Trial(rate, result, summarize(result).all, {}, failures)


def test_the_highest_rate_is_one_that_was_held_for_the_whole_time() -> None:
    fleet = Limited(27.0, 24.0)
    best = highest_rate(cast(Fleet, fleet), 8.0, 5.0, 60.0)
    assert [rate for rate, seconds in fleet.tried if seconds == 5.0] == [8.0, 16.0, 32.0, 24.0, 28.0, 26.0]
    assert [rate for rate, seconds in fleet.tried if seconds == 60.0] == [26.0, pytest.approx(23.4)]
    assert (best.rate, best.failures) == (pytest.approx(23.4), [])


def test_a_fleet_that_holds_nothing_is_no_figure() -> None:
    with pytest.raises(SystemExit, match="not even one request per second"):
        highest_rate(cast(Fleet, Limited(4.0, 0.0)), 8.0, 5.0, 60.0)
