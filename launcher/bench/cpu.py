"""Who used the CPU during a run: the generator, the server, others, the hypervisor. Linux only, from /proc.

On one machine the generator and other programs take what the server lacks; figures without this say little.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from kvrelay.launcher.bench.records import CpuUse


@dataclass(frozen=True, slots=True)
class MachineTimes:
    """Seconds of CPU time of all cores since boot."""

    busy_s: float  # everything but idle, waiting for disks, and stolen
    stolen_s: float
    num_cores: int


def machine_times(stat: Path = Path("/proc/stat")) -> MachineTimes | None:
    """The machine's; None where there is no /proc/stat."""
    try:
        lines = stat.read_text().splitlines()
        ticks = [int(value) for value in lines[0].split()[1:9]]
        user, nice, system, _idle, _iowait, irq, softirq, stolen = ticks
    except (OSError, ValueError, IndexError):
        return None
    scale = 1.0 / os.sysconf("SC_CLK_TCK")
    num_cores = sum(1 for line in lines if line.startswith("cpu") and line[3:4].isdigit())
    return MachineTimes((user + nice + system + irq + softirq) * scale, stolen * scale, num_cores)


@dataclass(slots=True)
class ProcessGroup:
    """CPU time of some processes and their descendants; remembers what those used that have ended since."""

    pids: Callable[[], Iterable[int]]
    _first_s: dict[tuple[int, float], float] = field(default_factory=dict)
    _last_s: dict[tuple[int, float], float] = field(default_factory=dict)

    def sample(self, *, is_first: bool = False, with_children: bool = True) -> None:
        """Read what they used up to now. At ``is_first`` they count from here, later ones from their start.

        Without ``with_children`` descendants are left for another time: finding them reads all of /proc, milliseconds.
        """
        for pid in self.pids():
            try:
                process = psutil.Process(pid)
                family = [process, *(process.children(recursive=True) if with_children else ())]
            except psutil.Error:
                continue
            for member in family:
                try:
                    key = (member.pid, member.create_time())
                    times = member.cpu_times()
                except psutil.Error:
                    continue
                used_s = times.user + times.system
                self._first_s.setdefault(key, used_s if is_first else 0.0)
                self._last_s[key] = used_s

    @property
    def used_s(self) -> float:
        """Since the first sample, up to the last one."""
        return sum(self._last_s[key] - first_s for key, first_s in self._first_s.items())


class CpuMeter:
    """``start``, ``sample`` now and then (processes may end in between), then ``stop``."""

    def __init__(self, own_pids: Callable[[], Iterable[int]], server_pids: Callable[[], Iterable[int]] | None) -> None:
        """``own_pids``: the generator's processes beside this one. ``server_pids``: None if the server is not ours.

        Both are asked again at each sample; descendants of server processes count as server.
        """
        self._server = None if server_pids is None else ProcessGroup(server_pids)
        self._helpers = ProcessGroup(own_pids)
        self._own_before_s = 0.0
        self._before: MachineTimes | None = None
        self._started_s = 0.0

    def start(self) -> None:
        """Count from now on."""
        self._before = machine_times()
        self._own_before_s = time.process_time()
        self._started_s = time.monotonic()
        self._sample(is_first=True)

    def sample(self) -> None:
        """Note what the processes used so far. Quick: the generator's event loop waits for it."""
        self._sample(is_first=False, with_children=False)

    def stop(self, max_lag_s: float) -> CpuUse | None:
        """What was used since ``start``; None where the machine does not say."""
        self._sample(is_first=False)
        after = machine_times()
        elapsed_s = time.monotonic() - self._started_s
        if self._before is None or after is None or elapsed_s <= 0:
            return None
        own = (time.process_time() - self._own_before_s + self._helpers.used_s) / elapsed_s
        server = None if self._server is None else self._server.used_s / elapsed_s
        busy = (after.busy_s - self._before.busy_s) / elapsed_s
        return CpuUse(
            num_cores=after.num_cores,
            generator=own,
            server=server,
            others=max(0.0, busy - own - (server or 0.0)),
            stolen=(after.stolen_s - self._before.stolen_s) / elapsed_s,
            generator_max_lag_s=max_lag_s,
        )

    def _sample(self, *, is_first: bool, with_children: bool = True) -> None:
        for group in (self._server, self._helpers):
            if group is not None:
                group.sample(is_first=is_first, with_children=with_children)
