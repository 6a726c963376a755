"""Runs as a picture: latency over time, one row for each run. A PNG file, drawn by matplotlib without a display."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from kvrelay.launcher.bench.records import RequestRecord, RunResult
from kvrelay.launcher.bench.report import time_text
from kvrelay.launcher.bench.summary import gap_ends, gaps, percentile, ttft
from kvrelay.launcher.bench.workload import BURST

_BLUE, _ORANGE, _GREY = "#0072B2", "#D55E00", "#777777"  # Okabe and Ito's, which the colour-blind tell apart
_MAX_BELOW_MEDIAN = 20
_FEW_DECADES = 500  # widest ratio of an axis whose decades are divided

Points = list[tuple[float, float]]


def write_plot(results: Sequence[RunResult], directory: Path) -> Path:
    """Draw ``results`` as ``latency.png`` in ``directory``, which is made; its path. Raises OSError."""
    figure = Figure(figsize=(11.0, 1.0 + 2.6 * len(results)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    legend = "grey: requests of bursts, and when they were due; dashed: p99 of the main load"
    figure.suptitle(legend, fontsize=9, color=_GREY)
    panels = figure.subplots(len(results), 2, sharex=True, sharey="col", squeeze=False)
    for (left, right), result in zip(panels, results, strict=True):
        _panel(left, result, "first token", _ORANGE, _first_token)
        _panel(right, result, "inter-token", _BLUE, _gap_points)
    for axes in panels[-1]:
        axes.set_xlabel("seconds since the start")
    for place in (0, 1):
        panels[0, place].set_yscale("log")  # of the whole column
        _divide(list(panels[:, place]))
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "latency.png"
    figure.savefig(path)
    return path


def burst_times_s(result: RunResult) -> list[float]:
    """When bursts that count were due."""
    return sorted({one.due_s for one in result.requests if one.stream == BURST and not one.is_warmup})


def _panel(axes: Axes, result: RunResult, what: str, color: str, points_of: Callable[[RequestRecord], Points]) -> None:
    values: list[float] = []  # of the main load
    for is_burst in (True, False):
        records = (one for one in result.requests if not one.is_warmup and (one.stream == BURST) == is_burst)
        points = [point for record in records for point in points_of(record)]
        values = sorted(y for _, y in points)
        axes.scatter(
            [x for x, _ in points],
            [y for _, y in points],
            s=5,
            color=_GREY if is_burst else color,
            linewidths=0,
            alpha=0.6,
        )
    name = result.name.replace("$", r"\$")  # nothing in it is a formula
    title = f"{name}\n{what}"
    if values:
        p50, p99 = percentile(values, 0.5), percentile(values, 0.99)
        title += f":  p50 {time_text(p50)},  p99 {time_text(p99)},  max {time_text(values[-1])}"
        axes.axhline(p99, color="black", linewidth=0.9, linestyle="--")
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_ylabel("log scale")
    axes.grid(axis="y", alpha=0.25)
    for due_s in burst_times_s(result):
        axes.axvline(due_s, color=_GREY, linewidth=0.8, alpha=0.6, zorder=0)


def _first_token(record: RequestRecord) -> Points:
    """When it came, and how long it took; none of a request that failed."""
    taken_s = ttft(record)
    return [] if taken_s is None or record.error is not None else [(record.chunk_s[0], taken_s)]


def _gap_points(record: RequestRecord) -> Points:
    """When the later token came, or the answer broke off, and how long it took."""
    return list(zip(gap_ends(record), gaps(record), strict=True))


def _divide(column: Sequence[Axes]) -> None:
    """A log scale for panels that share it, labelled in units that people read.

    It ends where the bulk of the values does, whatever the least is: chunks that came in one packet are microseconds apart.
    """
    drawn = [np.asarray(cloud.get_offsets())[:, 1] for axes in column for cloud in axes.collections]
    ordered = sorted(value for values in drawn for value in values.tolist() if value > 0)
    if not ordered:
        return
    low = max(ordered[0], percentile(ordered, 0.01) / 1.5, percentile(ordered, 0.5) / _MAX_BELOW_MEDIAN) / 1.3
    high = ordered[-1] * 1.3
    column[0].set_ylim(low, high)
    for axes in column:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high / low > _FEW_DECADES else (1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _place: time_text(value)))
        axes.yaxis.set_minor_locator(NullLocator())
