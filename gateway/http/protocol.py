"""HTTP/1.1 of one connection: uvicorn's protocol with additional bounds. Only this module and ``sse.py`` use uvicorn's internals.

uvicorn waits without limit for a request's headers, keeps all of them, and waits without limit for a client that does not read.
Here the request line and headers are bounded in bytes, number and time. Pipelined requests are bounded in number. A client that
reads next to nothing of an answer is disconnected, which ends its request. None of this runs for each token.
:mod:`kvrelay.gateway.http.edge` bounds the time of a body.

When uvicorn ends, it closes connections without a request, and so resets those whose first request has arrived and is not read yet.
Here such a request is answered, and the connection ends then.

A client that ends its side of a connection after a request (``nc -N``) still gets the answer. A client that closed its socket
looks the same until something is sent to it, so this sends it ``100 Continue``, which HTTP/1.1 allows. A closed socket answers with
a reset, and its request ends. HTTP/1.0 does not allow that, so there the end of one side ends the request.

A refused request gets an answer only if the client cannot mistake it for the answer to another request. Then its connection closes.
llhttp itself refuses what two parsers could read differently: Content-Length beside Transfer-Encoding or twice, line ends without
CR, folded headers, spaces before a colon.
"""

from __future__ import annotations

import asyncio
import http
import json
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from kvrelay.gateway.errors import ApiError, ConnectionsError, HeadersTooLargeError, InvalidHttpError, SlowClientError
from kvrelay.gateway.http.sse import EXTENSION, Exchange, GatheredWrites
from kvrelay.gateway.metrics import Reason, Refusals
from kvrelay.gateway.settings import HttpLimits

_MAX_HEADERS = 256  # each header is compared with the names that the gateway needs
_MAX_PIPELINED = 16  # requests after the one that is being answered
_HIGH_WATER_BYTES = 64 * 2**10  # bytes of an answer that the kernel has not taken when writing pauses
_LOW_WATER_BYTES = 16 * 2**10
_LINGER_S = 2.0
# So many connections beyond the limit may ask one of these. Otherwise Kubernetes would restart a gateway for its many clients, and
# end all streams.
_NUM_OPERATORS = 16
_OPERATORS_PATHS = (b"/health/live", b"/metrics")
_OPERATORS_S = 1.0
_PROBE_S = 0.5  # after a client's last byte, and from then on: whether it has closed its socket
_TCP_CLOSE = 7  # Linux's number of the state of a connection that was reset
_LAST_REQUEST_S = 1.0  # how long a server that ends waits for the first bytes on a new connection


