"""Answers on their connections, beside ASGI; parts that come in one go are gathered, then written one connection after the other.

A worker's message brings a token for each of its streams. To write each as soon as it is text means to go back and forth between
Python and the kernel's network code, each of which finds its caches filled by the other, and to wake a client that has just gone to
sleep again. What a few dozen streams have to say is gathered first, which takes a millisecond at most, and then written: that
takes a third less of the CPU. Where a message is not read before the next one comes, a stream's parts also leave together.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

logger = logging.getLogger(__name__)

EXTENSION = "kvrelay.exchange"  # of the ASGI scope, with an Exchange

_CONNECTIONS_AT_ONCE = 32  # that wait for each other
_PARTS_AT_ONCE = 8  # of one connection, which may have to be told that its client is behind


class GatheredWrites:
    """Of all connections of a process. Lives on its asyncio loop."""

    def __init__(self) -> None:
        self._parts: dict[asyncio.Transport, list[bytes]] = {}
        self._is_due = False  # on the loop

    def add(self, transport: asyncio.Transport, part: bytes) -> None:
        """Write ``part``, as it is, to a connection: soon, and behind what was added before."""
        parts = self._parts.get(transport)
        if parts is None:
            self._parts[transport] = [part]
            if not self._is_due:
                self._is_due = True
                asyncio.get_running_loop().call_soon(self._write_due)
            if len(self._parts) >= _CONNECTIONS_AT_ONCE:
                self._write_all()
        else:
            parts.append(part)
            if len(parts) >= _PARTS_AT_ONCE:
                self.write_now(transport)

    def write_now(self, transport: asyncio.Transport) -> None:
        """Write what is gathered for a connection, maybe nothing: something else comes behind it."""
        parts = self._parts.pop(transport, None)
        if parts is not None:
            _write(transport, parts)

    def _write_due(self) -> None:
        self._is_due = False
        self._write_all()

    def _write_all(self) -> None:
        gathered, self._parts = self._parts, {}
        for transport, parts in gathered.items():
            try:
                _write(transport, parts)
            except Exception:  # of this connection: the others have nothing to do with it
                logger.exception("a connection cannot be written to; it ends")
                transport.abort()


def _write(transport: asyncio.Transport, parts: list[bytes]) -> None:
    if not transport.is_closing():
        transport.write(parts[0] if len(parts) == 1 else b"".join(parts))


class Exchange:
    """One request's answer on its connection, beside ASGI: writes chunks as ``send`` would, in the very call that makes them."""

    def __init__(self, cycle: RequestResponseCycle, writes: GatheredWrites) -> None:
        """``writes``: of all connections."""
        self._cycle = cycle
        self._writes = writes

    def begin(self, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bool:
        """Write a head of status 200 and a first part; False, and nothing written, if the client is behind, or gone."""
        cycle = self._cycle
        if cycle.disconnected or cycle.flow.write_paused or cycle.response_started:
            return False
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        cycle.chunked_encoding = True
        lines = [name + b": " + value + b"\r\n" for name, value in (*cycle.default_headers, *headers)]
        if not cycle.keep_alive:
            lines.append(b"connection: close\r\n")
        head = b"HTTP/1.1 200 OK\r\n" + b"".join(lines) + b"transfer-encoding: chunked\r\n\r\n"
        cycle.transport.write(head + _chunk(body) if body else head)
        return True

    def write(self, body: bytes) -> bool:
        """Write one more part, not empty, soon; False, and nothing written, if the client is behind, or gone."""
        cycle = self._cycle
        if cycle.disconnected or cycle.flow.write_paused:
            return False
        self._writes.add(cycle.transport, _chunk(body))
        return True

    def write_now(self) -> None:
        """Write the parts that wait to be; to be called before anything else is sent."""
        self._writes.write_now(self._cycle.transport)


def _chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)
