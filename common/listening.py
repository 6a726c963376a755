"""Opens the TCP sockets that a process's HTTP server listens on."""

from __future__ import annotations

import contextlib
import errno
import socket

_FAMILY_IS_MISSING = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
_MAX_TRIES = 10  # to find a port that is free in both families


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on ``port`` of ``host``; the caller closes them. Port 0: any free one, the same for all of them.

    The host ``::`` means all addresses of this machine. IPv4 has a socket of its own then, so that its clients keep their usual
    addresses. A machine that lacks one of the two families listens on the other one. Raises OSError if nothing is available.
    """
    if host != "::":
        return [_listen(socket.AF_INET6 if ":" in host else socket.AF_INET, host, port)]
    for _ in range(_MAX_TRIES - 1 if port == 0 else 0):
        try:
            return _listen_everywhere(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:  # the free port of one family is taken in the other
                raise
    return _listen_everywhere(port)


def _listen_everywhere(port: int) -> list[socket.socket]:
    with contextlib.ExitStack() as opened:
        found: list[socket.socket] = []
        for family, everywhere in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
            try:
                listener = opened.enter_context(_listen(family, everywhere, port))
            except OSError as error:
                if error.errno not in _FAMILY_IS_MISSING:
                    raise
                continue
            found.append(listener)
            port = listener.getsockname()[1]
        if not found:
            raise OSError(errno.EADDRNOTAVAIL, "neither IPv6 nor IPv4 is available")
        opened.pop_all()
    return found


def host_port(host: str, port: int) -> str:
    """``HOST:PORT`` as in a URL, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def way_out(error: OSError, host: str, port: str) -> str:
    """What to do about an ``error`` of ``listen``. ``host``, ``port``: the names of the settings."""
    if error.errno == errno.EADDRINUSE:
        return f"another process listens there; stop it, or choose another port with {port} (0: any free one)"
    if error.errno == errno.EACCES:
        return f"ports below 1024 need root; choose another one with {port}"
    return f"choose an address of this machine with {host}, or another {port}"


def _listen(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host, port))
        listener.listen()  # two sockets may be bound to one port; only listening shows that it is taken
    except OSError:
        listener.close()
        raise
    return listener
