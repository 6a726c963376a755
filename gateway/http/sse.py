"""Server-sent events: written at once to a client that keeps up, and queued for one that does not.

ASGI sends with coroutines, which is too slow for each token. An :class:`Exchange` writes a first token to the connection within the
call that brings it. Later tokens of one worker's message are gathered first. Then :class:`GatheredWrites` writes them, one
connection after the other. Writing each token at once would switch between Python and the kernel's network code for every token,
with cold caches, and would wake clients more often. Gathering the tokens of a few dozen streams takes at most a millisecond and
saves a third of the CPU time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from kvrelay.gateway.errors import ApiError, ClientBehindError, ShuttingDownError
from kvrelay.gateway.http.request import ApiRequest

logger = logging.getLogger(__name__)

EXTENSION = "kvrelay.exchange"  # key of the ASGI scope's extensions; the value is an Exchange

_CONNECTIONS_AT_ONCE = 32  # connections written in one go
_PARTS_AT_ONCE = 8  # parts of one connection, which may have to learn that its client is behind


class GatheredWrites:
    """The pending writes of all connections of a process. Lives on its asyncio loop."""

    def __init__(self) -> None:
        self._parts: dict[asyncio.Transport, list[bytes]] = {}
        self._is_due = False  # a call on the loop is scheduled

    def add(self, transport: asyncio.Transport, part: bytes) -> None:
        """Write ``part`` unchanged to a connection soon, after the parts added before."""
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
        """Write a connection's gathered parts, if any, because something else follows."""
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
            except Exception:  # an error of one connection does not concern the others
                logger.exception("a connection cannot be written to; it ends")
                transport.abort()


def _write(transport: asyncio.Transport, parts: list[bytes]) -> None:
    if not transport.is_closing():
        transport.write(parts[0] if len(parts) == 1 else b"".join(parts))


class Exchange:
    """Writes one request's answer to its connection without ASGI.

    It writes the same chunks as ``send``, in the call that makes them.
    """

    def __init__(self, cycle: RequestResponseCycle, writes: GatheredWrites) -> None:
        """``writes``: the gathered writes of all connections."""
        self._cycle = cycle
        self._writes = writes

    def begin(self, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bool:
        """Write a head with status 200 and a first part. Writes nothing and returns False if the client is behind or gone."""
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
        """Write a non-empty part soon. Writes nothing and returns False if the client is behind or gone."""
        cycle = self._cycle
        if cycle.disconnected or cycle.flow.write_paused:
            return False
        self._writes.add(cycle.transport, _chunk(body))
        return True

    def write_now(self) -> None:
        """Write the gathered parts. Call this before anything else is sent."""
        self._writes.write_now(self._cycle.transport)


def _chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


# JSON may contain these characters unescaped, and none of them ends an event. But some clients split lines at every Unicode
# line end.
_LINE_ENDS = tuple((end.encode(), f"\\u{ord(end):04x}".encode()) for end in ("\x85", "\u2028", "\u2029"))

MAX_WAITING_BYTES = 2**20  # bytes of one stream that wait outside its connection: some thousand events

DONE = b"data: [DONE]\n\n"  # OpenAI's last event


def sse(body: Any, name: str | None = None) -> bytes:
    """A server-sent event with ``body`` as JSON. ``name`` is the event's type, for APIs that have types."""
    head = b"data: " if name is None else b"event: " + name.encode() + b"\ndata: "
    return head + _json(body) + b"\n\n"


class ChunkTemplate:
    """Makes events that differ only in the last field of their body. The fields before it are encoded once."""

    def __init__(self, head: Mapping[str, Any], last_field: str) -> None:
        """``head``: the fields before the last one, at least one."""
        self._begin = b"data: " + _json(head)[:-1] + b',"' + last_field.encode() + b'":'

    def event(self, value: Any) -> bytes:
        """The event with this value of the last field."""
        return self._begin + _json(value) + b"}\n\n"


def _json(body: Any) -> bytes:
    data = msgspec.json.encode(body)
    if not data.isascii():
        for character, escape in _LINE_ENDS:
            data = data.replace(character, escape)
    return data


class EventStream(Response):
    """A response of server-sent events. ``produce`` passes events to :meth:`write` and returns the last ones.

    It is cancelled when the client leaves. An error before the first event is answered like any error; after that ``produce`` must
    not raise. ``failed`` makes the last events of a stream that is cut off. If the client is behind, an :class:`Exchange` refuses,
    and the stream uses ``send``, which waits.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        produce: Callable[[EventStream], Awaitable[bytes]],
        failed: Callable[[ApiError], bytes],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """``headers``: headers of the answer beside those of every stream."""
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        self.has_begun = False  # the status is sent, so there can be no other answer
        self._produce = produce
        self._failed = failed
        self._pending: list[bytes] = []  # events that the client could not take at once
        self._num_pending_bytes = 0
        self._sender: asyncio.Task[None] | None = None  # while events are pending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, or stop when cancelled."""
        self._send = send
        self._request: ApiRequest = scope["state"]["api_request"]
        self._exchange: Exchange | None = scope.get("extensions", {}).get(EXTENSION)
        try:
            last_words = await self._produce(self)
            if self._sender is not None:
                await self._sender
        except asyncio.CancelledError:
            if not self.has_begun or self._request.has_left():
                raise
            # A shutdown has waited long enough.
            self._request.cut = "failed_mid_stream"
            last_words = self._failed(self._request.fail(ShuttingDownError()))
        finally:
            if self._exchange is not None:  # also if an unexpected error closes the connection
                self._exchange.write_now()
            if self._sender is not None:
                self._sender.cancel()
                await asyncio.gather(self._sender, return_exceptions=True)
        await self._send_pending()
        await send({"type": "http.response.body", "body": last_words, "more_body": False})

    def write(self, events: bytes) -> None:
        """Send ``events``, perhaps none. The first call also sends the head. Events that the client cannot take yet are queued.

        Raises ClientBehindError, and queues nothing, if MAX_WAITING_BYTES are queued already.
        """
        if self._sender is not None or not self._is_sent(events):
            if self._num_pending_bytes >= MAX_WAITING_BYTES:
                raise ClientBehindError(
                    f"{self._num_pending_bytes} bytes of the answer wait for its client, and no more than {MAX_WAITING_BYTES} "
                    "may; read as fast as the answer comes, or ask for it in one piece"
                )
            self._pending.append(events)
            self._num_pending_bytes += len(events)
            self._sender = self._sender or asyncio.create_task(self._send_pending())
        self.has_begun = True

    def _is_sent(self, events: bytes) -> bool:
        """Whether the connection took ``events`` at once."""
        if self._exchange is None:
            return False
        if self.has_begun:
            return not events or self._exchange.write(events)
        request = self._request
        if "origin" in request.headers:  # from a web page: the CORS middleware adds headers in ``send``
            return False
        if not self._exchange.begin((*self.raw_headers, *request.answer_headers()), events):
            return False
        request.status = self.status_code
        return True

    async def _send_pending(self) -> None:
        if self._exchange is not None:
            self._exchange.write_now()
        if self._request.status == 0:
            await self._send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while num_taken := len(self._pending):
            body = b"".join(self._pending)
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
            del self._pending[:num_taken]
            self._num_pending_bytes -= len(body)
        self._sender = None
