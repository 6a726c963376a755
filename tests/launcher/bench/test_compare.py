"""Several runs side by side."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from kvrelay.launcher.bench.compare import (
    comparison_doubts,
    comparison_table,
    differences,
    ratio_text,
    run_compare,
    with_distinct_names,
)
from kvrelay.launcher.bench.records import ResultFileError, RunResult
from kvrelay.launcher.bench.result_file import write_result
from tests.launcher.bench.results import CPU, result


def good(name: str, **changes: object) -> RunResult:
    """A run without its failed burst."""
    return result(name, requests=result().requests[:-1], **changes)


def lines_of(*results: RunResult) -> dict[str, list[str]]:
    """Cells by the name of their line."""
    console = Console(file=io.StringIO(), width=100)
    console.print(comparison_table(results))
    assert isinstance(console.file, io.StringIO)
    cells = [
        [cell.strip() for cell in line.split("  ") if cell.strip()] for line in console.file.getvalue().splitlines()
    ]
    return {row[0]: row[1:] for row in cells if row}


def test_a_comparison_gives_ratios_and_their_direction() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(comparison_table([result("slow", gap_s=0.04), result("fast")]))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    lines = {line.split("  ")[0].strip(): line for line in text.splitlines() if ":" in line}
    assert "0.50 times, better" in lines["all: inter-token p50"]
    assert "1.00 times" in lines["all: first token p50"]
    assert "better" not in lines["all: first token p50"]
    assert ratio_text(2.0, is_less_better=True).endswith("2.00 times, worse[/]")
    assert ratio_text(2.0, is_less_better=False).endswith("2.00 times, better[/]")


def test_loads_that_differ_are_named() -> None:
    busy = msgspec.structs.replace(CPU, others=0.8)
    other = result("b", settings={"input_len": "200", "seed": "0"}, environment={"cpu": "two"}, cpu=busy)
    doubts = comparison_doubts([result("a"), other])
    assert [doubt.split(":")[0] for doubt in doubts[2:]] == [
        "a and b are different loads",
        "a and b ran on different machines",
        "others took 0.05 cores during a and 0.80 during b; measure again, alternating",
    ]
    assert "input_len 100 and 200" in doubts[2]


def test_a_server_that_may_be_one_of_the_others_is_no_disturbance() -> None:
    """With --url the CPU of a server on this machine is in the others'."""
    unknown = msgspec.structs.replace(CPU, server=None, others=1.55)
    assert comparison_doubts([good("a", warnings=[]), good("b", cpu=unknown, warnings=[])]) == []
    stolen = msgspec.structs.replace(unknown, stolen=0.5)
    assert comparison_doubts([good("a", warnings=[]), good("b", cpu=stolen, warnings=[])]) == [
        "the hypervisor took 0.00 cores during a and 0.50 during b; measure again, alternating"
    ]


def test_what_may_be_compared_on_purpose_is_named() -> None:
    environment = {"cpu": "one", "kvrelay": "0.1.0", "commit": "abc", "torch": "2.9"}
    settings = {"input_len": "100", "seed": "0"}
    first = good("a", environment=environment, settings={**settings, "serve": "prefill=0"})
    other = good(
        "b", environment={"cpu": "one", "kvrelay": "0.2.0", "commit": "def", "python": "3.12"}, settings=settings
    )
    assert differences([first, first]) == []
    assert differences([first, other]) == [
        "a and b differ in: serve prefill=0 and unset, commit abc and def, kvrelay 0.1.0 and 0.2.0, "
        "python unset and 3.12, torch 2.9 and unset"
    ]
    assert comparison_doubts([first, other]) == []  # a machine or a load would be


def test_compare_reads_files_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in paths:
        write_result(path, result(path.stem, environment={"cpu": "one", "torch": path.stem}))
    assert run_compare(paths, tmp_path / "plots") == 0
    text = capsys.readouterr().out
    assert "inter-token p90" in text
    assert "a and b differ in: torch a and b" in text
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    assert names == {"a-latency.png", "b-latency.png", "itl.png", "cdf.png"}
    with pytest.raises(ResultFileError, match="two or more"):
        run_compare(paths[:1], None)


def test_runs_alike_raise_no_doubt() -> None:
    assert comparison_doubts([good("a"), good("b")]) == []


def test_failures_are_named_and_counted() -> None:
    doubts = comparison_doubts([good("a"), result("b")])
    assert doubts == ["1 of 5 requests of b failed; its times to the first token and of whole answers leave them out"]
    assert lines_of(good("a"), result("b"))["all: failed"] == ["0", "1", "-"]
    assert lines_of(result("a"), good("b"))["all: failed"] == ["1", "0", "0.00 times, better"]


def test_another_model_or_slo_is_named() -> None:
    doubts = comparison_doubts([good("a"), good("b", model="n", slo={})])
    assert doubts == [
        "a asked for the model m and b for n: are they the same weights in the same number format?",
        "goodput is not comparable: the SLO of a is itl=100 ms,ttft=1.00 s and of b none",
    ]


def test_streams_of_any_run_have_lines() -> None:
    """A run without bursts is all main load."""
    lines = lines_of(good("a"), result("b"))
    assert lines["main: inter-token p50"] == ["20.0 ms", "20.0 ms", "1.00 times"]
    assert lines["burst: failed"] == ["-", "1", "-"]


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    def names(*paths: str) -> list[str]:
        runs = [result("m") for _ in paths]
        return [run.name for run in with_distinct_names([*runs, result("x")], [*map(Path, paths), Path("x.json")])]

    assert names("a.json", "b.json") == ["m (a)", "m (b)", "x"]
    assert names("a/r.json", "b/r.json") == ["m (r) (a/r.json)", "m (r) (b/r.json)", "x"]
    assert names("a.json") == ["m", "x"]


def test_names_are_shown_as_they_are() -> None:
    assert lines_of(good("[bold] a"), good("b [/]"))["[bold] a"] == ["b [/]", "ratio"]


def test_a_place_for_plots_that_is_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_result(path, result())
    with pytest.raises(ResultFileError, match=r"cannot write plots to .*a\.json"):
        run_compare([path, path], path)


def test_goodput_is_that_of_what_met_the_slo() -> None:
    late = msgspec.structs.replace(result().requests[0], chunk_s=[0.6 + 0.02 * place for place in range(50)])
    slo = {"ttft": 0.5}
    slow = result("slow", requests=[late, *result().requests[1:]], slo=slo)
    rows = lines_of(slow, result("fast", slo=slo))
    (goodput,) = [cells for name, cells in rows.items() if name.startswith("all: good")]
    assert goodput == ["1.50", "2.00", "1.33 times, better"]
    (requests,) = [cells for name, cells in rows.items() if name.startswith("all: requests")]
    assert requests == ["2.00", "2.00", "1.00 times"]
