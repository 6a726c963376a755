"""benchmarks/handoff_parts/sides.py: a side does not outlive the process that started it."""

from __future__ import annotations

import importlib
import multiprocessing
import time
from pathlib import Path

import pytest

from tests.processes import is_alive

SIDES = """
import os, time
from handoff_parts.sides import Side

def start(connection):
    side = Side(asleep, ends_s=time.monotonic() + 600)
    connection.send(side.hear())
    time.sleep(600)

def asleep(connection):
    connection.send(os.getpid())
    time.sleep(600)
"""


def test_a_side_ends_when_its_starter_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parent is the fork server, which lives on; a device's memory must be free for the next section."""
    (tmp_path / "sides_of_a_test.py").write_text(SIDES)
    monkeypatch.syspath_prepend(tmp_path)
    processes = multiprocessing.get_context("forkserver")
    ours, theirs = processes.Pipe()
    starter = processes.Process(target=importlib.import_module("sides_of_a_test").start, args=(theirs,))
    starter.start()
    side = ours.recv()
    assert is_alive(side)
    starter.kill()
    starter.join()
    ends_s = time.monotonic() + 60
    while is_alive(side) and time.monotonic() < ends_s:
        time.sleep(0.01)
    assert not is_alive(side)
