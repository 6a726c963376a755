"""Runs as pictures: latency over time, distributions, throughput. PNG files, drawn by matplotlib without a display.

Colours are Okabe and Ito's, which the colour-blind tell apart ("Color Universal Design", 2008).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from kvrelay.launcher.bench.records import RequestRecord, RunResult
from kvrelay.launcher.bench.report import time_text
from kvrelay.launcher.bench.summary import gaps, percentile, ttft

_BLUE, _ORANGE, _GREEN, _GREY = "#0072B2", "#D55E00", "#009E73", "#777777"
_SERIES = (_BLUE, _ORANGE, _GREEN, "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DPI = 120
_WIDTH_IN = 9.0
_BURST = "burst"
_MAX_BELOW_MEDIAN = 20
_FEW_DECADES = 500  # widest ratio of an axis whose decades are divided


def write_plots(results: Sequence[RunResult], directory: Path) -> list[Path]:
    """Draw ``results`` into ``directory``, which is made; the files that were written. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for result in results:
        prefix = _file_name(result.name) + "-" if len(results) > 1 else ""
        paths.append(latency_over_time(result, directory / f"{prefix}latency.png"))
    paths.append(itl_over_time(results, directory / "itl.png"))
    paths.append(distributions(results, directory / "cdf.png"))
    paths.append(throughput(results, directory / "throughput.png"))
    return paths


def latency_over_time(result: RunResult, path: Path) -> Path:
    """TTFT of every request above every inter-token gap of one run; log scales."""
    figure, (above, below) = _figure(2, 5.2, f"{result.name}: latency over time")
    records = _good(result)
    firsts = [(record.chunk_s[0], value) for record in records if (value := ttft(record)) is not None]
    above.scatter(*_columns(firsts), s=9, color=_ORANGE, linewidths=0)
    above.set_ylabel("time to\nfirst token")
    points = [point for record in records for point in _gap_points(record)]
    below.scatter(*_columns(points), s=3, color=_BLUE, linewidths=0, alpha=0.5)
    below.set_ylabel("inter-token\nlatency")
    for axes, values in ((above, firsts), (below, points)):
        _time_axis(axes.yaxis, [value for _, value in values])
        _mark_bursts(axes, result)
    below.set_xlabel("seconds since the start")
    return _save(figure, path)


def itl_over_time(results: Sequence[RunResult], path: Path) -> Path:
    """Every inter-token gap of the main load over time, one panel per run on shared scales; bursts as grey lines."""
    figure, panels = _figure(len(results), 1.0 + 2.1 * len(results), "Inter-token latency over time")
    everything: list[float] = []
    for index, (axes, result) in enumerate(zip(panels, results, strict=True)):
        records = [record for record in _good(result) if record.stream != _BURST]
        points = [point for record in records for point in _gap_points(record)]
        axes.scatter(*_columns(points), s=4, color=_SERIES[index % len(_SERIES)], linewidths=0, alpha=0.6)
        values = sorted(value for _, value in points)
        everything += values
        label = result.name
        if values:
            label += f":  p50 {time_text(percentile(values, 0.5))},  p99 {time_text(percentile(values, 0.99))}"
            label += f",  max {time_text(values[-1])}"
        axes.set_title(label, fontsize=10, loc="left")
        axes.set_ylabel("gap between tokens")
        _mark_bursts(axes, result)
    for axes in panels:
        _time_axis(axes.yaxis, everything)
        axes.set_xlim(0, max(_end_s(result) for result in results))
    panels[-1].set_xlabel("seconds since the start")
    if any(record.stream == _BURST for result in results for record in result.requests):
        figure.text(0.985, 0.012, "grey lines: long prompts arrive", fontsize=8, color=_GREY, ha="right")
    return _save(figure, path)


