"""Shows a run as tables on a terminal, and writes it as a file.

The file has the figures beside the records. ``records.read_result`` reads only the records, so figures are computed in one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvrelay.launcher.bench.records import CpuUse, RunResult
from kvrelay.launcher.bench.summary import ALL, Distribution, PartsSummary, StreamSummary, summarize

_COLUMNS = ("mean", "p50", "p90", "p99", "max")


def print_report(result: RunResult, console: Console) -> None:
    """Print a run on one screen: warnings first, then rates, times, TTFT parts, and CPU use."""
    summary = summarize(result)
    for warning in result.warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False, markup=False)
    console.print(_rates(result.name, summary.streams))
    for kind, count in summary.all.errors.items():
        console.print(f"{count} failed: {kind}{_example(result, kind)}", style="red", highlight=False, markup=False)
    console.print(_times(summary.streams))
    # Times of all streams together would mislead: a burst's prompts differ from the main load's.
    for stream in summary.streams if len(summary.streams) == 1 else summary.streams[1:]:
        if stream.parts is not None:
            console.print(_parts(stream.name, stream.parts))
    if result.cpu is not None:
        console.print(cpu_line(result.cpu), highlight=False, markup=False)


def write_result(path: Path, result: RunResult) -> None:
    """Write ``result`` as indented JSON, with its figures as ``summary`` before the requests. Raises OSError."""
    document: dict[str, Any] = msgspec.to_builtins(result)
    requests = document.pop("requests")  # thousands of lines, so they come last
    document |= {"summary": msgspec.to_builtins(summarize(result)), "requests": requests}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))


def time_text(seconds: float) -> str:
    """The time with about three digits, in s or ms."""
    if abs(seconds) >= 100:
        return f"{seconds:.0f} s"
    if abs(seconds) >= 1:
        return f"{seconds:.2f} s"
    if abs(seconds) >= 0.1:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds * 1e3:.2f} ms" if abs(seconds) < 0.01 else f"{seconds * 1e3:.1f} ms"


def rate_text(per_s: float) -> str:
    """The rate with three digits, or all digits before the point."""
    digits = 0 if per_s >= 100 else 1 if per_s >= 10 else 2
    return f"{per_s:.{digits}f}"


def cpu_line(cpu: CpuUse) -> str:
    """The CPU use of the generator's machine as one line."""
    server = "" if cpu.server is None else f"server {cpu.server:.2f}, "
    others = "others" if cpu.server is not None else "others (a server on this machine too)"
    return (
        f"CPU of this machine, in cores of {cpu.num_cores}: {server}generator {cpu.generator:.2f}, "
        f"{others} {cpu.others:.2f}, stolen {cpu.stolen:.2f}; the generator's loop was late by at most "
        f"{time_text(cpu.generator_max_lag_s)}"
    )


def _rates(name: str, streams: Sequence[StreamSummary]) -> Table:
    table = Table(title=escape(name), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for column in ("", "sent", "failed", "req/s", "out tok/s", "all tok/s", "in", "out"):
        table.add_column(column, justify="left" if not column else "right")
    has_slo = streams[0].num_within_slo is not None
    if has_slo:
        table.add_column("in SLO", justify="right", min_width=len("100.0%"))  # other columns may wrap their titles
        table.add_column("good/s", justify="right")
    for stream in streams:
        row = [
            stream.name,
            str(stream.num_requests),
            str(stream.num_requests - stream.num_ok),
            f"{stream.requests_per_s:.2f}",
            f"{stream.output_tokens_per_s:.1f}",
            f"{stream.total_tokens_per_s:.1f}",
            str(stream.prompt_tokens),
            str(stream.output_tokens),
        ]
        if stream.num_within_slo is not None and stream.goodput_per_s is not None:
            share = stream.num_within_slo / stream.num_requests if stream.num_requests else 0.0
            row += [f"{share:.1%}", f"{stream.goodput_per_s:.2f}"]
        table.add_row(*row)
    return table


def _times(streams: Sequence[StreamSummary]) -> Table:
    table = _distribution_table("", "count")
    for index, stream in enumerate(streams):
        prefix = "" if stream.name == ALL else f"{stream.name}: "
        rows = [("first token", stream.ttft), ("inter-token", stream.itl), ("end to end", stream.e2e)]
        if index == 0:
            rows.insert(1, ("  … from sending", stream.ttft_from_send))
            rows.insert(3, ("  … request means", stream.tpot))
        for name, values in rows:
            table.add_row(prefix + name, str(0 if values is None else values.count), *_shown(values))
        if index + 1 < len(streams):
            table.add_section()
    return table


def _parts(stream_name: str, parts: PartsSummary) -> Table:
    of_name = "" if stream_name == ALL else f"{stream_name}: "
    table = _distribution_table(f"{of_name}where the time went ({parts.num_requests} requests; means add up)")
    for name, values in parts.first_token.items():
        table.add_row(f"  {name}", *_shown(values))
    table.add_row("= first token", *_shown(parts.first_token_whole))
    if parts.second_token_whole is not None:
        table.add_section()
        for name, values in parts.second_token.items():
            table.add_row(f"  {name}", *_shown(values))
        table.add_row("= to second token", *_shown(parts.second_token_whole))
    return table


def _distribution_table(title: str, *first_columns: str) -> Table:
    table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("")
    for column in (*first_columns, *_COLUMNS):
        table.add_column(column, justify="right")
    return table


def _shown(values: Distribution | None) -> list[str]:
    if values is None:
        return ["-"] * len(_COLUMNS)
    return [time_text(value) for value in (values.mean, values.p50, values.p90, values.p99, values.max)]


def _example(result: RunResult, kind: str) -> str:
    counted = (record for record in result.requests if record.error == kind and not record.is_warmup)
    text = next((record.error_text for record in counted if record.error_text), None)
    return "" if text is None else f" ({text})"
