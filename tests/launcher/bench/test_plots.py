"""What plots show, read from the axes that were saved."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

from kvrelay.launcher.bench.plots import write_plot
from kvrelay.launcher.bench.records import RequestRecord, RunResult
from tests.launcher.bench.results import record, result

Points = list[tuple[float, float]]


def answer(due_s: float, *chunk_s: float, stream: str = "main", error: str | None = None) -> RequestRecord:
    """One that ends with its last chunk; one that broke off ends half a second later."""
    finished_s = chunk_s[-1] + (0.0 if error is None else 0.5)
    times = {"due_s": due_s, "sent_s": due_s, "finished_s": finished_s, "chunk_s": list(chunk_s)}
    return record(stream=stream, error=error, **times)


# The first counts nowhere; the third broke off, so that its gaps count and neither its first token nor its tokens do.
REQUESTS = [
    msgspec.structs.replace(answer(0.0, 9.0, 9.5), is_warmup=True),
    answer(0.0, 0.25, 0.375, 1.375),
    answer(0.5, 1.5, 3.5, error="timeout"),
    answer(1.0, 1.5, 2.25),
    answer(2.0, 2.125, 2.625, stream="burst"),
    answer(3.0, 5.0, stream="burst"),
]
RUN = result("a", requests=REQUESTS, duration_s=5.0)
OTHER = result("b", requests=[answer(0.0, 1.0, 2.0)], duration_s=2.0)


def drawn(runs: list[RunResult], directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[Axes]:
    """First tokens and gaps of each run."""
    found: list[Axes] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: found.extend(figure.axes))
    write_plot(runs, directory)
    return found


def dots(axes: Axes) -> list[Points]:
    """Points of every cloud, in the order in which they were drawn."""
    clouds = [cloud for cloud in axes.collections if isinstance(cloud, PathCollection)]
    return [[(float(x), float(y)) for x, y in np.asarray(cloud.get_offsets())] for cloud in clouds]


def test_first_tokens_stand_beside_gaps_and_bursts_are_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    firsts, gaps, _, other = drawn([RUN, OTHER], tmp_path, monkeypatch)
    assert dots(firsts) == [[(2.125, 0.125), (5.0, 2.0)], [(0.25, 0.25), (1.5, 0.5)]]
    assert dots(gaps) == [[(2.625, 0.5)], [(0.375, 0.125), (1.375, 1.0), (3.5, 2.0), (4.0, 0.5), (2.25, 0.75)]]
    # Of 0.125, 0.5, 0.75, 1 and 2 s p99 is 0.96 of the way to the last. Bursts are marked when they were due.
    assert [line.get_ydata()[0] for line in gaps.lines] == [pytest.approx(1.96), 0.0, 0.0]  # type: ignore[index]
    assert [line.get_xdata()[0] for line in gaps.lines[1:]] == [2.0, 3.0]  # type: ignore[index]
    assert gaps.get_title(loc="left") == "a\ninter-token:  p50 750 ms,  p99 1.96 s,  max 2.00 s"
    assert other.get_title(loc="left") == "b\ninter-token:  p50 1.00 s,  p99 1.00 s,  max 1.00 s"


def test_every_point_is_within_its_axes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for axes in drawn([RUN], tmp_path, monkeypatch):
        (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
        assert all(left <= x <= right and low <= y <= high for cloud in dots(axes) for x, y in cloud)
        assert axes.get_yscale() == "log"
        assert axes.get_ylabel() == "log scale"


@pytest.mark.parametrize("name", ["costs $5 or $b_$", "[bold] {x} %s \\frac"])
def test_any_name_can_be_drawn(name: str, tmp_path: Path) -> None:
    path = write_plot([result(name), result("other", requests=[])], tmp_path / "plots")
    assert path.read_bytes().startswith(b"\x89PNG")
