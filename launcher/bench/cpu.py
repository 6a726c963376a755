"""Who used the CPU during a run: the generator, the server, others, the hypervisor. Linux only, from /proc.

On one machine the generator and other programs take what the server lacks; figures without this say little.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence
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
    _known: set[int] = field(default_factory=set)  # descendants that were found

    def sample(self, *, is_first: bool = False, with_children: bool = True) -> None:
        """Read what they used up to now. At ``is_first`` they count from here, later ones from their start.

        Without ``with_children`` new descendants are left for another time: finding them reads all of /proc, milliseconds.
        """
        pids = list(self.pids())
        if with_children:
            self._known |= {child for pid in pids for child in _descendants(pid)}
        for pid in {*pids, *self._known}:
            try:
                member = psutil.Process(pid)
                key = (pid, member.create_time())
                times = member.cpu_times()
            except psutil.Error:
                self._known.discard(pid)
                continue
            used_s = times.user + times.system
            self._first_s.setdefault(key, used_s if is_first else 0.0)
            self._last_s[key] = used_s

    @property
    def used_s(self) -> float:
        """Since the first sample, up to the last one."""
        return sum(self._last_s[key] - first_s for key, first_s in self._first_s.items())


@dataclass(frozen=True, slots=True)
class CpuSample:
    """CPU times that had been used at one moment, s since some beginning."""

    at_s: float  # time.monotonic()
    own_s: float  # by the generator
    server_s: float
    busy_s: float  # by everybody
    stolen_s: float


class CpuMeter:
    """``start``, ``sample`` now and then (processes may end in between), then ``stop``."""

    def __init__(self, own_pids: Callable[[], Iterable[int]], server_pids: Callable[[], Iterable[int]] | None) -> None:
        """``own_pids``: the generator's processes beside this one. ``server_pids``: None if the server is not ours.

        Both are asked again at each sample; descendants of server processes count as server.
        """
        self._server = None if server_pids is None else ProcessGroup(server_pids)
        self._helpers = ProcessGroup(own_pids)
        self._samples: list[CpuSample] = []
        self._num_cores = 0

    def start(self) -> None:
        """Count from now on."""
        self._sample(is_first=True, with_children=True)

    def sample(self) -> None:
        """Note what the processes used so far. Quick: the generator's event loop waits for it."""
        self._sample(is_first=False, with_children=False)

    def stop(self, max_lag_s: float, *, from_s: float | None = None, until_s: float | None = None) -> CpuUse | None:
        """What was used since ``start``, or between two times of ``time.monotonic()``; None where the machine does not say."""
        self._sample(is_first=False, with_children=True)
        return cpu_use(
            self._samples,
            num_cores=self._num_cores,
            has_server=self._server is not None,
            max_lag_s=max_lag_s,
            from_s=from_s,
            until_s=until_s,
        )

    def _sample(self, *, is_first: bool, with_children: bool) -> None:
        for group in (self._server, self._helpers):
            if group is not None:
                group.sample(is_first=is_first, with_children=with_children)
        machine = machine_times()
        if machine is None:
            return
        self._num_cores = machine.num_cores
        self._samples.append(
            CpuSample(
                at_s=time.monotonic(),
                own_s=time.process_time() + self._helpers.used_s,
                server_s=0.0 if self._server is None else self._server.used_s,
                busy_s=machine.busy_s,
                stolen_s=machine.stolen_s,
            )
        )


def cpu_use(
    samples: Sequence[CpuSample],
    *,
    num_cores: int,
    has_server: bool,
    max_lag_s: float,
    from_s: float | None = None,
    until_s: float | None = None,
) -> CpuUse | None:
    """What ``samples`` say of the time between two moments, all of theirs by default; None if they span none of it. Pure."""
    if not samples:
        return None
    before, after = _at(samples, from_s, samples[0]), _at(samples, until_s, samples[-1])
    elapsed_s = after.at_s - before.at_s
    if elapsed_s <= 0:
        return None
    own = (after.own_s - before.own_s) / elapsed_s
    server = (after.server_s - before.server_s) / elapsed_s if has_server else None
    busy = (after.busy_s - before.busy_s) / elapsed_s
    return CpuUse(
        num_cores=num_cores,
        generator=own,
        server=server,
        others=max(0.0, busy - own - (server or 0.0)),
        stolen=(after.stolen_s - before.stolen_s) / elapsed_s,
        generator_max_lag_s=max_lag_s,
    )


def _at(samples: Sequence[CpuSample], moment_s: float | None, default: CpuSample) -> CpuSample:
    """Between two samples as if CPU was used evenly; before the first and after the last one, that one."""
    if moment_s is None:
        return default
    for before, after in itertools.pairwise(samples):
        if before.at_s <= moment_s < after.at_s:
            share = (moment_s - before.at_s) / (after.at_s - before.at_s)
            values = zip(dataclasses.astuple(before), dataclasses.astuple(after), strict=True)
            return CpuSample(*(low + (high - low) * share for low, high in values))
    return samples[0] if moment_s < samples[0].at_s else samples[-1]


def _descendants(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []
