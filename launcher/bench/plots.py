"""Runs as pictures: latency over time, distributions. PNG files, drawn by matplotlib without a display.

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
from kvrelay.launcher.bench.summary import gap_ends, gaps, percentile, ttft

_BLUE, _ORANGE, _GREEN, _GREY = "#0072B2", "#D55E00", "#009E73", "#777777"
_SERIES = (_BLUE, _ORANGE, _GREEN, "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DPI = 120
_WIDTH_IN = 9.0
_BURST = "burst"
_MAX_BELOW_MEDIAN = 20
_LEAST_SHARE = 0.01  # of the values, may lie below a log axis
_FEW_DECADES = 500  # widest ratio of an axis whose decades are divided
_FEW_ACROSS = 60  # the same for finer steps on a horizontal axis, whose labels stand side by side


def write_plots(results: Sequence[RunResult], directory: Path) -> list[Path]:
    """Draw ``results`` into ``directory``, which is made; the files that were written. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    names = (
        [f"{stem}-latency.png" for stem in _file_names(results)] if len(results) > 1 else ["latency.png"] * len(results)
    )
    paths = [latency_over_time(result, directory / name) for result, name in zip(results, names, strict=True)]
    paths.append(itl_over_time(results, directory / "itl.png"))
    paths.append(distributions(results, directory / "cdf.png"))
    return paths


def latency_over_time(result: RunResult, path: Path) -> Path:
    """TTFT of every request above every inter-token gap of one run; log scales."""
    figure, (above, below) = _figure(2, 5.2, f"{_plain(result.name)}: latency over time")
    pooled: list[list[float]] = [[], []]
    has_bursts = any(record.stream == _BURST for record in result.requests)
    for is_burst, colors in ((False, (_ORANGE, _BLUE)), (True, (_GREY, _GREY))):
        records = [record for record in _counted(result) if (record.stream == _BURST) == is_burst]
        firsts = [(record.chunk_s[0], value) for record in _good(records) if (value := ttft(record)) is not None]
        points = [point for record in records for point in _gap_points(record)]
        label = "the bursts' own requests" if is_burst else "main load"
        above.scatter(
            *_columns(firsts), s=12, color=colors[0], linewidths=0, label=label, marker="D" if is_burst else "o"
        )
        below.scatter(*_columns(points), s=3, color=colors[1], linewidths=0, alpha=0.5)
        for pool, found in zip(pooled, (firsts, points), strict=True):
            pool.extend(value for _, value in found)
    above.set_ylabel("time to first\ntoken (log scale)")
    below.set_ylabel("inter-token\nlatency (log scale)")
    for axes, values in ((above, pooled[0]), (below, pooled[1])):
        _time_axis(axes.yaxis, values)
        _mark_bursts(axes, result)
        axes.set_xlim(0, _end_s([result]))
    if has_bursts:
        figure.legend(*above.get_legend_handles_labels(), fontsize=8, frameon=False, loc="outside lower left", ncols=2)
        _say(figure, "grey lines: a burst arrives")
    below.set_xlabel("seconds since the start")
    return _save(figure, path)


def itl_over_time(results: Sequence[RunResult], path: Path) -> Path:
    """Every inter-token gap of the main load over time, one panel per run on shared scales; bursts as grey lines."""
    has_bursts = any(record.stream == _BURST for result in results for record in result.requests)
    title = "Inter-token latency during bursts" if has_bursts else "Inter-token latency over time"
    figure, panels = _figure(len(results), 1.0 + 2.1 * len(results), title)
    everything: list[float] = []
    for index, (axes, result) in enumerate(zip(panels, results, strict=True)):
        records = [record for record in _counted(result) if record.stream != _BURST]
        points = [point for record in records for point in _gap_points(record)]
        axes.scatter(*_columns(points), s=4, color=_SERIES[index % len(_SERIES)], linewidths=0, alpha=0.6)
        values = sorted(value for _, value in points)
        everything += values
        label = _plain(result.name)
        if values:
            p99 = percentile(values, 0.99)
            label += f":  p50 {time_text(percentile(values, 0.5))},  p99 {time_text(p99)},  max {time_text(values[-1])}"
            axes.axhline(p99, color="black", linewidth=0.9, linestyle="--")
        axes.set_title(label, fontsize=10, loc="left")
        axes.set_ylabel("gap between tokens\n(log scale)")
        _mark_bursts(axes, result)
    for axes in panels:
        _time_axis(axes.yaxis, everything)
        axes.set_xlim(0, _end_s(results))
    panels[-1].set_xlabel("seconds since the start")
    _say(figure, "dashed: p99" + ("; grey lines: a burst arrives" if has_bursts else ""))
    return _save(figure, path)


