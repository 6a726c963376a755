"""What listening on an address leaves in the file system, and its removal.

libzmq makes a socket file for ``ipc://path`` and never removes it. A process that took the path over in the meantime (libzmq
lets it) has a file of its own there, which must stay: hence the comparison of inodes. Not for addresses of peers.
"""

from __future__ import annotations

import contextlib
from pathlib import Path


class SocketFile:
    """The file behind a bound endpoint, if it has one. Make it right after ``bind``; ``remove`` it after ``close``."""

    def __init__(self, endpoint: str) -> None:
        path = endpoint.removeprefix("ipc://")
        has_file = path != endpoint and not path.startswith("@")  # "@": the abstract namespace
        self._path = Path(path) if has_file else None
        self._inode = self._path.stat().st_ino if self._path is not None else None

    def remove(self) -> None:
        """Delete the file if it is still the one that ``bind`` made. Side effects: the file system only."""
        if self._path is None:
            return
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()
