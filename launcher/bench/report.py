"""A run as a table, on a terminal or in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvrelay.launcher.bench.records import CpuUse, RunResult
from kvrelay.launcher.bench.summary import ALL, Distribution, PartsSummary, StreamSummary, summarize

_COLUMNS = ("mean", "p50", "p90", "p99", "max")


def print_report(result: RunResult, console: Console) -> None:
    """Everything about one run that fits a screen: doubts first, then rates, times, TTFT parts, and who used the CPU."""
    summary = summarize(result)
    for warning in result.warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False, markup=False)
    console.print(_rates(result.name, summary.streams))
    for kind, count in summary.all.errors.items():
        console.print(f"{count} failed: {kind}{_example(result, kind)}", style="red", highlight=False, markup=False)
    console.print(_times(summary.streams))
    if summary.parts is not None:
        console.print(_parts(summary.parts))
    if result.cpu is not None:
        console.print(cpu_line(result.cpu), highlight=False, markup=False)


def markdown_table(results: Sequence[RunResult]) -> str:
    """One line per run and stream: the figures that ``docs/performance.md`` quotes."""
    lines = [
        "| run | requests (failed) | output tok/s | total tok/s | TTFT p50 / p99 | ITL p50 / p99 / max | others' CPU |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        others = "?" if result.cpu is None else f"{result.cpu.others + result.cpu.stolen:.2f} cores"
        for stream in summarize(result).streams:
            name = result.name.replace("|", "\\|") + ("" if stream.name == ALL else f": {stream.name}")
            lines.append(
                f"| {name} | {stream.num_requests} ({stream.num_requests - stream.num_ok}) "
                f"| {rate_text(stream.output_tokens_per_s)} | {rate_text(stream.total_tokens_per_s)} "
                f"| {_pick(stream.ttft, 'p50')} / {_pick(stream.ttft, 'p99')} "
                f"| {_pick(stream.itl, 'p50')} / {_pick(stream.itl, 'p99')} / {_pick(stream.itl, 'max')} | {others} |"
            )
    return "\n".join(lines) + "\n"


def time_text(seconds: float) -> str:
    """Three digits with the unit that suits them."""
    if abs(seconds) >= 100:
        return f"{seconds:.0f} s"
    if abs(seconds) >= 1:
        return f"{seconds:.2f} s"
    if abs(seconds) >= 0.1:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds * 1e3:.2f} ms" if abs(seconds) < 0.01 else f"{seconds * 1e3:.1f} ms"


def rate_text(per_s: float) -> str:
    """Three digits, or all before the point."""
    digits = 0 if per_s >= 100 else 1 if per_s >= 10 else 2
    return f"{per_s:.{digits}f}"


def cpu_line(cpu: CpuUse) -> str:
    """Who used the machine that the generator ran on."""
    server = "" if cpu.server is None else f"server {cpu.server:.2f}, "
    return (
        f"CPU of this machine, in cores of {cpu.num_cores}: {server}generator {cpu.generator:.2f}, others {cpu.others:.2f}, "
        f"stolen {cpu.stolen:.2f}; the generator was late by {time_text(cpu.generator_max_lag_s)} at most"
    )


def _rates(name: str, streams: Sequence[StreamSummary]) -> Table:
    table = Table(title=escape(name), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for column in ("", "sent", "failed", "req/s", "out tok/s", "all tok/s", "in", "out"):
        table.add_column(column, justify="left" if not column else "right")
    has_slo = streams[0].num_within_slo is not None
    if has_slo:
        table.add_column("in SLO", justify="right")
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
    table = _distribution_table("")
    for index, stream in enumerate(streams):
        prefix = "" if stream.name == ALL else f"{stream.name}: "
        rows = [("first token", stream.ttft), ("inter-token", stream.itl), ("end to end", stream.e2e)]
        if index == 0:
            rows.insert(1, ("  … from sending", stream.ttft_from_send))
            rows.insert(3, ("  … request means", stream.tpot))
        for name, values in rows:
            _add(table, prefix + name, values)
        if index + 1 < len(streams):
            table.add_section()
    return table


def _parts(parts: PartsSummary) -> Table:
    table = _distribution_table(f"where the time went, says the server ({parts.num_requests} requests; means add up)")
    for name, values in parts.first_token.items():
        _add(table, f"  {name}", values)
    _add(table, "= first token", parts.first_token_whole)
    if parts.second_token_whole is not None:
        table.add_section()
        for name, values in parts.second_token.items():
            _add(table, f"  {name}", values)
        _add(table, "= first to second token", parts.second_token_whole)
    return table


def _distribution_table(title: str) -> Table:
    table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("")
    for column in ("count", *_COLUMNS):
        table.add_column(column, justify="right")
    return table


def _add(table: Table, name: str, values: Distribution | None) -> None:
    if values is None:
        table.add_row(name, "0", *["-"] * len(_COLUMNS))
        return
    shown = (values.mean, values.p50, values.p90, values.p99, values.max)
    table.add_row(name, str(values.count), *[time_text(value) for value in shown])


def _pick(values: Distribution | None, name: str) -> str:
    if values is None:
        return "-"
    return time_text({"p50": values.p50, "p99": values.p99, "max": values.max}[name])


def _example(result: RunResult, kind: str) -> str:
    counted = (record for record in result.requests if record.error == kind and not record.is_warmup)
    text = next((record.error_text for record in counted if record.error_text), None)
    return "" if text is None else f" ({text})"
