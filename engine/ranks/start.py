"""Processes of ranks: how one is started, and how it has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping

_END_S = 5.0  # what a rank that is not needed any more may take to end


def start_rank(environment: Mapping[str, str], descriptors: tuple[int, ...], *more: str) -> subprocess.Popen[bytes]:
    """``environment``: added to this process's. ``more``: arguments behind the descriptors, which the process gets."""
    return subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-P", "-m", "kvrelay.engine.rank_main", *map(str, descriptors), *more],
        env={**os.environ, **environment},
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a terminal's Ctrl-C is for who started it, which may still have requests to finish
    )


def how_it_ended(process: subprocess.Popen[bytes]) -> str:
    """In words, of a process whose link is over; waits for its end, though not for long."""
    try:
        code = process.wait(_END_S)
    except subprocess.TimeoutExpired:
        return "has closed its link"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"


def end(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a process whose link is over, and kill it if that takes long."""
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
