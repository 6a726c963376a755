"""The comparison table of several runs."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from kvrelay.launcher import cli
from kvrelay.launcher.bench.compare import comparison_table, differences, ratio_text, with_distinct_names
from kvrelay.launcher.bench.records import RunResult
from kvrelay.launcher.bench.report import write_result
from tests.launcher.bench.results import result


def good(name: str, **changes: object) -> RunResult:
    """A run without the failed burst."""
    return result(name, requests=result().requests[:-1], **changes)


def lines_of(*results: RunResult) -> dict[str, list[str]]:
    """The cells of each row, by the row's name."""
    console = Console(file=io.StringIO(), width=100)
    console.print(comparison_table(results))
    assert isinstance(console.file, io.StringIO)
    cells = [
        [cell.strip() for cell in line.split("  ") if cell.strip()] for line in console.file.getvalue().splitlines()
    ]
    return {row[0]: row[1:] for row in cells if row}


def test_a_comparison_gives_ratios_and_their_direction() -> None:
    lines = lines_of(result("slow", gap_s=0.04), result("fast"))
    assert lines["all: inter-token p50"] == ["40.0 ms", "20.0 ms", "0.50 times, better"]
    assert lines["all: first token p50"] == ["250 ms", "250 ms", "1.00 times"]
    assert ratio_text(2.0, is_less_better=True).endswith("2.00 times, worse[/]")
    assert ratio_text(2.0, is_less_better=False).endswith("2.00 times, better[/]")


def test_what_differs_is_named() -> None:
    first = good("a", settings={"input_len": "100", "seed": "0", "url": "x"}, environment={"cpu": "one", "torch": "2"})
    other = good(
        "b", settings={"input_len": "200", "seed": "0"}, environment={"cpu": "two"}, model="n", slo={"e2e": 2.0}
    )
    assert differences([first, first]) == []
    assert differences([first, other]) == [
        "a and b differ in: cpu one and two, input_len 100 and 200, model m and n, "
        "slo itl=100 ms,ttft=1.00 s and e2e=2.00 s, torch 2 and unset"
    ]


def test_failures_are_counted() -> None:
    assert lines_of(good("a"), result("b"))["all: failed"] == ["0", "1", "-"]
    assert lines_of(result("a"), good("b"))["all: failed"] == ["1", "0", "0.00 times, better"]


def test_compare_reads_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in paths:
        write_result(path, result(path.stem, environment={"cpu": "one", "torch": path.stem}))
    files = [str(path) for path in paths]
    assert cli.run(["bench", "compare", *files]) == 0
    text = capsys.readouterr().out
    assert "inter-token p90" in text
    assert "a and b differ in: torch a and b" in text
    assert cli.run(["bench", "compare", files[0]]) == 1
    assert "two or more" in capsys.readouterr().err


def test_streams_of_any_run_have_lines() -> None:
    """The burst of one run has its own rows, with "-" for the run without bursts."""
    lines = lines_of(good("a"), result("b"))
    assert lines["main: inter-token p50"] == ["20.0 ms", "20.0 ms", "1.00 times"]
    assert lines["burst: failed"] == ["-", "1", "-"]


@pytest.mark.parametrize(
    ("paths", "names"), [("a/r b/r x", "m (a/r),m (b/r),x"), ("a/r.json b/s.json x", "m (r),m (s),x")]
)
def test_runs_of_one_name_are_told_apart(paths: str, names: str) -> None:
    runs = with_distinct_names([result("m"), result("m"), result("x")], list(map(Path, paths.split())))
    assert ",".join(run.name for run in runs) == names


def test_names_are_shown_as_they_are() -> None:
    assert lines_of(good("[bold] a"), good("b [/]"))["[bold] a"] == ["b [/]", "ratio"]


def test_goodput_is_that_of_what_met_the_slo() -> None:
    late = msgspec.structs.replace(result().requests[0], chunk_s=[0.6 + 0.02 * place for place in range(50)])
    slo = {"ttft": 0.5}
    slow = result("slow", requests=[late, *result().requests[1:]], slo=slo)
    rows = lines_of(slow, result("fast", slo=slo))
    assert rows["all: goodput req/s"] == ["1.50", "2.00", "1.33 times, better"]
    assert rows["all: requests/s"] == ["2.00", "2.00", "1.00 times"]
