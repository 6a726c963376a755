"""Draws the time between tokens of every side while long prompts arrive, and TTFT over that time. Writes PNG files.

The text on a panel uses the same window as ``figures.stutter``, so picture and table agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kvrelay.launcher.bench.records import RunResult
from kvrelay.launcher.bench.summary import percentile
from kvrelay.launcher.bench.workload import BURST
from peers.figures import burst_window, gaps_of_streams
from peers.rounds import Sample
from peers.ways import WAYS, Point, Points

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # Okabe and Ito's palette for colour-blind readers
_GREY = "#777777"
_TICKS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
_LEAST_SHARE = 0.01  # of gaps below the axis: chunks of one packet are microseconds apart
_SHOWN_BEHIND_S = 0.5  # shown after the window


def quietest_round(samples: Sequence[Sample], sides: Sequence[str]) -> int | None:
    """The round with the least CPU use by others and the hypervisor, among those in which all ``sides`` succeeded. Pure."""
    disturbance: dict[int, list[float]] = {}
    for sample in samples:
        if sample.side in sides and sample.values:
            disturbance.setdefault(sample.round, []).append(sample.disturbance)
    whole = {number: max(cores) for number, cores in disturbance.items() if len(cores) == len(sides)}
    return min(whole, key=lambda number: whole[number], default=None)


def stutter_plot(runs: Mapping[str, RunResult], title: str, path: Path) -> Path:
    """Draw one panel for each run, by its label, on shared scales. Returns ``path``; creates its folder. Raises OSError."""
    figure = Figure(figsize=(9.0, 1.0 + 1.9 * len(runs)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    panels = figure.subplots(len(runs), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    end_s = max(burst_window(run)[1] for run in runs.values()) + _SHOWN_BEHIND_S
    panels[0].set_yscale("log")  # before the panels set their ticks
    shown: list[float] = []
    for axes, color, (label, run) in zip(panels, _COLORS, runs.items(), strict=False):
        shown += _panel(axes, label, run, color, end_s)
    shown.sort()
    panels[0].set_ylim(percentile(shown, _LEAST_SHARE) / 1.5, shown[-1] * 1.3)
    panels[0].set_xlim(0, end_s)
    legend = "grey lines: a long prompt is sent; dashed: p99 from the first one's sending to the last one's answer"
    panels[-1].set_xlabel(f"seconds since the start\n{legend}", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _panel(axes: Axes, label: str, run: RunResult, color: str, end_s: float) -> list[float]:
    """Draw one run. Returns the shown gaps in s."""
    points = gaps_of_streams(run, 0.0, end_s)
    axes.scatter([at_s for at_s, _ in points], [gap for _, gap in points], s=4, color=color, linewidths=0, alpha=0.6)
    from_s, until_s = burst_window(run)
    during = sorted(gap for _, gap in gaps_of_streams(run, from_s, until_s))
    p50, p99 = percentile(during, 0.5), percentile(during, 0.99)
    words = f"p50 {_tick(p50)}, p99 {_tick(p99)}, largest {_tick(during[-1])}"
    axes.set_title(f"{label}:  {words}", fontsize=9.5, loc="left")
    axes.hlines(p99, from_s, until_s, color="black", linewidth=0.9, linestyle="--")
    for due_s in sorted({one.due_s for one in run.requests if one.stream == BURST and not one.is_warmup}):
        axes.axvline(due_s, color=_GREY, linewidth=0.8, alpha=0.6, zorder=0)
    axes.yaxis.set_major_locator(FixedLocator([value / 1e3 for value in _TICKS_MS]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _place: _tick(value)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("gap between tokens", fontsize=8)
    axes.grid(axis="y", alpha=0.25)
    return [gap for _, gap in points]


def _tick(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def curves_plot(points: Points, path: Path) -> Path:
    """TTFT over the p99 gap: a panel for each load, a line for each way, a point for each budget. Otherwise as ``stutter_plot``."""
    loops = list(dict.fromkeys(case.loop for case in points))
    figure = Figure(figsize=(4.6 * len(loops), 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, loop in zip(figure.subplots(1, len(loops), squeeze=False)[0], loops, strict=True):
        for way, color in zip(WAYS, _COLORS, strict=False):
            rounds = {
                case.budget: [point for point in found if point is not None]
                for case, found in points.items()
                if (case.loop, case.way) == (loop, way)
            }
            line = [(budget, Point.middle(found)) for budget, found in rounds.items() if found]
            gaps_ms, ttfts_s = [point.gap_p99_s * 1e3 for _, point in line], [point.ttft_p50_s for _, point in line]
            axes.plot(gaps_ms, ttfts_s, marker="o", markersize=4, color=color, label=way)
            for (budget, _), *place in zip(line, gaps_ms, ttfts_s, strict=True):
                axes.annotate(budget, place, fontsize=7, color=color, xytext=(3, 3), textcoords="offset points")
        axes.set_title(loop, fontsize=9.5, loc="left")
        axes.set_xlabel("p99 gap between tokens, ms", fontsize=8)
        axes.set_ylabel("TTFT p50, s", fontsize=8)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
