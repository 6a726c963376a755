"""The machine that a benchmark ran on: what it is, and who used its CPU: the generator, the server, others, the hypervisor.

On one machine the generator and other programs take what the server lacks; figures without this say little.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

import kvrelay
from kvrelay.launcher.bench.records import CpuUse


@dataclass(frozen=True, slots=True)
class _Sample:
    """CPU time that had been used at one moment, s since some beginning."""

    at_s: float  # time.monotonic()
    own_s: float  # by this process
    server_s: float
    busy_s: float  # by everybody: all but idle, waiting for disks, and stolen
    stolen_s: float


class CpuMeter:
    """``sample`` now and then (processes may end in between), then ``use``."""

    def __init__(self, server_pids: Callable[[], Iterable[int]] | None) -> None:
        """``server_pids``, asked at each sample; what they started is the server too. None: they are not known."""
        self._server_pids = server_pids
        self._children: set[int] = set()
        self._used_s: dict[int, float] = {}  # of the server, by process; of one that ended, what it had used before
        self._samples: list[_Sample] = []
        self.sample(with_children=True)

    def sample(self, *, with_children: bool = False) -> None:
        """Note what was used so far.

        Without ``with_children`` new descendants are left for another time: finding them reads all of /proc, milliseconds.
        """
        pids = set() if self._server_pids is None else set(self._server_pids())
        for pid in pids if with_children else ():
            with contextlib.suppress(psutil.Error):
                self._children |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
        for pid in pids | self._children:
            with contextlib.suppress(psutil.Error):
                used = psutil.Process(pid).cpu_times()
                self._used_s[pid] = used.user + used.system
        machine = psutil.cpu_times()._asdict()
        busy_s = sum(machine.get(kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq"))
        server_s = sum(self._used_s.values())
        self._samples.append(
            _Sample(time.monotonic(), time.process_time(), server_s, busy_s, machine.get("steal", 0.0))
        )

    def use(self, from_s: float = 0.0, until_s: float = float("inf"), *, max_lag_s: float = 0.0) -> CpuUse | None:
        """What was used between two moments of ``time.monotonic()``, as closely as the samples around them tell.

        None if they span no time.
        """
        self.sample(with_children=True)
        before = next((one for one in reversed(self._samples) if one.at_s <= from_s), self._samples[0])
        after = next((one for one in self._samples if one.at_s >= until_s), self._samples[-1])
        elapsed_s = after.at_s - before.at_s
        if elapsed_s <= 0:
            return None
        own = (after.own_s - before.own_s) / elapsed_s
        server = None if self._server_pids is None else (after.server_s - before.server_s) / elapsed_s
        busy = (after.busy_s - before.busy_s) / elapsed_s
        return CpuUse(
            num_cores=psutil.cpu_count() or 1,
            generator=own,
            server=server,
            others=max(0.0, busy - own - (server or 0.0)),
            stolen=(after.stolen_s - before.stolen_s) / elapsed_s,
            generator_max_lag_s=max_lag_s,
        )


def environment() -> dict[str, str]:
    """Machine, cores, kernel and versions; of the machine that the generator runs on."""
    found = {
        "machine": platform.machine(),
        "cpu": _cpu_model() or platform.processor() or "unknown",
        "cores": str(os.cpu_count() or 1),
        "memory_gib": f"{psutil.virtual_memory().total / 2**30:.1f}",
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "kvrelay": kvrelay.__version__,
    }
    for package in ("torch", "triton", "transformers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
