from __future__ import annotations

import pytest
from peers.figures import FIGURES, IDLE, LOADED, decode_only, stutter, throughput

from kvrelay.launcher.bench.records import RequestRecord, RunResult


def record(stream: str, sent_s: float, chunk_s: list[float]) -> RequestRecord:
    return RequestRecord(
        index=0,
        stream=stream,
        due_s=sent_s,
        sent_s=sent_s,
        finished_s=chunk_s[-1],
        prompt_tokens=128,
        planned_output_tokens=len(chunk_s),
        output_tokens=len(chunk_s),
        chunk_s=chunk_s,
    )


def run(*records: RequestRecord) -> RunResult:
    duration_s = max(item.finished_s for item in records) - min(item.sent_s for item in records)
    return RunResult(
        name="",
        started_at="",
        duration_s=duration_s,
        url="",
        model="",
        settings={},
        environment={},
        requests=list(records),
        cpu=None,
    )


def steps(first_s: float, step_s: float, count: int) -> list[float]:
    return [first_s + step_s * number for number in range(count)]


def test_throughput_counts_the_whole_run() -> None:
    values = throughput({LOADED: run(record("main", 0.0, steps(1.0, 1.0, 4)), record("main", 1.0, steps(4.0, 1.0, 5)))})
    assert values == {"tokens_per_s": pytest.approx(9 / 8), "ttft_p50_s": 2.0}


def test_decode_only_leaves_the_first_token_out() -> None:
    values = decode_only({LOADED: run(record("main", 0.0, steps(5.0, 0.5, 11)))})
    assert values["decode_tokens_per_s"] == pytest.approx(2.0)
    assert values["ttft_p50_s"] == 5.0


def test_stutter_sees_only_the_time_of_the_long_prompts() -> None:
    idle = run(record("main", 0.0, steps(1.0, 0.02, 200)))
    # 20 ms before and after, 50 ms while the long prompt is answered: from 3.0 to 5.0.
    loaded = run(
        record("main", 0.0, [*steps(1.0, 0.02, 100), *steps(3.02, 0.05, 39), *steps(5.02, 0.02, 1000)]),
        record("burst", 3.0, [4.5, 5.0]),
    )
    values = stutter({IDLE: idle, LOADED: loaded})
    assert values["itl_idle_p99_s"] == pytest.approx(0.02)
    assert values["itl_burst_p99_s"] == pytest.approx(0.05)
    assert values["itl_p99_ratio"] == pytest.approx(2.5)
    assert values["ttft_long_p50_s"] == pytest.approx(1.5)


def test_targets_name_sides_of_their_figure() -> None:
    for figure in FIGURES:
        for target in figure.targets:
            named = {*target.ours, *([] if target.theirs is None else [target.theirs])}
            assert named <= set(figure.sides), figure.name
