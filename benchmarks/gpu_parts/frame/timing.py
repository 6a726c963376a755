"""Timing on a device: after a warm-up, by the device's events, with a cold cache in every repeat, as medians.

Events are on the device's time line. The flush before each repeat keeps the device busy while the host enqueues the call, so the
host's launch time is not included. In a dry run on a CPU the same calls are timed by wall clock, which means nothing.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable

import torch

_QUERY = "name,clocks.sm,clocks.mem,temperature.gpu,power.draw"


class Stopwatch:
    """Times calls on one device. Owns the buffer that flushes the cache."""

    def __init__(
        self, device: torch.device, flush_bytes: int, *, warm_ups: int, min_repeats: int, max_repeats: int
    ) -> None:
        self._is_cuda = device.type == "cuda"
        self._warm_ups = warm_ups
        self._min_repeats, self._max_repeats = min_repeats, max_repeats
        # Read, not written: dirty lines would be written back during the measurement.
        self._buffer = torch.ones(flush_bytes // 4, dtype=torch.float32, device=device)
        self._sink = torch.empty((), dtype=torch.float32, device=device)

    def median_s(self, call: Callable[[], object], *, budget_s: float = 0.5) -> float:
        """Median seconds of ``call``, which works on the device's current stream.

        It is repeated for about ``budget_s``, without the flushes.
        """
        for _ in range(self._warm_ups):
            call()
        self.synchronize()
        one_s = self._times_s(call, 1)[0]
        repeats = min(self._max_repeats, max(self._min_repeats, int(budget_s / max(one_s, 1e-6))))
        return statistics.median(self._times_s(call, repeats))

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._is_cuda:
            torch.cuda.synchronize()

    def _times_s(self, call: Callable[[], object], repeats: int) -> list[float]:
        if not self._is_cuda:
            return [self._host_s(call) for _ in range(repeats)]
        marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self._flush()
            start.record()
            call()
            end.record()
            marks.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e-3 for start, end in marks]

    def _host_s(self, call: Callable[[], object]) -> float:
        self._flush()
        begun_s = time.perf_counter()
        call()
        return time.perf_counter() - begun_s

    def _flush(self) -> None:
        torch.sum(self._buffer, dim=0, out=self._sink)


def device_state() -> str:
    """Name, clocks, temperature and power of the first GPU, as nvidia-smi prints them, or why it cannot be asked."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader", "--id=0"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"
    return answer.stdout.strip()


def device_name(device: torch.device) -> str:
    """The device, as torch names it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def busy_s(intervals: list[tuple[float, float]]) -> float:
    """The time in which at least one of the (start, end) intervals was active, in their unit."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total
