"""Addresses that a process listens on: who can reach them, and the files that they leave behind.

libzmq makes a socket file for ``ipc://path`` and never removes it. libzmq also lets another process take the path over meanwhile.
That process has its own file there, which must stay. So inodes are compared before a file is removed.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from pathlib import Path

_TCP = re.compile(r"tcp://.+:(?P<port>[0-9]{1,5}|\*)")


def is_local(address: str) -> bool:
    """Whether only this machine can reach ``address`` (``tcp://HOST:PORT``, ``ipc://PATH``, ``inproc://NAME``)."""
    scheme, _, rest = address.partition("://")
    host = rest.rpartition(":")[0].strip("[]")
    if scheme != "tcp" or host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False  # a name, an interface, or all of them


def has_port(address: str) -> bool:
    """Whether ``address`` is ``tcp://HOST:PORT`` with a port that exists; 0 and ``*``: any. ZeroMQ would take 70000 for 4464."""
    match = _TCP.fullmatch(address)
    return match is not None and (match["port"] == "*" or int(match["port"]) <= 65535)


def with_brackets(address: str) -> str:
    """``address`` with brackets around an IPv6 host that has none, as in ``tcp://fd00::7:7200``: a pod cannot add them."""
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    return f"{scheme}://[{host}]:{port}" if scheme == "tcp" and ":" in host and not host.startswith("[") else address


def is_ipv6(address: str) -> bool:
    """Whether the host of ``address`` is an IPv6 address, in brackets."""
    return address.startswith("tcp://[")


def data_address(control_address: str, announced: str) -> str:
    """Where to send blocks: ``announced``, but with the host of ``control_address`` if the worker listens on all interfaces."""
    host_and_port = announced.removeprefix("tcp://")
    if announced.startswith("tcp://") and host_and_port.rpartition(":")[0] in ("0.0.0.0", "*", "[::]"):
        host = control_address.removeprefix("tcp://").rpartition(":")[0]
        return f"tcp://{host}:{host_and_port.rpartition(':')[2]}"
    return announced


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
