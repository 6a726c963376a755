"""The place where two workers on one host find each other: a unix socket with a random name.

The decode worker makes a new name with 128 random bits at every start, and sends it to prefill workers in ``Welcome``. A name like
``@kvrelay-…`` is in the abstract namespace of its network namespace (one machine, or one pod), and leaves no file. A name like
``kvrelay-….sock`` is a file in a directory that both workers can access, perhaps under different paths. A prefill worker accepts
only these two forms, and looks only in its own configured place, whatever a peer sends.
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
_MAX_PATH_NBYTES = 107  # size of sun_path without its final zero
_BACKLOG = 128
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid
_STALE_AFTER_S = 60.0  # longer than any pause between bind and listen


@dataclass(frozen=True, slots=True)
class SharedPlace:
    """Where sockets for shared memory are. A worker with ``--shared-memory off`` has no such place."""

    directory: Path | None = None  # None: the abstract namespace

    @classmethod
    def of(cls, settings: SameHostSettings) -> SharedPlace | None:
        """The place that the settings name; None for ``off``. Raises SettingsError if no socket can be made there."""
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
        """A fresh random name for a socket here, which nobody can guess."""
        random = f"kvrelay-{secrets.token_urlsafe(_RANDOM_NBYTES)}"
        return f"@{random}" if self.directory is None else f"{random}.sock"

    def address(self, name: str) -> str:
        """The address that a socket binds or connects to. Raises NoSharedMemoryError if ``name`` does not fit this place."""
        if _NAME.fullmatch(name) is None:
            raise NoSharedMemoryError(f"{name[:80]!r} is no name of a decode worker's socket")
        if name.startswith("@") is not (self.directory is None):
            theirs, ours = ("auto", "a directory") if name.startswith("@") else ("a directory", "auto")
            raise NoSharedMemoryError(f"--shared-memory is {theirs} at the decode worker and {ours} here")
        return f"\0{name[1:]}" if self.directory is None else str(self.directory / name)

    def listen(self, name: str) -> tuple[socket.socket, SocketFile]:
        """Listen under ``name``. Returns the socket, which does not block, and its file; the caller owns both. Raises WireError."""
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
        """Remove the socket files of decode workers that were killed. Changes nothing but the file system."""
        if self.directory is None:
            return
        for path in self.directory.glob("kvrelay-*.sock"):
            with contextlib.suppress(OSError):
                status = path.stat()
                if stat.S_ISSOCK(status.st_mode) and time.time() - status.st_mtime > _STALE_AFTER_S:
                    _remove_if_dead(path)


def is_trusted(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to our user or to root. From other processes nothing is read."""
    uid = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
    return uid in (0, os.geteuid())


def _remove_if_dead(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        if probe.connect_ex(str(path)) == errno.ECONNREFUSED:  # no process listens on it any more
            path.unlink()
