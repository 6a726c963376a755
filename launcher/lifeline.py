"""Run a command that dies with the launcher: ``python -m kvrelay.launcher.lifeline PARENT_PID COMMAND …``.

If the launcher is killed with SIGKILL, nobody is left to stop its components. So this asks the kernel to do it
(:mod:`kvrelay.common.lifeline`), and then becomes the command.
"""

from __future__ import annotations

import os
import sys

from kvrelay.common.lifeline import end_with_parent


def main() -> None:
    """Replaces this process; returns never."""
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    end_with_parent(parent_pid)
    os.execv(command[0], command)  # noqa: S606 - the launcher's own argument list, no shell


if __name__ == "__main__":
    main()
