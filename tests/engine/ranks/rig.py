"""Helpers for tests of several ranks: a prompt to run, the ranks' processes, and time limits."""

from __future__ import annotations

import time
from typing import Any

import psutil

from kvrelay.engine.step.interface import Engine, StepRow
from tests.engine.conftest import sequence, tokens
from tests.engine.led import step

# Ranks add the parts of a sum in another order: 1.001e-5 in gpt_oss, for log probabilities down to -13.
ROUNDING = 2e-5
SOON_S = 10.0  # on a busy machine


def pids(leader: int | None = None) -> list[int]:
    """The process ids of the ranks that ``leader`` started, by default this process, in order of their start."""
    children = psutil.Process(leader).children()
    ranks = [child for child in children if "kvrelay.engine.rank_main" in child.cmdline()]
    return [rank.pid for rank in sorted(ranks, key=psutil.Process.create_time)]


def wait_until(condition: Any, what: str) -> None:
    end_s = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end_s, f"{what}, after {SOON_S:g} s"
        time.sleep(0.02)


def run(engine: Engine, **sampling: Any) -> Any:
    """Run a prompt in two chunks. Returns the sequence and its first token."""
    row = sequence(tokens(1, 45), [5, 9, 2, 30], num_groups=len(engine.card.layout.geometry.groups), **sampling)
    step(engine, [StepRow(row, 20)])
    row.num_computed_tokens = 20
    (result,) = step(engine, [StepRow(row, 25)])
    row.num_computed_tokens = 45
    assert result is not None
    return row, result
