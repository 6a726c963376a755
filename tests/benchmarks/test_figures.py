from __future__ import annotations

import pytest
from peers.figures import FIGURES, IDLE, LOADED, burst_window, decode_only, gaps_of_streams, stutter, throughput

from tests.benchmarks.results import record, run, steps, stuttering


def test_throughput_counts_the_whole_run() -> None:
    values = throughput({LOADED: run(record("main", 0.0, steps(1.0, 1.0, 4)), record("main", 1.0, steps(4.0, 1.0, 5)))})
    assert values == {"tokens_per_s": pytest.approx(9 / 8), "ttft_p50_s": 2.0}


def test_decode_only_leaves_the_first_token_out() -> None:
    values = decode_only({LOADED: run(record("main", 0.0, steps(5.0, 0.5, 11)))})
    assert values["decode_tokens_per_s"] == pytest.approx(2.0)
    assert values["ttft_p50_s"] == 5.0


def test_stutter_sees_only_the_time_of_the_long_prompts() -> None:
    idle = run(record("main", 0.0, steps(1.0, 0.02, 200)))
    loaded = stuttering()
    values = stutter({IDLE: idle, LOADED: loaded})
    assert values["itl_idle_p99_s"] == pytest.approx(0.02)
    assert values["itl_burst_p99_s"] == pytest.approx(0.05)
    assert values["itl_p99_ratio"] == pytest.approx(2.5)
    assert values["ttft_long_p50_s"] == pytest.approx(1.5)


def test_a_picture_has_the_gaps_of_the_window_and_those_beside_it() -> None:
    loaded = stuttering()
    assert burst_window(loaded) == (3.0, 5.0)
    during = [gap for _, gap in gaps_of_streams(loaded, *burst_window(loaded))]
    assert max(during) == pytest.approx(0.05)
    assert len(during) < len(gaps_of_streams(loaded, 0.0, 10.0))


def test_targets_name_sides_of_their_figure() -> None:
    for figure in FIGURES:
        for target in figure.targets:
            named = {*target.ours, *([] if target.theirs is None else [target.theirs])}
            assert named <= set(figure.sides), figure.name
