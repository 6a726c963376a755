"""Two pools compared with workers of both roles: scaled loads, medians and ratios, the table and the curve."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from msgspec.structs import replace
from peers.plots import curves_plot
from peers.ways import ONE_EACH, ONE_OF_BOTH, POOLS, Case, ClosedLoop, Point, paired, table
from split import budgets_of, options_of

from tests.benchmarks.results import record, run, steps


def test_a_load_shrinks_in_requests_and_lengths_and_keeps_its_name_apart() -> None:
    loop = ClosedLoop(64, 192, 300, 60)
    assert loop.load.words == "192 requests, 64 at a time, lognormal:300,75 in / lognormal:60,15 out"
    assert loop.scaled(0.1) == ClosedLoop(19, 19, 30, 6)
    assert loop.scaled(0.001) == ClosedLoop(1, 1, 8, 4)
    assert loop.name == "64x300"


def test_a_run_with_a_refused_request_has_figures_of_the_others() -> None:
    refused = replace(record("main", 0.0, [9.0]), error="http 503", chunk_s=[])
    point = Point.of(run(record("main", 1.0, steps(1.5, 0.02, 50)), record("main", 1.0, steps(1.7, 0.02, 50)), refused))
    assert point is not None
    assert (point.ttft_p50_s, point.num_refused) == (pytest.approx(0.6), 1)
    assert (point.gap_p99_s, point.run_s) == (pytest.approx(0.02), pytest.approx(9.0))
    assert Point.of(run(refused)) is None


def test_ratios_are_of_the_rounds_in_which_both_succeeded() -> None:
    ours, theirs = [Point(2.0, 0.04, 10.0, 0), None, Point(4.0, 0.02, 10.0, 0)], [Point(1.0, 0.02, 10.0, 0)] * 3
    assert paired(ours, theirs) == (3.0, 1.5, 1.0)
    assert paired([None], theirs) is None


POINTS = {
    Case("16x400", budget, way): [Point(ttft_s, gap_s, 20.0, 0), None]
    for way, factor in ((POOLS, 1.5), (ONE_OF_BOTH, 1.0), (ONE_EACH, 3.0))
    for budget, ttft_s, gap_s in (("20", 2.0 * factor, 0.02), ("none", 0.5 * factor, 0.2))
}


def test_the_table_has_a_row_for_each_way_and_the_ratios_below() -> None:
    lines = table({**POINTS, Case("8x3000", "auto", POOLS): [None]}).splitlines()
    assert "| 16x400 | 20 | `1 prefill + 1 decode` | 3.00 s | 20 ms | 20.0 s | 0 | 0.00 |" in lines
    assert "| 8x3000 | auto | `1 prefill + 1 decode` | - | - | - | - | - |" in lines
    assert "| 16x400 | none | 1.50 | 1.00 | 1.00 |" in lines
    assert "| 16x400 | none | 0.50 | 1.00 | 1.00 |" in lines
    assert lines[-1] == "| 8x3000 | auto | - | - | - |"


def test_the_curve_is_drawn_also_where_a_round_failed(tmp_path: Path) -> None:
    path = curves_plot({**POINTS, Case("8x3000", "auto", POOLS): [None]}, tmp_path / "plots" / "curve.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_budget_is_an_option_of_all_ways() -> None:
    context, option = click.Context(click.Command("split")), click.Option(["--budgets"])
    assert budgets_of(context, option, "20, auto,none") == ("20", "auto", "none")
    with pytest.raises(click.BadParameter, match="'fast' is neither"):
        budgets_of(context, option, "20,fast")
    assert [options_of(budget) for budget in ("auto", "none", "20")] == [
        (),
        ("--itl-budget-ms", "0"),
        ("--itl-budget-ms", "20"),
    ]
