"""One request's answer on its way out: ASGI's ``send`` with what every answer has, and a shorter way for streams.

ASGI sends by coroutines, and so by tasks. For a stream of tokens that is too long a way: an :class:`Exchange` writes to the
connection in the very call that brings a first token, and just behind what brings more (:mod:`kvrelay.gateway.gathered_writes`). It
refuses if the client is behind: then ``send``, which waits, is the way.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from kvrelay.gateway.gathered_writes import GatheredWrites

EXTENSION = "kvrelay.exchange"  # of the ASGI scope, with an Exchange

Headers = Iterable[tuple[bytes, bytes]]


class Exchange:
    """One request and its answer on uvicorn's connection, beside ASGI: what has come, and writing chunks as ``send`` would."""

    def __init__(self, cycle: RequestResponseCycle, writes: GatheredWrites) -> None:
        """``writes``: of all connections."""
        self._cycle = cycle
        self._writes = writes

    def take_body(self) -> bytes | None:
        """The body, if all of it is here; ``receive`` then waits for what comes behind it. Else None, and nothing is taken."""
        cycle = self._cycle
        if cycle.more_body or cycle.disconnected:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        cycle.waiting_for_100_continue = False  # nothing more is to come
        cycle.message_event.clear()
        cycle.flow.resume_reading()
        return body

    def begin(self, headers: Headers, body: bytes) -> bool:
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
        self._writes.add(cycle, _chunk(body))
        return True

    def write_now(self) -> None:
        """Write the parts that wait to be; to be called before anything else is sent."""
        self._writes.write_now(self._cycle)


class Reply:
    """What an application sends by. Adds the request's id to the head, and remembers the status."""

    def __init__(self, send: Send, request_id: str, exchange: Exchange | None = None) -> None:
        """``exchange``: the short way, if there is one."""
        self.status = 0  # until the head is sent
        self._send = send
        self._id = (b"x-request-id", request_id.encode())
        self._exchange = exchange

    async def __call__(self, message: Message) -> None:
        """ASGI's ``send``."""
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), self._id]
        else:
            self.write_now()
        await self._send(message)
        if message["type"] == "http.response.start":
            self.status = message["status"]

    def begin(self, headers: Headers, body: bytes) -> bool:
        """Send head and first part now, or do nothing and return False."""
        if self._exchange is None or not self._exchange.begin((*headers, self._id), body):
            return False
        self.status = 200
        return True

    def write(self, body: bytes) -> bool:
        """Send a part that is not empty soon, or do nothing and return False."""
        return self._exchange is not None and self._exchange.write(body)

    def write_now(self) -> None:
        """What was written reaches the connection before anything else can happen to it."""
        if self._exchange is not None:
            self._exchange.write_now()


def _chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)
