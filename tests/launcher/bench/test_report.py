"""The tables of one run, and its result file."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from kvrelay.launcher.bench.records import RunResult, read_result
from kvrelay.launcher.bench.report import cpu_line, print_report, time_text, write_result
from kvrelay.launcher.errors import BenchError
from tests.launcher.bench.results import CPU, PARTS, result


def printed(run: RunResult) -> str:
    console = Console(file=io.StringIO(), width=80)
    print_report(run, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_report_says_everything_in_80_columns() -> None:
    text = printed(result())
    for part in ("warning: the generator was late", "1 failed: http 503 (no room)", "80.0%", "250 ms", "20.0 ms"):
        assert part in text
    for part in (
        "accept",
        "queue",
        "prefill",
        "transfer wait",
        "first decode step",
        "network and client",
        "= first token",
        "others 0.05",
    ):
        assert part in text
    assert "…" not in text.replace("  … ", "")  # no cell was cut


def test_a_name_is_shown_as_it_is() -> None:
    name = "fp8 [bold] a|b [/]"
    assert name in printed(result(name))


def test_an_example_of_a_failure_is_a_counted_one() -> None:
    failed = result().requests[-1]
    warmup = msgspec.structs.replace(failed, is_warmup=True, error_text="still starting")
    text = printed(result(requests=[warmup, failed]))
    assert "1 failed: http 503 (no room)" in text
    assert "still starting" not in text


def test_parts_of_bursts_are_shown_apart() -> None:
    run = result()
    burst = msgspec.structs.replace(run.requests[0], stream="burst", parts=PARTS)
    text = printed(result(requests=[*run.requests[:-1], burst]))
    assert "main: where the time went (4 requests" in text
    assert "burst: where the time went (1 requests" in text
    assert "\nwhere the time went" not in text


def test_the_cpu_line_says_whose_the_others_may_be() -> None:
    assert "others 0.05" in cpu_line(CPU)
    line = cpu_line(msgspec.structs.replace(CPU, server=None))
    assert "others (a server on this machine too) 0.05" in line
    assert "late by at most 3.00 ms" in line


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00123, "1.23 ms"), (0.0123, "12.3 ms"), (0.123, "123 ms"), (1.234, "1.23 s"), (123.4, "123 s")],
)
def test_times(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


def test_a_result_has_its_figures_for_readers_before_its_requests(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_result(path, result())
    document = json.loads(path.read_text())
    names = list(document)
    assert names.index("summary") == len(names) - 2
    assert names[-1] == "requests"
    summary = document["summary"]
    whole, main, burst = summary["streams"]
    assert summary["window_s"] == 2.0
    assert [stream["name"] for stream in (whole, main, burst)] == ["all", "main", "burst"]
    assert whole["output_tokens_per_s"] == 100.0
    assert (whole["errors"], main["itl"]["count"], burst["ttft"]) == ({"http 503": 1}, 4 * 49, None)
    assert main["parts"]["first_token"]["prefill"]["p99"] == 0.2
    assert main["goodput_per_s"] == 2.0


def test_the_figures_in_a_file_are_not_believed(tmp_path: Path) -> None:
    """An edited figure in a result file, or a file without figures, is read as the same result."""
    path = tmp_path / "result.json"
    write_result(path, result())
    document = json.loads(path.read_text())
    document["summary"]["streams"][0]["output_tokens_per_s"] = 1e9
    path.write_text(json.dumps(document))
    assert read_result(path) == result()
    del document["summary"]
    for request in document["requests"]:
        del request["has_usage"]
    path.write_text(json.dumps(document))
    assert read_result(path) == result()


@pytest.mark.parametrize("content", [b"", b"{}", b'{"format": 99}', b"[1]"])
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(BenchError, match=r"x\.json"):
        read_result(path)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_result(path, msgspec.structs.replace(result(), format=2))
    with pytest.raises(BenchError, match="format 2; this version reads format 1"):
        read_result(path)


def test_every_figure_stands_in_its_own_cell() -> None:
    run = result()
    late = msgspec.structs.replace(
        run.requests[0], chunk_s=[0.6 + 0.02 * place for place in range(50)], finished_s=1.58
    )
    text = printed(result(requests=[late, *run.requests[1:]], slo={"ttft": 0.5}))
    rows = {row[0]: row[1:] for line in text.splitlines() if (row := [cell for cell in line.split("  ") if cell])}
    rows = {name.strip(): [cell.strip() for cell in cells] for name, cells in rows.items()}
    # Five sent, four answered in two seconds, three of them within the limit; 200 output and 400 input tokens.
    assert rows["all"] == ["5", "1", "2.00", "100.0", "300.0", "400", "200", "60.0%", "1.50"]
    assert rows["first token"][:3] == ["4", "338 ms", "250 ms"]
    assert rows["end to end"][:3] == ["4", "1.32 s", "1.23 s"]
