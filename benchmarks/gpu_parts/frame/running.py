"""Runs each section in a separate process, so that an error, a hang or a broken device context affects only that section.

A section is a generator. It yields rows, checks and facts at once, so its findings are kept even if it fails later. The processes
are forked from a server that has imported torch but not used a device, so they start fast.
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

_END_S = 20.0  # time for a process to end after its last message
# Modules that cannot be imported are skipped here, and the section that needs them fails. No import uses a device.
PRELOADED = ["torch", "gpu_parts.frame.running", "gpu_parts.kernels.attention", "gpu_parts.engine.stepping"]


@dataclass(frozen=True, slots=True)
class Note:
    """A line of progress."""

    text: str


@dataclass(frozen=True, slots=True)
class Fact:
    """A number for later sections."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Failure:
    """An early end of a section."""

    reason: str
    trace: str = ""


@dataclass(frozen=True, slots=True)
class _Done:
    """An orderly end of a section."""


Finding = Row | Checked | Note | Fact | Limits


@dataclass(frozen=True, slots=True)
class Context:
    """The input of a section."""

    sizes: Sizes
    device_type: str  # "cuda" or "cpu"
    is_dry: bool
    work: Path  # the run's own directory, removed at its end
    ends_s: float  # monotonic time at which the section is stopped
    seed: int  # a new one in every run
    limits: Limits | None = None
    facts: Mapping[str, float] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """The measured device."""
        return torch.device(self.device_type)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights, activations and KV."""
        dtype = getattr(torch, self.sizes.shape.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def remaining_s(self) -> float:
        """The remaining time of the section."""
        return self.ends_s - time.monotonic()

    def stopwatch(self) -> Stopwatch:
        """A stopwatch for this device."""
        sizes = self.sizes
        return Stopwatch(
            self.device,
            sizes.flush_bytes,
            warm_ups=sizes.warm_ups,
            min_repeats=sizes.min_repeats,
            max_repeats=sizes.max_repeats,
        )

    def generator(self) -> torch.Generator:
        """Random numbers on the device, different in every run."""
        return torch.Generator(self.device).manual_seed(self.seed)


Run = Callable[[Context], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Section:
    """One group of figures."""

    name: str
    entry: str  # module:generator, loaded in the section's process, so that only it fails without them
    longest_s: float
    kernels: tuple[Kernel, ...] = ()  # kernels whose checks must pass first
    least_s: float = 2.0  # with less time it is not begun: it would find nothing, and later ones can use the time


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a section."""

    name: str
    seconds: float
    findings: tuple[Finding, ...]  # all findings before its end
    failure: Failure | None
    device_after: str  # asked once: without persistence mode, nvidia-smi takes seconds


def run_section(section: Section, context: Context, hear: Callable[[Finding], None]) -> Outcome:
    """Run it in a separate process until its end or ``context.ends_s``. ``hear`` gets each finding at once."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(PRELOADED)
    begun_s = time.monotonic()
    findings: list[Finding] = []
    failure: Failure | None = None
    ours, theirs = processes.Pipe()
    # Not daemonic, because some sections start processes. These are in its process group and end with it.
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
                process.join(_END_S)
                break
            if isinstance(message, Failure):
                failure = message
                break
            findings.append(message)
            hear(message)
    except EOFError:
        process.join(_END_S)
        failure = Failure(f"its process ended without a word, with status {process.exitcode}")
    finally:  # an interrupted run does not wait for its section
        _kill_group(process.pid)
        process.join()
        ours.close()
    return Outcome(section.name, time.monotonic() - begun_s, tuple(findings), failure, device_state())


def load(entry: str) -> Run:
    """The generator named by ``entry``. Raises ImportError if its module, or a module that it needs, is missing."""
    module, name = entry.split(":")
    run: Run = getattr(importlib.import_module(module), name)
    return run


def _work(entry: str, context: Context, connection: Connection) -> None:
    os.setsid()  # the section's processes are in its group
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
    """Kill what is left of the section; nothing after an orderly end."""
    if pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
