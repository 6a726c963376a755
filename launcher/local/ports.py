"""Finds free TCP ports on this machine, for components that must know each other's address before they run.

It uses loopback TCP rather than ``ipc://``, because a cluster uses TCP too, and no socket file is left behind by a killed process.
The ports are below the kernel's range for outgoing connections. So no connection takes one by chance before the component's bind or
during a restart. In that range a client that keeps reconnecting to a dead loopback peer may even connect to itself.
"""

from __future__ import annotations

import random
import socket

from kvrelay.common.listening import listen, way_out
from kvrelay.launcher.errors import PortTakenError

_RANGE = range(20_000, 30_000)  # Linux' outgoing connections start at 32768 by default


def check_free(host: str, port: int) -> int:
    """Check that a server can listen on host:port. Returns the port, or the chosen port for 0.

    Raises PortTakenError that names the address and what to do.
    """
    try:
        probes = listen(host, port)
    except OSError as error:
        advice = way_out(error, "--host", "--port")
        raise PortTakenError(f"cannot listen on {host}:{port}: {error.strerror}; {advice}") from error
    chosen: int = probes[0].getsockname()[1]
    for probe in probes:
        probe.close()
    return chosen


def free_ports(count: int, *, without: int | None = None) -> list[int]:
    """``count`` different free ports on 127.0.0.1, never ``without``.

    Raises PortTakenError if there are too few.
    """
    start = random.randrange(len(_RANGE))  # noqa: S311 - to keep two launchers apart, not a secret
    found: list[int] = []
    for offset in range(len(_RANGE)):
        if len(found) == count:
            return found
        port = _RANGE[(start + offset) % len(_RANGE)]
        if port == without:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
    raise PortTakenError(f"only {len(found)} of {count} ports free in {_RANGE.start} to {_RANGE.stop - 1}")
