"""Starts the processes of ranks, and finds out how they ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping

_END_S = 5.0  # time for a rank to end


def start_rank(environment: Mapping[str, str], descriptors: tuple[int, ...], *more: str) -> subprocess.Popen[bytes]:
    """Start a rank's process. ``environment``: added to this process's. ``descriptors``: passed on.

    ``more``: arguments after them.
    """
    return subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-P", "-m", "kvrelay.engine.rank_main", *map(str, descriptors), *more],
        env={**os.environ, **environment},
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a terminal's Ctrl-C is for the leader, which may still have requests to finish
    )


def how_it_ended(process: subprocess.Popen[bytes]) -> str:
    """How a process ended whose link is over, in words. Waits for its end, though not for long."""
    try:
        code = process.wait(_END_S)
    except subprocess.TimeoutExpired:
        return "has closed its link"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"


def end(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a process whose link is over; kill it if that takes long."""
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
