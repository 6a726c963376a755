"""What plots show, read from the axes that were saved."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

from kvrelay.launcher.bench.plots import write_plots
from kvrelay.launcher.bench.records import RequestRecord, RunResult
from tests.launcher.bench.results import result

Points = list[tuple[float, float]]


def record(due_s: float, *chunk_s: float, stream: str = "main", error: str | None = None) -> RequestRecord:
    """An answer that ends with its last chunk, three tokens in each; one that broke off ends half a second later."""
    return RequestRecord(
        index=0,
        stream=stream,
        due_s=due_s,
        sent_s=due_s,
        finished_s=chunk_s[-1] + (0.0 if error is None else 0.5),
        prompt_tokens=100,
        planned_output_tokens=50,
        output_tokens=3 * len(chunk_s),
        chunk_s=list(chunk_s),
        error=error,
    )


# The first counts nowhere; the third broke off, so that its gaps count and neither its first token nor its tokens do.
REQUESTS = [
    msgspec.structs.replace(record(0.0, 9.0, 9.5), is_warmup=True),
    record(0.0, 0.25, 0.375, 1.375),
    record(0.5, 1.5, 3.5, error="timeout"),
    record(1.0, 1.5, 2.25),
    record(2.0, 2.125, 2.625, stream="burst"),
    record(3.0, 5.0, stream="burst"),
]
RUN = result("a", requests=REQUESTS, duration_s=5.0)
OTHER = result("b", requests=[record(0.0, 1.0, 2.0)], duration_s=2.0)


def drawn(runs: list[RunResult], directory: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Axes]]:
    """Panels by the name of their file."""
    found: dict[str, list[Axes]] = {}
    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, path: found.update({path.name: figure.axes}))
        write_plots(runs, directory)
    return found


def dots(axes: Axes) -> list[Points]:
    """Points of every cloud, in the order in which they were drawn."""
    clouds = [cloud for cloud in axes.collections if isinstance(cloud, PathCollection)]
    return [[(float(x), float(y)) for x, y in np.asarray(cloud.get_offsets())] for cloud in clouds]


def lines(axes: Axes) -> list[tuple[list[float], list[float]]]:
    """Both coordinates of every line."""
    return [(np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist()) for line in axes.lines]


def test_latency_shows_first_tokens_above_gaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    above, below = drawn([RUN], tmp_path, monkeypatch)["latency.png"]
    assert dots(above) == [[(0.25, 0.25), (1.5, 0.5)], [(2.125, 0.125), (5.0, 2.0)]]  # main load, then bursts
    assert dots(below) == [
        [(0.375, 0.125), (1.375, 1.0), (3.5, 2.0), (4.0, 0.5), (2.25, 0.75)],
        [(2.625, 0.5)],
    ]
    assert [cloud.get_label() for cloud in above.collections] == ["main load", "the bursts' own requests"]


def test_every_point_is_within_its_axes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for axes in drawn([RUN], tmp_path, monkeypatch)["latency.png"]:
        (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
        assert all(left <= x <= right and low <= y <= high for cloud in dots(axes) for x, y in cloud)


def test_bursts_are_marked_when_they_were_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    panels = drawn([RUN], tmp_path, monkeypatch)
    marks = [([2.0, 2.0], [0.0, 1.0]), ([3.0, 3.0], [0.0, 1.0])]  # from the bottom of the panel to its top
    assert [lines(axes) for axes in panels["latency.png"]] == [marks, marks]
    (axes,) = panels["itl.png"]
    assert lines(axes)[1:] == marks  # after that of p99


def test_gaps_of_the_main_load_lie_around_their_p99(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = drawn([RUN, OTHER], tmp_path, monkeypatch)["itl.png"]
    assert dots(first) == [[(0.375, 0.125), (1.375, 1.0), (3.5, 2.0), (4.0, 0.5), (2.25, 0.75)]]
    assert lines(first)[0][1] == pytest.approx(
        [1.96, 1.96]
    )  # of 0.125, 0.5, 0.75, 1 and 2 s: 0.96 of the way to the last
    assert first.get_title(loc="left") == "a:  p50 750 ms,  p99 1.96 s,  max 2.00 s"
    assert dots(second) == [[(2.0, 1.0)]]
    assert second.get_title(loc="left") == "b:  p50 1.00 s,  p99 1.00 s,  max 1.00 s"


def test_distributions_rise_to_all_of_the_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    firsts, gaps = drawn([RUN, OTHER], tmp_path, monkeypatch)["cdf.png"]
    assert lines(firsts) == [([0.125, 0.25, 0.5, 2.0], [0.25, 0.5, 0.75, 1.0]), ([1.0], [1.0])]
    sixths = [place / 6 for place in range(1, 7)]
    assert lines(gaps) == [([0.125, 0.5, 0.5, 0.75, 1.0, 2.0], sixths), ([1.0], [1.0])]
    for axes in (firsts, gaps):
        assert [line.get_drawstyle() for line in axes.lines] == ["steps-post"] * 2  # a share holds from its value on
        assert [line.get_label() for line in axes.lines] == ["a", "b"]
        assert axes.get_ylim()[0] < axes.get_ylim()[1]
    assert [axes.get_xlabel() for axes in (firsts, gaps)] == [
        "time to first token (log scale)",
        "inter-token latency (log scale)",
    ]


@pytest.mark.parametrize("name", ["costs $5 or $b_$", "[bold] {x} %s \\frac"])
def test_any_name_can_be_drawn(name: str, tmp_path: Path) -> None:
    place = tmp_path / "plots"
    paths = write_plots([result(name), result("other", requests=[])], place)
    assert sorted(place.iterdir()) == sorted(paths)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_runs_of_one_name_have_pictures_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(drawn([result("a b"), result("a-b")], tmp_path, monkeypatch))[:2] == [
        "a-b-latency.png",
        "a-b-2-latency.png",
    ]


def test_a_logarithmic_axis_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for panels in drawn([RUN, OTHER], tmp_path, monkeypatch).values():
        for axis in (axis for axes in panels for axis in (axes.xaxis, axes.yaxis) if axis.get_scale() == "log"):
            assert "log scale" in axis.get_label_text()
