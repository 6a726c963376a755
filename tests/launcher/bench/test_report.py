"""What people read: tables, comparisons, pictures."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from matplotlib.image import imread
from rich.console import Console

from kvrelay.launcher.bench.compare import comparison_doubts, comparison_table, ratio_text, run_compare
from kvrelay.launcher.bench.plots import write_plots
from kvrelay.launcher.bench.records import (
    CpuUse,
    RequestRecord,
    ResultFileError,
    RunResult,
    TtftParts,
    read_result,
    write_result,
)
from kvrelay.launcher.bench.report import markdown_table, print_report, time_text

PARTS = TtftParts(
    accept_s=0.001, queue_s=0.01, prefill_s=0.2, transfer_s=0.004, first_step_s=0.02, ttft_s=0.25, second_token_s=0.28
)
CPU = CpuUse(num_cores=2, generator=0.1, server=1.5, others=0.05, stolen=0.0, generator_max_lag_s=0.003)


def result(name: str = "run", *, gap_s: float = 0.02, **changes: object) -> RunResult:
    """Four streams of 50 tokens, and a burst of one that fails."""
    requests = [
        RequestRecord(
            index=index,
            stream="main",
            due_s=0.1 * index,
            sent_s=0.1 * index,
            finished_s=0.1 * index + 0.25 + 49 * gap_s,
            prompt_tokens=100,
            planned_output_tokens=50,
            output_tokens=50,
            chunk_s=[0.1 * index + 0.25 + place * gap_s for place in range(50)],
            parts=PARTS,
        )
        for index in range(4)
    ]
    requests.append(
        RequestRecord(
            index=4,
            stream="burst",
            due_s=0.5,
            sent_s=0.5,
            finished_s=0.6,
            prompt_tokens=1500,
            planned_output_tokens=1,
            output_tokens=0,
            error="http 503",
            error_text="no room",
        )
    )
    values: dict[str, object] = {
        "name": name,
        "started_at": "2026-01-01T00:00:00+00:00",
        "duration_s": 2.0,
        "url": "http://127.0.0.1:1",
        "model": "m",
        "settings": {"input_len": "100", "seed": "0"},
        "environment": {"cpu": "one"},
        "slo": {"ttft": 1.0, "itl": 0.1},
        "requests": requests,
        "cpu": CPU,
        "warnings": ["the generator was late"],
    }
    return RunResult(**{**values, **changes})  # type: ignore[arg-type]


def printed(run: RunResult) -> str:
    console = Console(file=io.StringIO(), width=80)
    print_report(run, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_report_says_everything_in_80_columns() -> None:
    text = printed(result())
    for part in ("warning: the generator was late", "1 failed: http 503 (no room)", "80.0%", "250 ms", "20.0 ms"):
        assert part in text
    for part in ("accept", "queue", "prefill", "transfer wait", "first decode step", "= first token", "others 0.05"):
        assert part in text
    assert "…" not in text.replace("  … ", "")  # nothing was cut


def test_a_report_of_nothing_does_not_fail() -> None:
    assert "run" in printed(result(requests=[], cpu=None, warnings=[], slo={}))


def test_markdown_has_a_line_for_each_stream() -> None:
    lines = markdown_table([result("a"), result("b", cpu=None)]).splitlines()
    assert len(lines) == 2 + 2 * 3
    assert lines[2] == "| a | 5 (1) | 100 | 300 | 250 ms / 250 ms | 20.0 ms / 20.0 ms / 20.0 ms | 0.05 cores |"
    assert lines[7].endswith("| - / - | - / - / - | ? |")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00123, "1.23 ms"), (0.0123, "12.3 ms"), (0.123, "123 ms"), (1.234, "1.23 s"), (123.4, "123 s")],
)
def test_times(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    write_result(path, result())
    assert read_result(path) == result()


@pytest.mark.parametrize("content", [b"", b"{}", b'{"format": 99}', b"[1]"])
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(ResultFileError, match=r"x\.json"):
        read_result(path)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_result(path, msgspec.structs.replace(result(), format=2))
    with pytest.raises(ResultFileError, match="format 2; this version reads format 1"):
        read_result(path)


def test_a_comparison_gives_ratios_and_their_direction() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(comparison_table([result("slow", gap_s=0.04), result("fast")]))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    lines = {line.split("  ")[0].strip(): line for line in text.splitlines() if ":" in line}
    assert "0.50x better" in lines["all: inter-token p50"]
    assert "1.00x" in lines["all: first token p50"]
    assert "better" not in lines["all: first token p50"]
    assert ratio_text(2.0, is_time=True).endswith("2.00x worse[/]")
    assert ratio_text(2.0, is_time=False).endswith("2.00x better[/]")


def test_loads_that_differ_are_named() -> None:
    busy = msgspec.structs.replace(CPU, others=0.8)
    other = result("b", settings={"input_len": "200", "seed": "0"}, environment={"cpu": "two"}, cpu=busy)
    doubts = comparison_doubts([result("a"), other])
    assert [doubt.split(":")[0] for doubt in doubts] == [
        "a and b are different loads",
        "a and b ran on different machines",
        "others took 0.05 cores during a and 0.80 during b; measure again, alternating",
    ]
    assert "input_len 100 and 200" in doubts[0]
    assert comparison_doubts([result("a"), result("b")]) == []


def test_compare_reads_files_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in paths:
        write_result(path, result(path.stem))
    assert run_compare(paths, tmp_path / "plots") == 0
    assert "inter-token" in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    assert names == {"a-latency.png", "b-latency.png", "itl.png", "cdf.png", "throughput.png"}
    with pytest.raises(ResultFileError, match="two or more"):
        run_compare(paths[:1], None)


@pytest.mark.parametrize("requests", [None, []])
def test_plots_are_pictures(requests: list[RequestRecord] | None, tmp_path: Path) -> None:
    run = result() if requests is None else result(requests=requests)
    paths = write_plots([run], tmp_path)
    assert len(paths) == 4
    for path in paths:
        pixels = imread(path)
        assert pixels.shape[1] == 1080
        assert len({tuple(pixel) for pixel in pixels[::7, ::7].reshape(-1, pixels.shape[2])}) > 2  # not blank


def test_points_of_plots_are_the_runs(tmp_path: Path) -> None:
    """A gap ten times as long moves pixels: the pictures are of these runs."""
    even, uneven = write_plots([result()], tmp_path / "a")[1], write_plots([result(gap_s=0.2)], tmp_path / "b")[1]
    assert even.read_bytes() != uneven.read_bytes()
