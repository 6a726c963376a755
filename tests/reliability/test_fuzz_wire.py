"""The fuzzing of the wire, in short: a fixed seed, so that what fails fails again."""

from __future__ import annotations

import pytest

from .fuzz_wire import runs, without_logs

SEED, NUM_FRAMES = 20, 200_000
RUNS = dict(runs(SEED, NUM_FRAMES))


@pytest.mark.parametrize("target", RUNS)
def test_frames_of_all_kinds_break_nothing(target: str) -> None:
    with without_logs():
        assert RUNS[target]()
