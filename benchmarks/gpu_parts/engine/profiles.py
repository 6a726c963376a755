"""What a device did while something ran: how long it was busy, and with which kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from gpu_parts.frame.timing import busy_s

_SHOWN = 14
_NAME_LEN = 60


@dataclass(frozen=True, slots=True)
class Kernels:
    """All kernels of one name, per repeat."""

    name: str
    count: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Profile:
    """The device's work, per repeat."""

    busy_s: float  # at least one kernel or copy ran
    idle_share: float  # from the first kernel's start to the last one's end, with the profiler's own cost
    kernels: tuple[Kernels, ...]  # the costliest first

    def text(self) -> str:
        """The costliest kernels, one line."""
        shown = [f"{one.count:.0f} x {one.name} {one.seconds * 1e6:.0f} us" for one in self.kernels[:_SHOWN]]
        rest = sum(one.seconds for one in self.kernels[_SHOWN:])
        return "; ".join([*shown, f"{len(self.kernels[_SHOWN:])} others {rest * 1e6:.0f} us"])


def profiled(call: Callable[[], object], repeats: int) -> Profile | None:
    """Run ``call`` under torch's profiler, with the device idle before and after. None if the profiler saw no kernel.

    A step that is left running at the end counts, as does one that ran before: the caller has both, or neither.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    events = [event for event in (profiler.events() or []) if event.device_type == DeviceType.CUDA]
    if not events:
        return None
    intervals = [(event.time_range.start, event.time_range.end) for event in events]
    busy = busy_s(intervals) * 1e-6
    span = (max(end for _, end in intervals) - min(start for start, _ in intervals)) * 1e-6
    counts: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for event in events:
        counts[event.name] += 1
        seconds[event.name] += (event.time_range.end - event.time_range.start) * 1e-6
    kernels = [Kernels(name[:_NAME_LEN], counts[name] / repeats, seconds[name] / repeats) for name in counts]
    kernels.sort(key=lambda one: -one.seconds)
    return Profile(busy / repeats, 1 - busy / span, tuple(kernels))
