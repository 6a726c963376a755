"""The worker's side of a compiling process: starts it on demand, sends it guides, and ends it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvrelay.common.sampling import Guide
from kvrelay.engine.guides.process import Answer, Request


@dataclass(frozen=True, slots=True)
class GuideLimits:
    """The limits for one guide."""

    cpu_s: float = 10.0
    wall_s: float = 60.0  # more than enough for cpu_s on a busy machine; if it passes, the process hangs
    start_s: float = 120.0  # time for a process to become ready


class GuideProcessError(Exception):
    """The process could not be started, or died, and no guide is to blame."""


class GuideProcess:
    """At most one process. One request at a time; any thread may call ``kill``."""

    def __init__(self, model_dir: Path, vocab_size: int, limits: GuideLimits) -> None:
        self._command = [sys.executable, "-P", "-m", "kvrelay.engine.guides.process", str(model_dir), str(vocab_size)]
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def start(self) -> None:
        """Start the process if there is none, and wait until it is ready. Raises GuideProcessError."""
        self._running()

    def compile(self, guide: Guide) -> Answer:
        """Compile a guide. If it exceeds a limit, the answer is an error, and the next call starts a new process.

        Raises GuideProcessError if there is no process.
        """
        process = self._running()
        assert process.stdin is not None
        request = Request(guide, self._limits.cpu_s)
        with contextlib.suppress(BrokenPipeError):  # the cause of death is reported below
            process.stdin.write(msgspec.json.encode(request) + b"\n")
            process.stdin.flush()
        answer = _read_answer(process, self._limits.wall_s)
        if answer is not None:
            return answer
        code = self._bury()
        if code == -signal.SIGPROF:
            return Answer(error=f"it took more than {self._limits.cpu_s:g} s to compile: make it simpler")
        if code == -signal.SIGKILL:
            return Answer(
                error=f"it took more than {self._limits.wall_s:g} s to compile, or too much memory: make it simpler"
            )
        return Answer(error=f"it broke the compiler (exit code {code}): make it simpler")

    def kill(self) -> None:
        """End the process at once, whatever it does, and any that is started later."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()
            process.wait()

    def close(self) -> None:
        """End the process and free its resources here. No thread may be in ``compile``."""
        if self._process is not None:
            self._bury()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        if self._process is not None:
            self._bury()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
            )
        except OSError as error:
            raise GuideProcessError(f"no process to compile guides could be started: {error}") from error
        if _read_answer(self._process, self._limits.start_s) is None:
            raise GuideProcessError(f"the process that compiles guides did not start: exit code {self._bury()}")
        if self._is_closed:
            self._process.kill()
        return self._process

    def _bury(self) -> int:
        process, self._process = self._process, None
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        if process.poll() is None:
            process.kill()
        code = process.wait()
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):  # from data that it had not read
            process.stdin.close()
        return code


def _read_answer(process: subprocess.Popen[bytes], timeout_s: float) -> Answer | None:
    """The next answer; None if the process ends, or none begins within ``timeout_s``."""
    assert process.stdout is not None
    poller = select.poll()
    poller.register(process.stdout, select.POLLIN)
    if not poller.poll(timeout_s * 1000):
        process.kill()
        return None
    line = process.stdout.readline()
    if not line.endswith(b"\n"):
        process.wait()
        return None
    return msgspec.json.decode(line, type=Answer)
