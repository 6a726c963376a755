from __future__ import annotations

from pathlib import Path

from peers.plots import quietest_round, stutter_plot
from peers.rounds import Sample

from tests.benchmarks.results import stuttering


def sample(number: int, side: str, others: float, stolen: float, *, is_good: bool = True) -> Sample:
    return Sample("burst", number, side, {"x": 1.0} if is_good else {}, 1.0, others, cpu_stolen=stolen)


def test_the_round_is_drawn_that_was_disturbed_least_at_its_worst() -> None:
    samples = [
        sample(0, "a", 0.0, 0.0), sample(0, "b", 0.0, 0.4),
        sample(1, "a", 0.1, 0.0), sample(1, "b", 0.1, 0.1),
        sample(2, "a", 0.0, 0.0), sample(2, "b", 0.0, 0.0, is_good=False),
    ]  # fmt: skip
    assert quietest_round(samples, ("a", "b")) == 1
    assert quietest_round(samples, ("a",)) == 0
    assert quietest_round(samples, ("a", "c")) is None


def test_a_picture_is_drawn_into_a_folder_that_is_made(tmp_path: Path) -> None:
    path = stutter_plot({"ours": stuttering(), "theirs": stuttering()}, "title", tmp_path / "plots" / "itl.png")
    assert path.read_bytes().startswith(b"\x89PNG")
