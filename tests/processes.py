"""Whether a process still runs, and which processes another one has started."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil


def is_alive(pid: int) -> bool:
    """Whether the process exists and has not ended. One that was killed may be so for a moment."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # ProcessLookupError: it ended between opening and reading
        return False


def started(module: str, by: int | None = None) -> list[int]:
    """The processes of ``module`` that process ``by``, or this one, has started and that run, in order of their start."""
    found: list[tuple[float, int]] = []
    for child in psutil.Process(by).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # another one, which has just ended
            if module in child.cmdline():
                found.append((child.create_time(), child.pid))
    return [pid for _, pid in sorted(found)]
