"""Traces of steps, for people: what each of the next N steps takes in this process, as torch's profiler sees it.

    idle ──ask──▶ asked ──begin──▶ recording, n left ──end of the last step──▶ written, and idle

The profiler starts and stops on the thread that computes steps, between two of them, because it records its own thread. Writing is
done there, too, so that all ranks are idle again before the leader takes the next order. Nothing here raises because of a trace: a
worker must not end for one. torch is imported by the first step that is recorded. Not for measuring: recorded steps are slower.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

logger = logging.getLogger(__name__)

_PREFIX = "kvrelay-profile-"


def trace_pattern() -> str:
    """Where traces of this host are."""
    return f"{tempfile.gettempdir()}/{_PREFIX}*/rank-*.json"


@dataclass(slots=True)
class StepCount:
    """How far a recording is. Pure."""

    num_asked: int = 0  # steps of the recording; 0 if idle
    num_left: int = 0  # of them that have not begun
    is_recording: bool = False

    def ask(self, num_steps: int) -> bool:
        """False if a recording is under way."""
        if self.num_asked:
            return False
        self.num_asked = self.num_left = num_steps
        return True

    def begin(self) -> bool:
        """A step of the recording begins. Returns whether it is the first one."""
        assert self.num_left > 0, f"{self.num_asked} steps are recorded already"
        self.num_left -= 1
        is_first, self.is_recording = not self.is_recording, True
        return is_first

    @property
    def is_over(self) -> bool:
        """Whether its last step has begun."""
        return self.is_recording and not self.num_left

    def reset(self) -> None:
        """The trace is written, or given up."""
        self.is_recording = False
        self.num_left = 0
        self.num_asked = 0  # last: from here on another thread may ask


class Trace(Protocol):
    """A recording of this thread."""

    def step(self) -> AbstractContextManager[object]:
        """Surrounds a step."""

    def stop(self) -> None:
        """Record no more. On the thread that started it: a process that exits without this may crash."""

    def write(self, path: Path) -> None:
        """Write a Chrome trace of what was recorded. After ``stop``."""


class StepProfiler:
    """Implements :class:`kvrelay.engine.step.interface.Profiler` for one process."""

    def __init__(self, start: Callable[[], Trace] | None = None) -> None:
        """``start``: starts a recording; None: torch's."""
        self._start = start or _TorchTrace
        self._lock = threading.Lock()
        self._count = StepCount()
        self._rank = 0
        self._trace: Trace | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether steps are asked for whose trace is not written yet. Any thread."""
        return self._count.num_asked > 0

    def ask(self, num_steps: int, rank: int = 0) -> str | None:
        """See Profiler. ``rank``: this process's."""
        with self._lock:
            if not self._count.ask(num_steps):
                return None
            self._rank = rank
        return trace_pattern()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Surrounds a step's launch on the thread that computes."""
        if self._count.num_asked:
            self.end()  # the step before failed, or its sampling was never launched
        if not self._count.num_left:
            yield
            return
        if self._count.begin():
            try:
                self._trace = self._start()
            except Exception:
                logger.exception("rank %d cannot record steps", self._rank)
                self._count.reset()
        with contextlib.nullcontext() if self._trace is None else self._trace.step():
            yield

    def end(self) -> None:
        """A step is launched, its sampling included. Writes the trace behind the last step."""
        if not self._count.is_over:
            return
        trace, self._trace = self._trace, None
        assert trace is not None, f"{self._count} without a trace"
        try:
            trace.stop()
            path = Path(tempfile.mkdtemp(prefix=_PREFIX)) / f"rank-{self._rank}.json"
            trace.write(path)
            # A warning, because ranks pass on nothing below.
            logger.warning("rank %d: a trace of %d steps is in %s", self._rank, self._count.num_asked, path)
        except Exception:
            logger.exception("rank %d cannot write a trace", self._rank)
        self._count.reset()

    def give_up(self) -> None:
        """See Profiler."""
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.stop()
            logger.warning("rank %d: %d steps of a recording never came", self._rank, self._count.num_left)
        self._count.reset()


class _TorchTrace:
    def __init__(self) -> None:
        """Starts at once."""
        import torch  # noqa: PLC0415 - the fake engine has none
        from torch.profiler import ProfilerActivity, profile, record_function  # noqa: PLC0415

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._record_function = record_function
        self._profile = profile(activities=activities)
        self._profile.start()

    def step(self) -> AbstractContextManager[object]:
        return self._record_function("step")

    def stop(self) -> None:
        self._profile.stop()  # waits for the device

    def write(self, path: Path) -> None:
        self._profile.export_chrome_trace(str(path))
