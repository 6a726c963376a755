"""``kvrelay bench compare``: results of several runs side by side, as ratios to the first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvrelay.launcher.bench.records import ResultFileError, RunResult, read_result
from kvrelay.launcher.bench.report import rate_text, time_text
from kvrelay.launcher.bench.summary import Distribution, StreamSummary, Summary, summarize

# What makes two runs different measurements; the rest (url, name, output …) does not.
_LOAD_SETTINGS = (
    "api", "rate", "arrival", "concurrency", "trace", "trace_speed", "trace_block_tokens", "burst", "duration_s", "requests",
    "warmup", "input_len", "output_len", "prefix_tokens", "prefix_groups", "seed", "ignore_eos", "temperature",
)  # fmt: skip
_MACHINE = ("machine", "cpu", "cores")
# Not the load but how it was sent and served: a difference may be why the runs are compared.
_SIDE_SETTINGS = ("self_serve", "serve", "timeout_s", "token_ids", "tokenizer")
_MAX_CPU_DIFFERENCE = 0.2  # cores that others took, between two runs
_NOISE = 0.05  # ratios nearer to 1 are no difference


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the comparison."""

    name: str
    get: Callable[[StreamSummary], float | None]
    text: Callable[[float], str]
    is_less_better: bool


def run_compare(paths: Sequence[Path], plots: Path | None) -> int:
    """Print the comparison and write plots if a directory is given; 0. Raises ResultFileError, also if they cannot be written."""
    if len(paths) < 2:
        raise ResultFileError(f"{len(paths)} result file is given; a comparison needs two or more")
    results = with_distinct_names([read_result(path) for path in paths], paths)
    console = Console()
    for doubt in comparison_doubts(results):
        console.print(f"warning: {doubt}", style="yellow", highlight=False, markup=False)
    for difference in differences(results):
        console.print(difference, highlight=False, markup=False)
    console.print(comparison_table(results))
    if plots is not None:
        from kvrelay.launcher.bench.plots import write_plots  # noqa: PLC0415 - only if there is something to draw

        try:
            pictures = write_plots(results, plots)
        except OSError as error:
            raise ResultFileError(f"cannot write plots to {plots}: {error.strerror or error}") from error
        for path in pictures:
            console.print(f"plot: {path}", highlight=False, markup=False)
    return 0


def with_distinct_names(results: Sequence[RunResult], paths: Sequence[Path]) -> list[RunResult]:
    """Add the file's name to names that several runs have, as those without ``--name`` do; the whole path if need be."""
    for suffixes in ([path.stem for path in paths], [str(path) for path in paths]):
        uses = Counter(result.name for result in results)
        if max(uses.values()) == 1:
            break
        results = [
            msgspec.structs.replace(result, name=f"{result.name} ({suffix})") if uses[result.name] > 1 else result
            for result, suffix in zip(results, suffixes, strict=True)
        ]
    return list(results)


def comparison_table(results: Sequence[RunResult]) -> Table:
    """Every figure of every run, and its ratio to the first run's."""
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


def comparison_doubts(results: Sequence[RunResult]) -> list[str]:
    """Why the runs may not be comparable."""
    first, doubts = results[0], []
    for result in results:
        whole = summarize(result).all
        if whole.num_ok < whole.num_requests:
            failed = whole.num_requests - whole.num_ok
            doubts.append(
                f"{failed} of {whole.num_requests} requests of {result.name} failed; "
                "its times to the first token and of whole answers leave them out"
            )
    for other in results[1:]:
        if first.model != other.model:
            doubts.append(
                f"{first.name} asked for the model {first.model} and {other.name} for {other.model}: "
                "are they the same weights in the same number format?"
            )
        if first.slo != other.slo:
            doubts.append(
                f"goodput is not comparable: the SLO of {first.name} is {_slo_text(first)} and of {other.name} {_slo_text(other)}"
            )
        different = [
            f"{name} {first.settings.get(name, 'unset')} and {other.settings.get(name, 'unset')}"
            for name in _LOAD_SETTINGS
            if first.settings.get(name) != other.settings.get(name)
        ]
        if different:
            doubts.append(f"{first.name} and {other.name} are different loads: {', '.join(different)}")
        for name in _MACHINE:
            if first.environment.get(name) != other.environment.get(name):
                doubts.append(
                    f"{first.name} and {other.name} ran on different machines: "
                    f"{first.environment.get(name)} and {other.environment.get(name)}"
                )
        if first.cpu is not None and other.cpu is not None:
            both = (first.cpu, other.cpu)
            # Where a server's processes are not known, it may be one of the others.
            has_others = all(cpu.server is not None for cpu in both)
            shares = [cpu.stolen + (cpu.others if has_others else 0.0) for cpu in both]
            if abs(shares[0] - shares[1]) > _MAX_CPU_DIFFERENCE:
                doubts.append(
                    f"{'others' if has_others else 'the hypervisor'} took {shares[0]:.2f} cores during {first.name} and "
                    f"{shares[1]:.2f} during {other.name}; measure again, alternating"
                )
    return doubts


