"""Ends a process when its parent ends, even if the parent dies by SIGKILL.

Linux can do that: a process asks for a signal at its parent's death, and the wish survives ``execve``. Elsewhere the wish has no
effect. The kernel means the *thread* that started the process: it must live as long.

``python -m kvrelay.common.lifeline PARENT_PID COMMAND …`` runs a command so.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def end_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent does; exits with code 1 if that is not ``parent_pid`` any more."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before we asked
        sys.exit(1)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606 - the caller's own argument list, no shell
