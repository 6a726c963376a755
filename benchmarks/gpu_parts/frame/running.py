"""Sections, each in a process of its own: one that raises, hangs or breaks the device's context takes nobody with it.

A section is a generator: it yields rows, checks and facts as soon as it has them, so that what it had before its end is kept. The
processes are forked from a server that has imported torch, and not touched a device, so that they begin at once.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from gpu_parts.frame.floors import Limits
from gpu_parts.frame.rows import Checked, Kernel, Row
from gpu_parts.frame.sizes import Sizes
from gpu_parts.frame.timing import Stopwatch, device_state
from kvrelay.common.lifeline import end_with_parent

_END_S = 20.0  # what a process may take to end behind its last word
# What cannot be imported is left out: who needs it says so. Importing any of it touches no device.
PRELOADED = ["torch", "gpu_parts.frame.running", "gpu_parts.kernels.attention", "gpu_parts.engine.stepping"]


@dataclass(frozen=True, slots=True)
class Note:
    """A line of progress."""

    text: str


@dataclass(frozen=True, slots=True)
class Fact:
    """A number that later sections go by."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Failure:
    """A section's end, before its time."""

    reason: str
    trace: str = ""


@dataclass(frozen=True, slots=True)
class _Done:
    """A section's orderly end."""


Finding = Row | Checked | Note | Fact | Limits


@dataclass(frozen=True, slots=True)
class Context:
    """What a section is told."""

    sizes: Sizes
    device_type: str  # "cuda" or "cpu"
    is_dry: bool
    work: Path  # the run's own directory, removed at its end
    ends_s: float  # of the monotonic clock: when the section is stopped
    seed: int  # fresh in every run
    limits: Limits | None = None
    facts: Mapping[str, float] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """The device that is measured."""
        return torch.device(self.device_type)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and KV."""
        dtype = getattr(torch, self.sizes.shape.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def remaining_s(self) -> float:
        """What is left of the section's time."""
        return self.ends_s - time.monotonic()

    def stopwatch(self) -> Stopwatch:
        """For this device."""
        sizes = self.sizes
        return Stopwatch(
            self.device,
            sizes.flush_bytes,
            warm_ups=sizes.warm_ups,
            min_repeats=sizes.min_repeats,
            max_repeats=sizes.max_repeats,
        )

    def generator(self) -> torch.Generator:
        """Random numbers on the device, others in every run."""
        return torch.Generator(self.device).manual_seed(self.seed)


Run = Callable[[Context], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Section:
    """One group of figures."""

    name: str
    entry: str  # module and generator: loaded in the section's process, which alone fails if it cannot be
    longest_s: float
    kernels: tuple[Kernel, ...] = ()  # whose checks must have passed: no times of what is wrong


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a section."""

    name: str
    seconds: float
    findings: tuple[Finding, ...]  # what it had until its end, orderly or not
    failure: Failure | None
    device_before: str
    device_after: str


def run_section(section: Section, context: Context, hear: Callable[[Finding], None]) -> Outcome:
    """Run it in a process of its own until it ends or ``context.ends_s``; ``hear`` is called with each finding as it comes."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(PRELOADED)
    begun_s, before = time.monotonic(), device_state()
    findings: list[Finding] = []
    failure: Failure | None = None
    ours, theirs = processes.Pipe()
    # Not daemonic: some sections have processes of their own, which are in its group and end with it.
    process = processes.Process(target=_work, args=(section.entry, context, theirs))
    process.start()
    theirs.close()
    try:
        while True:
            if not ours.poll(max(0.0, context.remaining_s)):
                failure = Failure(f"stopped: its {context.ends_s - begun_s:.0f} s were over")
                break
            message = ours.recv()
            if isinstance(message, _Done):
                break
            if isinstance(message, Failure):
                failure = message
                break
            findings.append(message)
            hear(message)
    except EOFError:
        process.join(_END_S)
        failure = Failure(f"its process ended without a word, with status {process.exitcode}")
    finally:
        if failure is None:
            process.join(_END_S)
        _kill_group(process.pid)
        process.join()
        ours.close()
    return Outcome(section.name, time.monotonic() - begun_s, tuple(findings), failure, before, device_state())


def load(entry: str) -> Run:
    """The generator that ``entry`` names. Raises ImportError if its module, or what that needs, is not there."""
    module, name = entry.split(":")
    run: Run = getattr(importlib.import_module(module), name)
    return run


def _work(entry: str, context: Context, connection: Connection) -> None:
    os.setsid()  # whatever the section starts is in its group
    end_with_parent(os.getppid())
    try:
        for finding in load(entry)(context):
            connection.send(finding)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        connection.send(Failure(f"{type(error).__name__}: {lines[0]}", traceback.format_exc()))
    else:
        connection.send(_Done())


def _kill_group(pid: int | None) -> None:
    """What is left of the section; nothing, if it ended in order."""
    if pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
