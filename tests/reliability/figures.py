"""Figures of a process (memory, processor time, descriptors), and how a script prints its results."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence

import psutil

MIB = 2**20


def rss_mib() -> float:
    """Resident memory of this process."""
    nbytes: int = psutil.Process().memory_info().rss
    return nbytes / MIB


def cpu_s(pid: int) -> float:
    """The processor time that a process has used."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def all_descriptors() -> int:
    """Raise this process's limit on descriptors as far as allowed. Returns the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def wait_until(is_so: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Wait for a state and return the seconds that took. Raises AssertionError naming ``what`` after ``timeout_s``."""
    started_s = time.monotonic()
    while not is_so():
        waited_s = time.monotonic() - started_s
        assert waited_s < timeout_s, f"after {waited_s:.1f} s still not: {what}"
        time.sleep(0.02)
    return time.monotonic() - started_s


def run_all(runs: Sequence[tuple[str, Callable[[], str]]]) -> int:
    """Make all runs and print a line for each. Returns the exit code: 1 if any failed."""
    code = 0
    for name, run in runs:
        started_s = time.monotonic()
        try:
            line = run()
        except AssertionError as error:
            line, code = f"FAILED: {error}", 1
        sys.stdout.write(f"{name}: {line} ({time.monotonic() - started_s:.1f} s)\n")
        sys.stdout.flush()
    return code
