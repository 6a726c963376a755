"""A short run of the fuzzing of control messages, with a fixed seed, so that a failure repeats."""

from __future__ import annotations

import pytest

from .fuzz_wire import TARGETS, fuzz, without_logs


@pytest.mark.parametrize("target", TARGETS)
def test_frames_of_all_kinds_break_nothing(target: str) -> None:
    with without_logs():
        assert fuzz(target, seed=20, num_frames=40_000)
