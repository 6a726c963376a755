"""Describes the machine of a benchmark and measures who used its CPU: generator, server, others, hypervisor.

If all run on one machine, the generator and other programs take CPU time from the server. So results include it.
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
    """CPU seconds used up to one moment."""

    at_s: float  # time.monotonic()
    own_s: float  # by this process
    server_s: float
    busy_s: float  # by all processes: excludes idle time, waiting for disks, and stolen time
    stolen_s: float


class CpuMeter:
    """Measures CPU use. Call ``sample`` regularly, since processes may end in between, then ``use``."""

    def __init__(self, server_pids: Callable[[], Iterable[int]] | None) -> None:
        """``server_pids`` is called at each sample; descendants of its processes count as the server. None: unknown."""
        self._server_pids = server_pids
        self._children: set[int] = set()
        self._used_s: dict[int, float] = {}  # by process of the server; an ended process keeps its last value
        self._samples: list[_Sample] = []
        self.sample(with_children=True)

    def sample(self, *, with_children: bool = False) -> None:
        """Note the CPU time used so far.

        Without ``with_children`` no new descendants are looked for, because that reads all of /proc and takes milliseconds.
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
        """CPU use between two times of ``time.monotonic()``, as exactly as the samples around them allow.

        None if the samples span no time.
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
    """The generator's machine: CPU, cores, memory, kernel and versions."""
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