def distributions(results: Sequence[RunResult], path: Path) -> Path:
    """Cumulative distributions of TTFT and of inter-token latency, one line per run."""
    figure = _empty_figure(4.0, "How many are at least as fast")
    axes_of = [figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)]
    pooled: list[list[float]] = [[], []]
    for index, result in enumerate(results):
        records = _counted(result)
        firsts = [value for record in _good(records) if (value := ttft(record)) is not None]
        all_gaps = [gap for record in records for gap in gaps(record)]
        for axes, values, pool in zip(axes_of, (firsts, all_gaps), pooled, strict=True):
            ordered = sorted(values)
            shares = [(rank + 1) / len(ordered) for rank in range(len(ordered))]
            color = _SERIES[index % len(_SERIES)]
            axes.step(ordered, shares, where="post", color=color, label=_plain(result.name), linewidth=1.6)
            pool.extend(values)
    for axes, name, pool in zip(axes_of, ("time to first token", "inter-token latency"), pooled, strict=True):
        _time_axis(axes.xaxis, pool)
        axes.set_xlabel(f"{name} (log scale)")
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _place: f"{value:.0%}"))
        axes.grid(alpha=0.25)
    if len(results) > 1:
        axes_of[0].legend(fontsize=8, frameon=False, loc="lower right")
    return _save(figure, path)


def burst_times_s(result: RunResult) -> list[float]:
    """When bursts that count were due."""
    return sorted({record.due_s for record in _counted(result) if record.stream == _BURST})


def _counted(result: RunResult) -> list[RequestRecord]:
    return [record for record in result.requests if not record.is_warmup]


def _good(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    return [record for record in records if record.error is None]


def _gap_points(record: RequestRecord) -> list[tuple[float, float]]:
    """(when the later token came, or the answer broke off, how long it took)"""
    return list(zip(gap_ends(record), gaps(record), strict=True))


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _end_s(results: Sequence[RunResult]) -> float:
    return max((record.finished_s for result in results for record in result.requests), default=1.0)


def _mark_bursts(axes: Axes, result: RunResult) -> None:
    for due_s in burst_times_s(result):
        axes.axvline(due_s, color=_GREY, linewidth=0.8, alpha=0.6, zorder=0)


def _time_axis(axis: Axis, values: Sequence[float]) -> None:
    """A log axis for ``values``, labelled in units that people read.

    It ends where the bulk of the values does, whatever the least is: chunks that came in one packet are microseconds apart.
    """
    ordered = sorted(value for value in values if value > 0)
    if not ordered:
        return
    bulk = percentile(ordered, _LEAST_SHARE) / 1.5, percentile(ordered, 0.5) / _MAX_BELOW_MEDIAN
    low = max(ordered[0], *bulk) / 1.3
    high = ordered[-1] * 1.3
    axes = axis.axes
    set_scale, set_limits = (axes.set_xscale, axes.set_xlim) if axis is axes.xaxis else (axes.set_yscale, axes.set_ylim)
    set_scale("log")
    set_limits(low, high)
    steps: tuple[float, ...] = (1.0, 2.0, 5.0)
    if high / low > _FEW_DECADES:
        steps = (1.0,)
    elif axis is axes.xaxis and high / low > _FEW_ACROSS:
        steps = (1.0, 3.0)
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
    for axes in panels[:-1]:
        axes.tick_params(labelbottom=False)
    return figure, panels


def _empty_figure(height_in: float, title: str) -> Figure:
    figure = Figure(figsize=(_WIDTH_IN, height_in), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    return figure


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path)
    return path


def _say(figure: Figure, text: str) -> None:
    figure.text(0.985, 0.012, text, fontsize=8, color=_GREY, ha="right")


def _plain(name: str) -> str:
    """``name`` as a text in which nothing is a formula."""
    return name.replace("$", r"\$")


def _file_names(results: Sequence[RunResult]) -> list[str]:
    """One for each run, all different, without a suffix."""
    names: list[str] = []
    for result in results:
        stem = name = re.sub(r"[^A-Za-z0-9.]+", "-", result.name).strip("-") or "run"
        number = 2
        while name in names:
            name, number = f"{stem}-{number}", number + 1
        names.append(name)
    return names
