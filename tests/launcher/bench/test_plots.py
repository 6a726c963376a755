"""Runs as pictures: they are there, they can be read, and what they show is the runs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from matplotlib.image import imread

from kvrelay.launcher.bench.plots import burst_times_s, itl_over_time, tokens_per_s, write_plots
from kvrelay.launcher.bench.records import RequestRecord, RunResult
from tests.launcher.bench.results import result

# The series' colours; dots are translucent, so that a pixel's colour lies between one of these and white.
BLUE, ORANGE = (0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)


def rows_of(path: Path, color: tuple[int, int, int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Rows of the pixels of ``color`` over white, whatever their opacity above a half."""
    missing = 1.0 - imread(path)[..., :3]
    wanted = 1.0 - np.array(color) / 255
    opacity = (missing @ wanted) / (wanted @ wanted)
    is_color = (np.abs(missing - opacity[..., None] * wanted).max(axis=-1) < 0.02) & (opacity > 0.5)
    return np.nonzero(is_color)[0]


@pytest.mark.parametrize("requests", [None, []])
def test_plots_are_pictures(requests: list[RequestRecord] | None, tmp_path: Path) -> None:
    run = result() if requests is None else result(requests=requests)
    paths = write_plots([run], tmp_path)
    assert len(paths) == 4
    for path in paths:
        pixels = imread(path)
        assert pixels.shape[1] == 1080
        assert len({tuple(pixel) for pixel in pixels[::7, ::7].reshape(-1, pixels.shape[2])}) > 2  # not blank


def test_gaps_lie_where_their_length_says(tmp_path: Path) -> None:
    """Panels share their scale: ten times the gap is higher up in its own panel."""

    def heights(gaps_s: tuple[float, float]) -> list[float]:
        path = itl_over_time([result(str(gap_s), gap_s=gap_s) for gap_s in gaps_s], tmp_path / "itl.png")
        return [float(np.median(rows_of(path, color))) for color in (BLUE, ORANGE)]

    slow_above, slow_below = heights((0.2, 0.02)), heights((0.02, 0.2))
    assert slow_above[0] < slow_below[0] - 50
    assert slow_above[1] > slow_below[1] + 50
    same = heights((0.02, 0.02))
    assert 200 < same[1] - same[0] < 350  # a panel's height apart, not on top of each other


def test_one_packet_does_not_flatten_the_rest(tmp_path: Path) -> None:
    """Chunks that came together are microseconds apart; an axis down to there would leave little room for the others."""

    def spread(run: RunResult) -> float:
        rows = rows_of(itl_over_time([run], tmp_path / "itl.png"), BLUE)
        return float(rows.max() - rows.min())

    def widening(record: RequestRecord, *, with_packet: bool) -> RequestRecord:
        times = [record.due_s + 0.01 * place**1.5 for place in range(50)]
        return msgspec.structs.replace(record, chunk_s=[*times, times[-1] + 2e-6] if with_packet else times)

    records = result().requests[:4]
    plain = result(requests=[widening(record, with_packet=False) for record in records])
    packet = result(requests=[widening(record, with_packet=index == 0) for index, record in enumerate(records)])
    assert spread(packet) > 0.8 * spread(plain) > 50


@pytest.mark.parametrize("name", ["costs $5 or $b_$", "[bold] {x} %s \\frac", "_", "/../.."])
def test_any_name_can_be_drawn(name: str, tmp_path: Path) -> None:
    place = tmp_path / "plots"
    paths = write_plots([result(name), result("other")], place)
    assert len(paths) == 5
    assert {path.parent for path in paths} == {place}
    assert sorted(place.iterdir()) == sorted(paths)


def test_runs_of_one_name_have_pictures_of_their_own(tmp_path: Path) -> None:
    paths = write_plots([result("a b"), result("a-b"), result("a-b")], tmp_path)
    assert [path.name for path in paths[:3]] == ["a-b-latency.png", "a-b-2-latency.png", "a-b-3-latency.png"]


def test_bursts_of_the_warm_up_are_not_marked() -> None:
    burst = result().requests[-1]
    warmup = msgspec.structs.replace(burst, is_warmup=True, due_s=0.2)
    assert burst_times_s(result(requests=[warmup, burst])) == [0.5]


def test_throughput_counts_tokens_and_not_chunks() -> None:
    """Two chunks that brought six tokens."""
    record = msgspec.structs.replace(result().requests[0], chunk_s=[0.5, 2.5], output_tokens=6)
    assert tokens_per_s([record], 1.0) == [3.0, 0.0, 3.0]
    assert tokens_per_s([record], 2.0) == [1.5, 1.5]
    assert tokens_per_s([], 1.0) == []
