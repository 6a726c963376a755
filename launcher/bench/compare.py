"""``kvrelay bench compare``: shows several runs side by side, as ratios to the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvrelay.launcher.bench.records import RunResult, read_result
from kvrelay.launcher.bench.report import rate_text, time_text
from kvrelay.launcher.bench.summary import Distribution, StreamSummary, Summary, summarize
from kvrelay.launcher.errors import BenchError

# Runs that differ only in these settings are the same measurement.
_SAME_LOAD = ("url", "model", "name", "output", "slo", "prompt_seed", "server_pid", "start_timeout_s")
_NOISE = 0.05  # a ratio this close to 1 counts as no difference


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the comparison."""

    name: str
    get: Callable[[StreamSummary], float | None]
    text: Callable[[float], str]
    is_less_better: bool


@click.command("compare", short_help="Put results of several runs side by side.")
@click.argument("results", nargs=-1, required=True, type=click.Path(path_type=Path))
def compare(results: tuple[Path, ...]) -> None:
    """Put RESULTS, files that `kvrelay bench --output` wrote, side by side. The first one is what others are compared with.

    \b
    Example:
      kvrelay bench compare colocated.json disaggregated.json
    """
    if len(results) < 2:
        raise BenchError(f"{len(results)} result file is given; a comparison needs two or more")
    runs = with_distinct_names([read_result(path) for path in results], results)
    console = Console()
    for difference in differences(runs):
        console.print(difference, style="yellow", highlight=False, markup=False)
    console.print(comparison_table(runs))


def with_distinct_names(results: Sequence[RunResult], paths: Sequence[Path]) -> list[RunResult]:
    """Add the file name to names that several runs share, as runs without ``--name`` do."""
    names = [result.name for result in results]
    files = [path.stem for path in paths]
    if len(set(files)) < len(files):
        files = [str(path) for path in paths]
    return [
        msgspec.structs.replace(result, name=f"{result.name} ({file})") if names.count(result.name) > 1 else result
        for result, file in zip(results, files, strict=True)
    ]


def comparison_table(results: Sequence[RunResult]) -> Table:
    """Every figure of every run, with its ratio to that of the first run."""
    summaries = [summarize(result) for result in results]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("")
    table.add_column(escape(results[0].name), justify="right")
    for result in results[1:]:
        table.add_column(escape(result.name), justify="right")
        table.add_column("ratio", justify="right")
    most_streams = max((summary.streams for summary in summaries), key=len)
    for name in [stream.name for stream in most_streams]:
        for figure in _figures():
            _add_row(table, name, figure, summaries)
        table.add_section()
    return table


def differences(results: Sequence[RunResult]) -> list[str]:
    """How each run differs from the first in model, SLO, load and environment, whether on purpose or not."""
    first, found = _circumstances(results[0]), []
    for result in results[1:]:
        other = _circumstances(result)
        pairs = ((name, first.get(name, "unset"), other.get(name, "unset")) for name in sorted(first | other))
        different = [f"{name} {before} and {after}" for name, before, after in pairs if before != after]
        if different:
            found.append(f"{results[0].name} and {result.name} differ in: {', '.join(different)}")
    return found


def _circumstances(result: RunResult) -> dict[str, str]:
    load = {name: value for name, value in result.settings.items() if name not in _SAME_LOAD}
    slo = ",".join(f"{name}={time_text(limit)}" for name, limit in sorted(result.slo.items())) or "none"
    return {**load, **result.environment, "model": result.model, "slo": slo}


def ratio_text(ratio: float, *, is_less_better: bool) -> str:
    """The ratio to the first run, and whether it is better or worse."""
    if abs(ratio - 1) < _NOISE:
        return f"{ratio:.2f} times"
    color = "green" if (ratio < 1) == is_less_better else "red"
    return f"[{color}]{ratio:.2f} times, {'better' if color == 'green' else 'worse'}[/]"


def _add_row(table: Table, stream_name: str, figure: Figure, summaries: Sequence[Summary]) -> None:
    values = [None if (stream := summary.stream(stream_name)) is None else figure.get(stream) for summary in summaries]
    if all(value is None for value in values):
        return
    texts = ["-" if value is None else figure.text(value) for value in values]
    row = [f"{stream_name}: {figure.name}", texts[0]]
    for value, text in zip(values[1:], texts[1:], strict=True):
        base = values[0]
        row.append(text)
        row.append("-" if not base or value is None else ratio_text(value / base, is_less_better=figure.is_less_better))
    table.add_row(*row)


def _figures() -> list[Figure]:
    def quantiles(name: str, get: Callable[[StreamSummary], Distribution | None]) -> list[Figure]:
        def figure(q: str) -> Figure:
            return Figure(f"{name} {q}", lambda stream: getattr(get(stream), q, None), time_text, is_less_better=True)

        return [figure(q) for q in ("p50", "p90", "p99", "max")]

    return [
        Figure("failed", lambda stream: stream.num_requests - stream.num_ok, str, is_less_better=True),
        Figure("requests/s", lambda stream: stream.requests_per_s, rate_text, is_less_better=False),
        Figure("output tok/s", lambda stream: stream.output_tokens_per_s, rate_text, is_less_better=False),
        Figure("total tok/s", lambda stream: stream.total_tokens_per_s, rate_text, is_less_better=False),
        Figure("goodput req/s", lambda stream: stream.goodput_per_s, rate_text, is_less_better=False),
        *quantiles("first token", lambda stream: stream.ttft),
        *quantiles("inter-token", lambda stream: stream.itl),
        *quantiles("end to end", lambda stream: stream.e2e),
    ]