def distributions(results: Sequence[RunResult], path: Path) -> Path:
    """Cumulative distributions of TTFT and of inter-token latency, one line per run."""
    figure = _empty_figure(4.0, "How many are at least as fast")
    axes_of = [figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)]
    pooled: list[list[float]] = [[], []]
    for index, result in enumerate(results):
        records = _good(result)
        firsts = [value for record in records if (value := ttft(record)) is not None]
        all_gaps = [gap for record in records for gap in gaps(record)]
        for axes, values, pool in zip(axes_of, (firsts, all_gaps), pooled, strict=True):
            ordered = sorted(values)
            shares = [(rank + 1) / len(ordered) for rank in range(len(ordered))]
            color = _SERIES[index % len(_SERIES)]
            axes.step(ordered, shares, where="post", color=color, label=result.name, linewidth=1.6)
            pool.extend(values)
    for axes, name, pool in zip(axes_of, ("time to first token", "inter-token latency"), pooled, strict=True):
        _time_axis(axes.xaxis, pool)
        axes.set_xlabel(name)
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _place: f"{value:.0%}"))
        axes.grid(alpha=0.25)
    if len(results) > 1:
        axes_of[0].legend(fontsize=8, frameon=False, loc="lower right")
    return _save(figure, path)


def throughput(results: Sequence[RunResult], path: Path) -> Path:
    """Output tokens (chunks, to be exact) per second over time, one line per run."""
    figure, (axes,) = _figure(1, 3.4, "Throughput over time")
    for index, result in enumerate(results):
        times = sorted(time for record in _good(result) for time in record.chunk_s)
        if not times:
            continue
        width = max(0.5, _end_s(result) / 60)
        counts = [0] * (int(times[-1] / width) + 1)
        for time in times:
            counts[max(0, int(time / width))] += 1
        edges = [place * width for place in range(len(counts) + 1)]
        axes.stairs(
            [count / width for count in counts],
            edges,
            color=_SERIES[index % len(_SERIES)],
            label=result.name,
            linewidth=1.6,
        )
    axes.set_ylim(bottom=0)
    axes.set_ylabel("tokens per second")
    axes.set_xlabel("seconds since the start")
    axes.grid(alpha=0.25)
    if len(results) > 1:
        axes.legend(fontsize=8, frameon=False)
    return _save(figure, path)


def _good(result: RunResult) -> list[RequestRecord]:
    return [record for record in result.requests if record.error is None and not record.is_warmup]


def _gap_points(record: RequestRecord) -> list[tuple[float, float]]:
    """(when the later token came, how long it took)"""
    return list(zip(record.chunk_s[1:], gaps(record), strict=True))


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _end_s(result: RunResult) -> float:
    return max((record.finished_s for record in result.requests), default=1.0)


def _mark_bursts(axes: Axes, result: RunResult) -> None:
    for due_s in sorted({record.due_s for record in result.requests if record.stream == _BURST}):
        axes.axvline(due_s, color=_GREY, linewidth=0.8, alpha=0.6, zorder=0)


def _time_axis(axis: Axis, values: Sequence[float]) -> None:
    """A log axis for ``values``, labelled in units that people read.

    It ends well below the median, whatever the least value is: chunks that came in one packet are microseconds apart.
    """
    ordered = sorted(value for value in values if value > 0)
    if not ordered:
        return
    low = max(ordered[0], percentile(ordered, 0.5) / _MAX_BELOW_MEDIAN) / 1.3
    high = ordered[-1] * 1.3
    axes = axis.axes
    set_scale, set_limits = (axes.set_xscale, axes.set_xlim) if axis is axes.xaxis else (axes.set_yscale, axes.set_ylim)
    set_scale("log")
    set_limits(low, high)
    steps = (1.0, 2.0, 5.0) if high / low < _FEW_DECADES else (1.0,)
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(FuncFormatter(_tick))
    axis.set_minor_locator(NullLocator())
    axis.grid(alpha=0.25)


def _tick(seconds: float, _place: int | None = None) -> str:
    if seconds >= 1:
        return f"{seconds:g} s"
    return f"{seconds * 1e3:g} ms"


def _figure(num_panels: int, height_in: float, title: str) -> tuple[Figure, list[Axes]]:
    figure = _empty_figure(height_in, title)
    panels = [figure.add_subplot(num_panels, 1, 1)]
    panels += [figure.add_subplot(num_panels, 1, 2 + index, sharex=panels[0]) for index in range(num_panels - 1)]
    return figure, panels


def _empty_figure(height_in: float, title: str) -> Figure:
    figure = Figure(figsize=(_WIDTH_IN, height_in), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    return figure


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path)
    return path


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-") or "run"
