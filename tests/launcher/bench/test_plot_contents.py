"""What the pictures' axes hold, in numbers. By :func:`result`: four answers of 50 tokens, the first one after 250 ms."""

from __future__ import annotations

from pathlib import Path

import matplotlib.figure
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.patches import StepPatch

from kvrelay.launcher.bench.plots import write_plots
from tests.launcher.bench.results import result

Panels = dict[str, list[Axes]]


@pytest.fixture
def panels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Panels:
    """The axes of every picture of one run, by the file's name behind that of the run."""
    found: Panels = {}

    def keep(figure: matplotlib.figure.Figure, path: Path) -> None:
        found[path.stem.removeprefix("run-")] = list(figure.axes)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", keep)
    write_plots([result()], tmp_path)
    return found


def dots(axes: Axes) -> list[tuple[float, float]]:
    """Of all series, by time."""
    series = [item for item in axes.collections if isinstance(item, PathCollection)]
    return sorted((float(x), float(y)) for item in series for x, y in np.asarray(item.get_offsets()))


def lines(axes: Axes) -> list[tuple[list[float], list[float]]]:
    return [(list(map(float, line.get_xdata())), list(map(float, line.get_ydata()))) for line in axes.lines]


def test_latency_over_time_has_every_first_token_and_every_gap(panels: Panels) -> None:
    above, below = panels["latency"]
    assert [y for _, y in dots(above)] == pytest.approx([0.25] * 4)
    assert len(dots(below)) == 4 * 49
    assert [y for _, y in dots(below)] == pytest.approx([0.02] * 196)


@pytest.mark.parametrize("picture", ["latency", "itl"])
def test_bursts_are_lines(picture: str, panels: Panels) -> None:
    for axes in panels[picture]:
        assert ([0.5, 0.5], [0.0, 1.0]) in lines(axes)


def test_a_distribution_says_how_many_are_at_least_as_fast(panels: Panels) -> None:
    firsts, gaps = panels["cdf"]
    ((times, shares),) = lines(firsts)
    assert times == pytest.approx([0.25] * 4)
    assert shares == pytest.approx([0.25, 0.5, 0.75, 1.0])
    ((times, shares),) = lines(gaps)
    assert times == sorted(times)
    assert (len(times), shares[0], shares[-1]) == (196, pytest.approx(1 / 196), 1.0)


def test_throughput_is_tokens_by_the_half_second(panels: Panels) -> None:
    (axes,) = panels["throughput"]
    (steps,) = [patch for patch in axes.patches if isinstance(patch, StepPatch)]
    data = steps.get_data()
    assert list(data.edges) == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0])
    # 24, 98, 76 and 2 of the 200 tokens.
    assert list(data.values) == pytest.approx([48.0, 196.0, 152.0, 4.0])
