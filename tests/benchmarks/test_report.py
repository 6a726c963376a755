from __future__ import annotations

from dataclasses import replace

import pytest
from peers.figures import LOADED, Figure, Load, Target, throughput
from peers.report import markdown, medians, outcomes, paired
from peers.rounds import Sample

FIGURE = Figure(
    "total",
    "output tokens/s",
    ("split", "local", "peer"),
    {LOADED: Load(8, requests=16)},
    throughput,
    (
        Target("tokens_per_s", ("split", "local"), "peer", 1.1),
        Target("tokens_per_s", ("split",), None, 50.0, is_at_most=True),
        Target("tokens_per_s", ("split",), "absent", 1.0),
    ),
)


def sample(number: int, side: str, value: float | None) -> Sample:
    values = {} if value is None else {"tokens_per_s": value}
    return Sample(
        "total", number, side, values, 1.0, 0.25, None if value else "it fell over", cpu_stolen=0.125, lag_s=0.003
    )


# A machine that slows down from round to round. Within each round ``split`` has twice the value of ``peer``.
SLOWER = [
    sample(0, "split", 200.0),
    sample(0, "local", 120.0),
    sample(0, "peer", 100.0),
    sample(1, "local", 60.0),
    sample(1, "split", 100.0),
    sample(1, "peer", 50.0),
    sample(2, "split", 40.0),
    sample(2, "local", None),
    sample(2, "peer", 20.0),
]


def test_ratios_are_taken_within_a_round() -> None:
    assert paired(SLOWER, "total", "tokens_per_s", "split", "peer") == [2.0, 2.0, 2.0]


def test_a_failed_side_leaves_out_its_rounds_only() -> None:
    assert paired(SLOWER, "total", "tokens_per_s", "local", "peer") == pytest.approx([1.2, 1.2])
    assert medians(SLOWER, "total", "local") == {"tokens_per_s": 90.0}
    assert medians(SLOWER, "total", "absent") == {}


def test_the_better_of_ours_counts() -> None:
    best, itself, absent = outcomes(SLOWER, FIGURE)
    assert (best.side, best.value, best.is_reached) == ("split", 2.0, True)
    assert (itself.value, itself.is_reached) == (100.0, False)
    assert (absent.value, absent.is_reached) == (None, None)


def test_a_ratio_that_should_be_small_takes_the_smaller_of_ours() -> None:
    targets = (Target("tokens_per_s", ("split", "local"), "peer", 1.5, is_at_most=True),)
    figure = Figure("total", "", FIGURE.sides, FIGURE.loads, throughput, targets)
    (best,) = outcomes(SLOWER, figure)
    assert best.side == "local"
    assert best.is_reached


def test_tables_name_what_failed_and_what_was_reached() -> None:
    text = markdown(SLOWER, [FIGURE], {"split": "a", "local": "b", "peer": "c"})
    assert "| split | a | 100 | 0.25 (0.25) | 0.12 (0.12) | 3 (3) ms |" in text
    assert "- local: it fell over" in text
    assert "**2** (2 to 2); split 2, local 1.2 | ≥ 1.1 | yes |" in text
    assert "| not measured | ≥ 1 | - |" in text
    assert "Rounds: 3" in text


def test_what_makes_samples_doubtful_stands_under_the_table_once() -> None:
    late = "the loop was late by 120 ms"
    warned = [replace(sample(number, "split", 200.0), warnings=(late,)) for number in range(2)]
    text = markdown(warned, [FIGURE], {"split": "a", "local": "b", "peer": "c"})
    assert text.count(f"- doubtful, split: {late}\n") == text.count("doubtful") == 1


def test_figures_without_samples_are_left_out() -> None:
    assert markdown([], [FIGURE], {}) == ""