class HttpProtocol(HttpToolsProtocol):
    """One connection, within ``limits``."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: HttpLimits,
        refusals: Refusals,
        writes: GatheredWrites,
        is_ending: Callable[[], bool],
    ) -> None:
        """``writes``: the gathered writes of all connections. ``is_ending``: whether each answer is its connection's last one."""
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._refusals = refusals
        self._writes = writes
        self._is_ending = is_ending
        self._is_refused = False
        self._is_beyond = False  # the limit on connections
        self._is_in_headers = False
        self._num_unparsed_bytes = 0  # since a request began or a part of its body arrived
        # uvicorn's ``cycle`` is the newest request, which may wait for this one.
        self._running: RequestResponseCycle | None = None
        self._header_timer: asyncio.TimerHandle | None = None
        self._client_timer: asyncio.TimerHandle | None = None  # runs while the client does not take the answer
        self._probe_timer: asyncio.TimerHandle | None = None  # runs once the client has ended its side

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request's headers, or refuse if there are too many connections. A TLS handshake is over by now."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES, low=_LOW_WATER_BYTES)  # TLS has other defaults
        num_beyond = len(self.connections) - self._limits.max_connections
        self._is_beyond = num_beyond > 0
        if num_beyond > _NUM_OPERATORS:
            self._refuse_connection()
        elif self._is_beyond:
            self._header_timer = self.loop.call_later(_OPERATORS_S, self._refuse_connection)
        else:
            self._await_headers()
        if self._is_ending():
            self.shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the requests, also one that runs before pipelined ones."""
        self._headers_came()
        self._client_reads()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        self._disconnect_requests()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. True if it may wait for an answer, which is then the last one; otherwise the connection ends.

        TLS ends both sides together, and so does this for HTTP/1.0.
        """
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self._is_in_headers or self._is_refused:
            return False
        if cycle.scope["http_version"] != "1.1" or not self.transport.can_write_eof():
            return False
        cycle.keep_alive = False
        if self._probe_timer is None:
            self._probe_timer = self.loop.call_later(_PROBE_S, self._probe, True)
        return True

    def _probe(self, is_first: bool) -> None:
        """End the connection if the client has closed its socket. No byte that comes tells, so nobody else would notice."""
        if self.transport.is_closing():
            return
        if _is_reset(self.transport):
            self.transport.abort()
            return
        running = self._running
        if is_first and running is not None and not running.response_started:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._probe_timer = self.loop.call_later(_PROBE_S, self._probe, False)

    def shutdown(self) -> None:
        """End after the request that runs, or that has begun to arrive. uvicorn calls this when the server ends.

        The request of a client that has just connected may be unread yet, so this waits a moment for it.
        """
        if self._header_timer is None:
            super().shutdown()
        elif self._num_unparsed_bytes == 0 and not self._is_beyond:
            self._headers_came()
            self._header_timer = self.loop.call_later(_LAST_REQUEST_S, self.transport.close)

    def data_received(self, data: bytes) -> None:
        """Parse the client's bytes; after a refusal, drop them."""
        if self._is_refused:
            return
        self._num_unparsed_bytes += len(data)
        super().data_received(data)
        if self._num_unparsed_bytes > self._limits.max_header_bytes:
            # Headers, or the framing of a body's chunks, are too long.
            self._refuse(Reason.HEADERS_TOO_LARGE, self._too_large())
        elif self._header_timer is None and (self._is_in_headers or self._is_idle()):
            self._await_headers()  # blank lines must also become a request in time

    def send_400_response(self, msg: str) -> None:
        """Refuse: the parser or one of its callbacks raised an error."""
        error = sys.exception()
        assert error is not None, "uvicorn calls it for an error of the parser"
        reason = error.__context__ or error
        self._refuse(Reason.INVALID_HTTP, InvalidHttpError(f"this is not HTTP/1.1: {reason}"))

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._is_in_headers = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; a trailer after a body is ignored."""
        if self._is_in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request, or let it wait for those before it. After a refusal it raises, which ends the parser's work."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if self._is_beyond and self.url.partition(b"?")[0] not in _OPERATORS_PATHS:
            self._refuse_connection()
        elif size > self._limits.max_header_bytes:
            self._refuse(Reason.HEADERS_TOO_LARGE, self._too_large())
        elif len(self.headers) > _MAX_HEADERS:
            text = f"the request has more than {_MAX_HEADERS} headers, which is the limit; send fewer"
            self._refuse(Reason.HEADERS_TOO_LARGE, HeadersTooLargeError(text))
        elif len(self.pipeline) >= _MAX_PIPELINED and not self._is_idle():
            text = f"more than {_MAX_PIPELINED} requests wait on this connection; open another one"
            self._refuse(Reason.PIPELINE, InvalidHttpError(text))
        if self._is_refused:
            raise ValueError("refused")
        self._headers_came()
        super().on_headers_complete()
        if self._is_beyond or self._is_ending():
            self.cycle.keep_alive = False
        self._is_in_headers = False
        self._num_unparsed_bytes = 0

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._num_unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The whole request has arrived."""
        self._num_unparsed_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start the next request. If the connection ends instead, the client has to take the answer in time."""
        super().on_response_complete()
        if self._is_in_headers:
            self._unset_keepalive_if_required()  # the next request has begun, and has its own timeout
        if self.transport.is_closing():
            self._watch_client()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection."""
        super().timeout_keep_alive_handler()
        self._watch_client()

    def pause_writing(self) -> None:
        """The client takes less than is written. The transport calls this."""
        super().pause_writing()
        self._watch_client()

    def resume_writing(self) -> None:
        """The client has caught up. The transport calls this."""
        super().resume_writing()
        if not self._is_refused and not self.transport.is_closing():
            self._client_reads()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        extensions: dict[str, Any] = {EXTENSION: Exchange(cycle, self._writes)}
        cycle.scope["extensions"] = extensions
        super()._start_asgi_task(cycle, app)

    def _is_idle(self) -> bool:
        """Whether all requests so far are answered."""
        return self.cycle is None or self.cycle.response_complete

    def _await_headers(self) -> None:
        if not self._is_refused:
            self._header_timer = self.loop.call_later(self._limits.header_timeout_s, self._on_header_timeout)

    def _headers_came(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _on_header_timeout(self) -> None:
        text = (
            f"the headers of a request were not complete after {self._limits.header_timeout_s:g} s; send them at once"
        )
        self._refuse(Reason.HEADER_TIMEOUT, SlowClientError(text))

    def _too_large(self) -> ApiError:
        limit = self._limits.max_header_bytes
        return HeadersTooLargeError(f"request line and headers have more than {limit} bytes, which is the limit")

    def _watch_client(self) -> None:
        if self._client_timer is None:
            size = self.transport.get_write_buffer_size()
            self._client_timer = self.loop.call_later(self._limits.client_timeout_s, self._on_client_timeout, size)

    def _on_client_timeout(self, size_before: int) -> None:
        """Disconnect a client that reads nothing.

        A slow client that still reads has taken at least the bytes between the water marks.
        """
        self._client_timer = None
        size = self.transport.get_write_buffer_size()
        if size == 0:  # TLS waits for the client's close message
            self.transport.abort()
            return
        if size_before - size >= _HIGH_WATER_BYTES - _LOW_WATER_BYTES:
            self._watch_client()
            return
        text = f"it took {max(0, size_before - size)} bytes of an answer in {self._limits.client_timeout_s:g} s"
        self._refusals.count(Reason.CLIENT_READS_NOTHING, text, self.client)
        self.transport.abort()

    def _client_reads(self) -> None:
        if self._client_timer is not None:
            self._client_timer.cancel()
            self._client_timer = None

    def _refuse_connection(self) -> None:
        """End a connection beyond the limit, whatever was sent."""
        most = self._limits.max_connections
        text = f"the server has {most} connections, which is its limit; try again in a moment"
        self._is_refused = True
        self._headers_came()
        self._refusals.count(Reason.TOO_MANY_CONNECTIONS, text, self.client)
        self.transport.write(raw_response(ConnectionsError(text, retry_after_s=1)))
        self.transport.close()
        self._watch_client()

    def _refuse(self, reason: Reason, error: ApiError) -> None:
        """End the connection. ``error`` is its last answer if no other answer is under way. Later calls do nothing."""
        if self._is_refused:
            return
        self._refusals.count(reason, str(error), self.client)
        self._is_refused = True
        self._headers_came()
        self._unset_keepalive_if_required()
        is_answerable = self._is_answerable()
        self._disconnect_requests()
        if not is_answerable or self.transport.is_closing():
            self.transport.abort()
            return
        self.transport.write(raw_response(error))
        # Closing with unread bytes in the kernel sends a reset, which can overtake the answer. So the rest of the input is
        # read and dropped.
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.flow.resume_reading()
        else:
            self.transport.close()
        self._client_reads()
        self._client_timer = self.loop.call_later(_LINGER_S, self.transport.abort)

    def _is_answerable(self) -> bool:
        """Whether the client would take an error for the answer to the request that caused it, and to no other."""
        running = self._running
        if running is None:
            return self._is_in_headers or self._num_unparsed_bytes > 0  # otherwise a client only connected
        if running is self.cycle and running.more_body:
            return not running.response_started
        return running.response_complete

    def _disconnect_requests(self) -> None:
        self.pipeline.clear()
        for cycle in (self._running, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()


def _is_reset(transport: asyncio.Transport) -> bool:
    with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as duplicate:
        return duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE


def raw_response(error: ApiError) -> bytes:
    """An HTTP response with an OpenAI error object, sent before the connection closes."""
    body = json.dumps(error.body()).encode()
    lines = [
        f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
    ]
    if error.retry_after is not None:
        lines.append(f"retry-after: {error.retry_after}")
    return "\r\n".join([*lines, "", ""]).encode() + body
