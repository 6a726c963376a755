"""Run a command that dies with the launcher: ``python -m kvrelay.launcher.lifeline PARENT_PID COMMAND …``.

If the launcher is killed with SIGKILL, nobody is left to stop its components. Linux can do that: a process asks for a
signal at its parent's death, and the wish survives ``execve``. So this asks, and then becomes the command. Elsewhere the
command runs without the wish. The kernel means the *thread* that started the process: it must live as long.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main() -> None:
    """Replaces this process; returns never."""
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before we asked
        sys.exit(1)
    os.execv(command[0], command)  # noqa: S606 - the launcher's own argument list, no shell


if __name__ == "__main__":
    main()
