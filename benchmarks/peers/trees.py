"""A process with all its descendants: started, paused, resumed, and reliably ended.

Servers start helpers, some in their own sessions, so signals go to every descendant, not to a process group. kvrelay's ``lifeline``
ends a tree even if the benchmark is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from kvrelay.common.errors import KvrelayError

_POLL_S = 0.05
_KILL_S = 10.0  # time for the kernel to remove killed processes
_TAIL_CHARS = 1500


class PeerError(KvrelayError):
    """A side does not run or does not answer. The message names the side and its log."""


class ProcessTree:
    """One started command. The owner calls ``stop``, and may ``pause`` and ``resume`` before."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        """Start ``command`` in ``log``'s folder, and append its output to ``log``.

        In our own folder a peer's Python would import our packages with common names (``kernels``). ``environment`` adds to ours.
        PeerError if the program does not exist.
        """
        self.name = name
        self.log = log
        if not Path(command[0]).exists():
            raise PeerError(
                f"{name}: there is no {command[0]}; is --peers-dir right? (benchmarks/README.md installs the peers)"
            )
        lifeline = [sys.executable, "-P", "-m", "kvrelay.common.lifeline", str(os.getpid())]
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [*lifeline, *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **environment},
                cwd=log.parent,
                start_new_session=True,  # Ctrl-C is for the benchmark, which stops everything in order
            )
        self._seen = {self.process.pid: psutil.Process(self.process.pid)}

    def check_alive(self) -> None:
        """Raise PeerError with the end of the log if the command has ended."""
        if self.process.poll() is not None:
            raise PeerError(
                f"{self.name} ended with status {self.process.returncode}; {self.log} ends with:\n{self.tail()}"
            )

    def tail(self) -> str:
        """The end of the log."""
        return self.log.read_text(errors="replace")[-_TAIL_CHARS:]

    def pids(self) -> list[int]:
        """All living processes of the tree, including descendants whose parent has died."""
        for root in list(self._seen.values()):
            try:
                for member in [root, *root.children(recursive=True)]:
                    self._seen.setdefault(member.pid, member)
            except psutil.NoSuchProcess:
                continue
        self._seen = {pid: member for pid, member in self._seen.items() if _is_running(member)}
        return list(self._seen)

    def bind(self, word: str, cores: Sequence[int]) -> int:
        """Bind processes with ``word`` in their command line, with all threads, to ``cores``. Returns their number.

        Threads and processes that they start later inherit the binding.
        """
        found = 0
        for member in [self._seen[pid] for pid in self.pids()]:
            try:
                if word not in member.cmdline():
                    continue
                found += 1
                for thread in member.threads():
                    os.sched_setaffinity(thread.id, cores)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        return found

    def pause(self) -> None:
        """Stop the tree with SIGSTOP."""
        self._signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        """Undo ``pause``."""
        self._signal_all(signal.SIGCONT)

    def stop(self, grace_s: float) -> None:
        """Ask the tree to end, and kill the rest after ``grace_s``. Afterwards no process of it exists.

        Raises PeerError if the kernel does not end a process.
        """
        self.pids()
        self.resume()
        if self.process.poll() is None:
            self.process.terminate()
        if not self._are_gone(grace_s):
            self._signal_all(signal.SIGKILL)
            if not self._are_gone(_KILL_S):
                raise PeerError(f"{self.name}: processes {self.pids()} are there {_KILL_S:.0f} s after SIGKILL")
        self.process.wait(_KILL_S)

    def _are_gone(self, limit_s: float) -> bool:
        """Wait until all have ended, at most ``limit_s``."""
        deadline_s = time.monotonic() + limit_s
        while self.pids():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_POLL_S)
        return True

    def _signal_all(self, number: signal.Signals) -> None:
        for _ in range(2):  # twice, for processes that start meanwhile
            for pid in self.pids():
                try:
                    self._seen[pid].send_signal(number)
                except psutil.NoSuchProcess:
                    continue


def _is_running(process: psutil.Process) -> bool:
    """Whether a process runs; zombies do not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
