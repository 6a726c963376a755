"""One component as a child process: started in its own session, its output read line by line, and reliably stopped.

Its own session shields it from the terminal's Ctrl-C, so the launcher decides the stop order. The lifeline
(:mod:`kvrelay.common.lifeline`) ends it if the launcher is killed. One thread starts and stops the child, and must live as long as
the child. Only the output is read on another thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_TAIL_LINES = 20  # kept for error messages


@dataclass(frozen=True, slots=True)
class ComponentSpec:
    """The command of a component, and how to tell that it is ready."""

    name: str  # shown in status and logs, such as "prefill-0"
    command: tuple[str, ...]
    ready_url: str  # answers 200 when the component takes traffic
    stop_rank: int = 0  # lower ranks are stopped first
    grace_s: float = 10.0  # from SIGTERM to SIGKILL
    # Added to the launcher's environment, which is passed without its KVRELAY_ variables.
    environment: Mapping[str, str] = field(default_factory=dict)


class Child:
    """A running or ended process of a component."""

    def __init__(self, spec: ComponentSpec, on_line: Callable[[str, str], None]) -> None:
        """Start it. A separate thread calls ``on_line(name, line)``. Raises OSError if the program does not exist."""
        self._name = spec.name
        self._on_line = on_line
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.started_s = time.monotonic()
        lifeline = (sys.executable, "-P", "-m", "kvrelay.common.lifeline", str(os.getpid()))
        self._process = subprocess.Popen(  # noqa: S603 - the launcher's own argument list, no shell
            [*lifeline, *spec.command],
            env={**_environment(), "PYTHONUNBUFFERED": "1", **spec.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, name=f"log-{spec.name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process id, also the id of its process group."""
        return self._process.pid

    @property
    def tail(self) -> list[str]:
        """Its last lines of output."""
        return list(self._tail)

    def rss_bytes(self) -> int | None:
        """The memory that it uses; None if the system does not report it."""
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        except (OSError, IndexError, ValueError):
            return None
        return pages * os.sysconf("SC_PAGE_SIZE")

    def exit_code(self) -> int | None:
        """None while it runs. After its end this also ends its process group and reads the output to the end."""
        if self._process.returncode is not None:
            return self._process.returncode
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        # It is not reaped yet, so the number of the process group still belongs to it.
        self._signal_group(signal.SIGKILL)
        self._process.wait()
        self._reader.join(timeout=2.0)
        return self._process.returncode

    def terminate(self) -> None:
        """Ask it to stop (SIGTERM)."""
        if self.exit_code() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and its process group. Returns when it is gone."""
        if self.exit_code() is None:
            self._signal_group(signal.SIGKILL)
            self._process.wait()
            self._reader.join(timeout=2.0)

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _read(self) -> None:
        assert self._process.stdout is not None, "started with a pipe"
        with self._process.stdout as lines:
            for line in lines:
                text = line.rstrip("\r\n")
                self._tail.append(text)
                self._on_line(self._name, text)


def describe_exit(code: int) -> str:
    """``exit code 1``, or ``killed by SIGKILL`` with its usual cause."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (out of memory? see dmesg)" if -code == signal.SIGKILL else ""
    return f"killed by {name}{hint}"


def _environment() -> dict[str, str]:
    """The environment without kvrelay's variables: the launcher passes those settings on the command line."""
    return {name: text for name, text in os.environ.items() if not name.startswith("KVRELAY_")}
