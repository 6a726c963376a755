"""Runs a load generator as a process, and watches meanwhile who uses the CPU."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from kvrelay.launcher.bench.records import CpuUse
from peers.load import SAMPLE_S, SideMeter


def run_metered(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: Path,
    limit_s: float,
    server_pids: Callable[[], Iterable[int]],
) -> tuple[int | None, CpuUse | None]:
    """Run ``command`` with ``environment`` (all of it) in ``log``'s folder; its output is appended to ``log``.

    Its exit status, None if it was killed after ``limit_s``, and the CPU use of server, generator and others until then. Raises
    OSError if there is no such program.
    """
    children: list[psutil.Process] = []
    meter = SideMeter(server_pids, lambda: [pid for child in children for pid in _family(child)])
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=dict(environment), cwd=log.parent
        )
        children.append(psutil.Process(process.pid))
        try:
            deadline_s = time.monotonic() + limit_s
            while process.poll() is None and time.monotonic() < deadline_s:
                meter.sample()
                time.sleep(SAMPLE_S)
            status = process.poll()
        finally:
            process.kill()
            process.wait()
    return status, meter.stop()


def _family(process: psutil.Process) -> list[int]:
    """Generators start helpers, and are gone with them before the last look."""
    try:
        return [process.pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.Error:
        return []
