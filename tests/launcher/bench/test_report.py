"""Tables of one run, and the file that it is read from."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from kvrelay.launcher.bench.records import ResultFileError, RunResult, read_result, write_result
from kvrelay.launcher.bench.report import markdown_table, print_report, rate_text, time_text
from tests.launcher.bench.results import result


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


def test_a_name_is_shown_as_it_is() -> None:
    name = "fp8 [bold] a|b [/]"
    assert name in printed(result(name))
    assert markdown_table([result(name)]).splitlines()[2].startswith("| fp8 [bold] a\\|b [/] | 5 (1) |")


def test_an_example_of_a_failure_is_a_counted_one() -> None:
    failed = result().requests[-1]
    warmup = msgspec.structs.replace(failed, is_warmup=True, error_text="still starting")
    text = printed(result(requests=[warmup, failed]))
    assert "1 failed: http 503 (no room)" in text
    assert "still starting" not in text


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


@pytest.mark.parametrize(("per_s", "text"), [(0.0, "0.00"), (6.144, "6.14"), (61.44, "61.4"), (12345.6, "12346")])
def test_rates(per_s: float, text: str) -> None:
    assert rate_text(per_s) == text
