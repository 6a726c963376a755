"""The fuzzing of control messages, in short: a fixed seed, so that what fails fails again."""

from __future__ import annotations

import pytest

from .fuzz_wire import TARGETS, fuzz, without_logs


@pytest.mark.parametrize("target", TARGETS)
def test_frames_of_all_kinds_break_nothing(target: str) -> None:
    with without_logs():
        assert fuzz(target, seed=20, num_frames=40_000)
