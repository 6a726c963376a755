"""Helpers for tests of several ranks: a prompt to run, the ranks' processes, and time limits."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvrelay.engine.step.interface import Engine, StepRow
from tests.engine.conftest import sequence, tokens
from tests.engine.led import step
from tests.processes import started

# Ranks add the parts of a sum in another order, and each processor in its own: 0.8e-5 with AVX2 and AVX-512, and 2.1e-5 with
# SSE 4.1, for log probabilities down to -13. Sums in bf16 differ by 0.1.
ROUNDING = 6e-5
SOON_S = 60.0  # more than anything that happens by itself takes on a busy machine


def pids(leader: int | None = None) -> list[int]:
    """The process ids of the ranks that ``leader`` started, by default this process, in order of their start."""
    return started("kvrelay.engine.rank_main", leader)


def wait_until(condition: Any, what: str) -> None:
    end_s = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end_s, f"{what}, after {SOON_S:g} s"
        time.sleep(0.02)


def expect_signs_within(engine: Any, silent_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a rank of this engine is lost when it is silent for ``silent_s``.

    Not before it has loaded: a busy machine may stop a rank that loads for longer than that.
    """
    monkeypatch.setattr("kvrelay.engine.ranks.rank.SILENT_S", silent_s)
    for _ in range(2):  # the next sign of life may still be waited for as long as before, or be taken just now
        for rank in engine._ranks.others:
            rank.num_meetings = -1
        wait_until(lambda: all(rank.num_meetings >= 0 for rank in engine._ranks.others), "no sign of life from a rank")


def run(engine: Engine, **sampling: Any) -> Any:
    """Run a prompt in two chunks. Returns the sequence and its first token."""
    row = sequence(tokens(1, 45), [5, 9, 2, 30], num_groups=len(engine.card.layout.geometry.groups), **sampling)
    step(engine, [StepRow(row, 20)])
    row.num_computed_tokens = 20
    (result,) = step(engine, [StepRow(row, 25)])
    row.num_computed_tokens = 45
    assert result is not None
    return row, result
