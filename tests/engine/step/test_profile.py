"""A recording of steps: its length, its end, and that its failure stops nothing else."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from kvrelay.engine.step.profile import StepCount, StepProfiler


class Recorded:
    """Counts steps instead of timing them."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.is_full = False  # the disk
        self.is_stopped = False

    def step(self) -> AbstractContextManager[object]:
        self.num_steps += 1
        return contextlib.nullcontext()

    def stop(self) -> None:
        assert not self.is_stopped
        self.is_stopped = True

    def write(self, path: Path) -> None:
        assert self.is_stopped
        if self.is_full:
            raise OSError("no space left on device")
        path.write_text(f"{self.num_steps} steps")


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Path]]:
    """Lists the written traces."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return lambda: sorted(tmp_path.glob("kvrelay-profile-*/rank-*.json"))


def test_a_count_goes_from_idle_over_its_steps_to_idle() -> None:
    count = StepCount()
    assert count.ask(2)
    assert not count.ask(1), "a recording is under way"
    assert [count.begin(), count.is_over] == [True, False]
    assert [count.begin(), count.is_over] == [False, True]
    with pytest.raises(AssertionError, match="2 steps are recorded already"):
        count.begin()
    count.reset()
    assert not count.is_over
    assert count.ask(1)


def test_exactly_the_next_steps_are_recorded_and_then_others_may_be(traces: Callable[[], list[Path]]) -> None:
    made: list[Recorded] = []

    def start() -> Recorded:
        made.append(Recorded())
        return made[-1]

    profiler = StepProfiler(start)

    def step() -> None:
        with profiler.step():
            pass
        profiler.end()

    step()
    assert not made, "something records, and nobody has asked"
    pattern = profiler.ask(2, rank=3)
    assert pattern is not None
    assert profiler.ask(1) is None
    step()
    assert not traces()
    step()
    step()
    (trace,) = traces()
    assert trace.match(pattern)
    assert (trace.name, trace.read_text()) == ("rank-3.json", "2 steps")
    assert trace.parent.stat().st_mode & 0o777 == 0o700
    assert profiler.ask(1) is not None


def test_a_step_that_fails_counts_and_the_next_one_writes(traces: Callable[[], list[Path]]) -> None:
    profiler = StepProfiler(Recorded)
    profiler.ask(1)
    with pytest.raises(MemoryError), profiler.step():
        raise MemoryError
    with profiler.step():
        (trace,) = traces()
    assert trace.read_text() == "1 steps"


def test_what_cannot_be_started_or_written_fails_no_step(
    traces: Callable[[], list[Path]], caplog: pytest.LogCaptureFixture
) -> None:
    full = Recorded()
    full.is_full = True

    def cannot() -> Recorded:
        raise RuntimeError("another profiler runs")

    for start, reason in ((cannot, "another profiler runs"), (lambda: full, "no space left on device")):
        profiler = StepProfiler(start)
        profiler.ask(1)
        with profiler.step():
            pass
        profiler.end()
        assert reason in caplog.text
        assert not traces()
        assert profiler.ask(1) is not None, "a recording is still under way"


def test_a_recording_whose_steps_never_come_stops_and_leaves_no_trace(traces: Callable[[], list[Path]]) -> None:
    recorded = Recorded()
    profiler = StepProfiler(lambda: recorded)
    profiler.give_up()
    profiler.ask(2)
    with profiler.step():
        pass
    profiler.end()
    profiler.give_up()
    assert recorded.is_stopped
    assert not traces()
    assert not profiler.is_under_way
