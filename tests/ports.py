"""A port for a process that must be told which one it listens on."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port(host: str = "127.0.0.1") -> Iterator[int]:
    """A port of ``host`` that the system gives to nobody else meanwhile. Connections are refused until somebody listens.

    It is bound and does not listen. Beside such a socket another one may listen, if both have SO_REUSEADDR.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, 0))
        port: int = held.getsockname()[1]
        yield port