def differences(results: Sequence[RunResult]) -> list[str]:
    """How the others differ from the first in what may well be compared on purpose: versions, variables, how it was served."""
    first, found = results[0], []
    for other in results[1:]:
        names = sorted((first.environment.keys() | other.environment.keys()) - set(_MACHINE))
        pairs = [(name, first.settings.get(name), other.settings.get(name)) for name in _SIDE_SETTINGS]
        pairs += [(name, first.environment.get(name), other.environment.get(name)) for name in names]
        different = [
            f"{name} {before or 'unset'} and {after or 'unset'}" for name, before, after in pairs if before != after
        ]
        if different:
            found.append(f"{first.name} and {other.name} differ in: {', '.join(different)}")
    return found


def ratio_text(ratio: float, *, is_less_better: bool) -> str:
    """The ratio to the first run's, and whether that is better."""
    if abs(ratio - 1) < _NOISE:
        return f"{ratio:.2f} times"
    color = "green" if (ratio < 1) == is_less_better else "red"
    return f"[{color}]{ratio:.2f} times, {'better' if color == 'green' else 'worse'}[/]"


def _add_row(table: Table, stream_name: str, figure: Figure, summaries: Sequence[Summary]) -> None:
    values = [None if (stream := summary.stream(stream_name)) is None else figure.get(stream) for summary in summaries]
    if all(value is None for value in values):
        return
    row = [f"{stream_name}: {figure.name}", _value_text(figure, values[0])]
    base = values[0]
    for value in values[1:]:
        row.append(_value_text(figure, value))
        row.append("-" if not base or value is None else ratio_text(value / base, is_less_better=figure.is_less_better))
    table.add_row(*row)


def _value_text(figure: Figure, value: float | None) -> str:
    return "-" if value is None else figure.text(value)


def _slo_text(result: RunResult) -> str:
    return ",".join(f"{name}={time_text(limit)}" for name, limit in sorted(result.slo.items())) or "none"


def _figures() -> list[Figure]:
    def quantile(
        get: Callable[[StreamSummary], Distribution | None], name: str
    ) -> Callable[[StreamSummary], float | None]:
        def value(stream: StreamSummary) -> float | None:
            found = get(stream)
            return (
                None
                if found is None
                else {"p50": found.p50, "p90": found.p90, "p99": found.p99, "max": found.max}[name]
            )

        return value

    figures = [
        Figure("failed", lambda stream: stream.num_requests - stream.num_ok, str, is_less_better=True),
        Figure("requests/s", lambda stream: stream.requests_per_s, rate_text, is_less_better=False),
        Figure("output tok/s", lambda stream: stream.output_tokens_per_s, rate_text, is_less_better=False),
        Figure("total tok/s", lambda stream: stream.total_tokens_per_s, rate_text, is_less_better=False),
        Figure("goodput req/s", lambda stream: stream.goodput_per_s, rate_text, is_less_better=False),
    ]
    for name, get in (
        ("first token", lambda stream: stream.ttft),
        ("inter-token", lambda stream: stream.itl),
        ("end to end", lambda stream: stream.e2e),
    ):
        figures += [
            Figure(f"{name} {q}", quantile(get, q), time_text, is_less_better=True)
            for q in ("p50", "p90", "p99", "max")
        ]
    return figures
