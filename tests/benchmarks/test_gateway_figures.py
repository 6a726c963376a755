from __future__ import annotations

import pytest
from gateway_parts.load import lines_of
from msgspec.structs import replace

from gateway import added
from kvrelay.launcher.bench.records import CpuUse
from tests.benchmarks.results import record, run, steps


def test_what_is_added_is_a_time_less_the_median_without_a_gateway() -> None:
    direct = [0.001, 0.002, 0.009]  # the median is 2 ms
    through = [0.005, 0.0035, 0.004, 0.0045, 0.102]
    figures = added("first token", direct, through)
    assert figures["first token direct ms"] == pytest.approx(2.0)
    assert figures["first token p50 ms"] == pytest.approx(2.5)
    assert figures["first token max ms"] == pytest.approx(100.0)
    assert figures["first token p99 ms"] == pytest.approx(3.0 + 0.96 * 97.0)  # between the fourth value and the last


SEEN = CpuUse(num_cores=2, generator=0.9, server=0.5, others=0.1, stolen=0.01, generator_max_lag_s=0.001)
ANSWER = record("main", 0.0, steps(1.0, 0.02, 100))


def test_cpu_time_is_told_by_component_and_per_token_and_doubts_below() -> None:
    lines = lines_of(run(ANSWER, cpu=SEEN, warnings=("late",)), 1.02, 0.47, 80.0)
    assert lines == [
        "34 tokens/s; gateway 10200.0 CPU s per million tokens and 80 MB, worker 4700.0 CPU s",
        "generator 0.90 cores, others 0.10, stolen 0.01",
        "  doubtful: late",
    ]


def test_failed_requests_are_no_figure() -> None:
    failed = replace(ANSWER, error="timeout")
    with pytest.raises(SystemExit, match="1 requests failed"):
        lines_of(run(ANSWER, failed), 1.0, 0.5, 80.0)
