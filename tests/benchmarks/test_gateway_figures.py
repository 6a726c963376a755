from __future__ import annotations

import gateway_load
import pytest
from gateway_load import Measured, figures_of, throughput
from msgspec.structs import replace

from gateway import added
from kvrelay.launcher.bench.records import CpuUse
from tests.benchmarks.results import record, run, steps


def test_what_is_added_is_a_time_less_the_median_without_a_gateway() -> None:
    direct = [0.001, 0.002, 0.009]  # 2 ms, whatever the worst one was
    through = [0.005, 0.0035, 0.004, 0.0045, 0.102]
    figures = added("first token", direct, through)
    assert figures["first token direct ms"] == pytest.approx(2.0)
    assert figures["first token p50 ms"] == pytest.approx(2.5)
    assert figures["first token max ms"] == pytest.approx(100.0)
    assert figures["first token p99 ms"] == pytest.approx(3.0 + 0.96 * 97.0)  # between the fourth of five and the last


SEEN = CpuUse(num_cores=2, generator=0.9, server=0.5, others=0.1, stolen=0.01, generator_max_lag_s=0.001)
ANSWER = record("main", 0.0, steps(1.0, 0.02, 100))


def test_cpu_time_is_told_by_component_and_per_token() -> None:
    measured = figures_of(run(ANSWER, cpu=SEEN), 1.02, 0.47, 80.0)
    assert measured.figures == {
        "tokens_per_s": pytest.approx(100 / 2.98),
        "gateway_us_per_token": pytest.approx(10_200.0),
        "worker_us_per_token": pytest.approx(4_700.0),
        "gateway_mb": 80.0,
        "generator_cores": 0.9,
        "other_cores": pytest.approx(0.1),
        "stolen_cores": 0.01,
    }


def test_failed_requests_are_no_figure() -> None:
    failed = replace(ANSWER, error="timeout")
    with pytest.raises(SystemExit, match="1 requests failed"):
        figures_of(run(ANSWER, failed), 1.0, 0.5, 80.0)


def test_doubts_stand_below_their_figure_and_in_what_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        gateway_load,
        "measure_throughput",
        lambda *_: Measured(figures_of(run(ANSWER, cpu=SEEN), 1.02, 0.47, 80.0).figures, ["late"]),
    )
    measured = throughput(200, 1.0)
    assert measured.warnings == ["late"]
    lines = capsys.readouterr().out.splitlines()
    assert "generator 0.90 cores, others 0.10, stolen 0.01" in lines[0]
    assert lines[1:] == ["  doubtful: late"]
