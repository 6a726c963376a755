"""Where two workers on one host find each other: the name of a unix socket, and the places that both look in.

The decode worker makes a name at every start, with 128 random bits, and tells it to prefill workers in ``Welcome``. ``@kvrelay-…``
is in the abstract namespace of its network namespace: one machine, or one pod, and nothing is left behind. ``kvrelay-….sock``
is a file in a directory that both were given, maybe under different paths: pods on one node that mount the same. A prefill
worker looks for nothing else, and nowhere else, whatever a peer says.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import socket
import stat
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from kvrelay.common.errors import SettingsError
from kvrelay.wire.addresses import SocketFile
from kvrelay.wire.errors import NoSharedMemoryError, WireError
from kvrelay.wire.settings import SameHostSettings

_NAME = re.compile(r"@kvrelay-[A-Za-z0-9_-]{1,64}|kvrelay-[A-Za-z0-9_-]{1,64}\.sock")
_RANDOM_NBYTES = 16
_MAX_PATH_NBYTES = 107  # sun_path, without its end
_BACKLOG = 128
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid
_STALE_AFTER_S = 60.0  # a socket file is younger than this between bind and listen


@dataclass(frozen=True, slots=True)
class SharedPlace:
    """What a worker was told about shared memory, if it was not told to do without."""

    directory: Path | None = None  # None: the abstract namespace

    @classmethod
    def of(cls, settings: SameHostSettings) -> SharedPlace | None:
        """The place that settings name; None for ``off``. Raises SettingsError if there cannot be sockets in it."""
        if settings.shared_memory in ("auto", "off"):
            return cls() if settings.shared_memory == "auto" else None
        place = cls(Path(settings.shared_memory))
        says = f"--shared-memory is {settings.shared_memory!r}; it must be auto, off, or"
        if not Path(settings.shared_memory).is_absolute() or not Path(settings.shared_memory).is_dir():
            raise SettingsError(f"{says} the absolute path of a directory that exists")
        if len(nbytes := place.address(place.new_name()).encode()) > _MAX_PATH_NBYTES:
            longest = _MAX_PATH_NBYTES - len(nbytes) + len(settings.shared_memory.encode())
            raise SettingsError(f"{says} a directory whose path has at most {longest} bytes")
        return place

    def new_name(self) -> str:
        """A name for a socket here that nobody has and nobody guesses."""
        random = f"kvrelay-{secrets.token_urlsafe(_RANDOM_NBYTES)}"
        return f"@{random}" if self.directory is None else f"{random}.sock"

    def address(self, name: str) -> str:
        """What a socket binds or connects to. Raises NoSharedMemoryError if ``name`` is not one for this place."""
        if _NAME.fullmatch(name) is None:
            raise NoSharedMemoryError(f"{name[:80]!r} is no name of a decode worker's socket")
        if name.startswith("@") is not (self.directory is None):
            theirs, ours = ("auto", "a directory") if name.startswith("@") else ("a directory", "auto")
            raise NoSharedMemoryError(f"--shared-memory is {theirs} at the decode worker and {ours} here")
        return f"\0{name[1:]}" if self.directory is None else str(self.directory / name)

    def listen(self, name: str) -> tuple[socket.socket, SocketFile]:
        """A socket of that name, which senders can connect to, and its file. Raises WireError."""
        address = self.address(name)
        shown = address.replace("\0", "@")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.setblocking(False)
            listener.bind(address)
            if self.directory is not None:
                Path(address).chmod(0o600)  # before anybody can connect
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            detail = f"cannot listen for shared memory on {shown}: {error}"
            raise WireError(f"{detail}; choose another --shared-memory, or off") from error
        return listener, SocketFile(f"ipc://{shown}")

    def sweep(self) -> None:
        """Remove the socket files of decode workers that were killed. Side effects: the file system only."""
        if self.directory is None:
            return
        for path in self.directory.glob("kvrelay-*.sock"):
            with contextlib.suppress(OSError):
                status = path.stat()
                if stat.S_ISSOCK(status.st_mode) and time.time() - status.st_mtime > _STALE_AFTER_S:
                    _remove_if_dead(path)


def is_trusted(connection: socket.socket) -> bool:
    """Whether a process of our user, or root's, connected. What others pass is not even received."""
    uid = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
    return uid in (0, os.geteuid())


def _remove_if_dead(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        if probe.connect_ex(str(path)) == errno.ECONNREFUSED:  # nobody has it open any more
            path.unlink()
