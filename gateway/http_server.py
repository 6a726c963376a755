"""uvicorn's server behind an accept loop of our own: connections are counted, and encrypted, before there is any HTTP.

asyncio's servers accept whatever comes, bring TLS handshakes to their end unseen, and take one certificate for all their life.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from kvrelay.gateway.errors import ConnectionsError
from kvrelay.gateway.gathered_writes import GatheredWrites
from kvrelay.gateway.http_protocol import HttpProtocol, raw_response
from kvrelay.gateway.refusals import Reason, Refusals
from kvrelay.gateway.settings import HttpLimits
from kvrelay.gateway.tls import Certificate

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_ACCEPTS_AT_ONCE = 64
_ACCEPT_AGAIN_S = 1.0


class HttpServer(uvicorn.Server):
    """Serves ``app`` on sockets that are bound already; ``run`` and ``serve`` return after a signal.

    (uvicorn's own raises the signal again, and the process would die of it.)
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: HttpLimits,
        refusals: Refusals,
        *,
        certificate: Certificate | None = None,
        drain_s: float,
    ) -> None:
        """``certificate``: None means plain HTTP. ``drain_s``: how long running requests may take after a signal."""
        # From being accepted on: uvicorn counts them after the TLS handshake.
        self._connections: set[HttpProtocol] = set()
        protocol = functools.partial(
            HttpProtocol,
            limits=limits,
            refusals=refusals,
            writes=GatheredWrites(),
            on_lost=self._forget,
        )
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                proxy_headers=False,  # nothing here depends on who the client says it is
                loop="uvloop",
                http=cast(type[asyncio.Protocol], protocol),
                ws="none",
                timeout_graceful_shutdown=max(1, round(drain_s)),
                timeout_keep_alive=limits.keep_alive_s,  # type: ignore[arg-type]  # seconds of a timer: parts, too
            )
        )
        self._limits = limits
        self._refusals = refusals
        self._certificate = certificate
        self._listeners: Sequence[socket.socket] = ()
        self._opening: set[asyncio.Task[None]] = set()  # connections until their handshake is over

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop gracefully at the first SIGTERM or SIGINT, and at once at the second."""

        def on_signal(_number: int, _frame: FrameType | None) -> None:
            self.force_exit = self.should_exit
            self.should_exit = True

        previous = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then listen on ``sockets``."""
        await super().startup(sockets=[])
        self._listeners = sockets or []
        for listener in self._listeners:
            listener.setblocking(False)
            listener.listen(_BACKLOG)
            self._watch(listener)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nothing more, let requests end, stop the application."""
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            loop.remove_reader(listener)
        self._listeners = ()
        if self._certificate is not None:  # handshakes may take long
            for task in self._opening:
                task.cancel()
        # Without TLS they are open in a moment. Cancelled in that, uvloop closes a connection without a word to its protocol,
        # and whoever waits for it to end would wait for ``drain_s``.
        await asyncio.gather(*self._opening, return_exceptions=True)
        await super().shutdown(sockets)

    def _watch(self, listener: socket.socket) -> None:
        if listener in self._listeners:  # it may be gone when the pause after a full table of descriptors ends
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        """Take what waits, but not for so long that running requests do."""
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                connection, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._refusals.count(Reason.TOO_MANY_CONNECTIONS, f"accept failed: {error}", "somebody")
                self._pause(listener, _ACCEPT_AGAIN_S, self._watch)
                return
            connection.setblocking(False)
            if len(self._connections) >= self._limits.max_connections:
                self._turn_away(connection, address)
                continue
            protocol = self._protocol()
            self._connections.add(protocol)
            task = asyncio.create_task(self._open(protocol, connection, address))
            self._opening.add(task)
            task.add_done_callback(functools.partial(self._opened, protocol, connection))

    def _pause(self, listener: socket.socket, pause_s: float, then: Callable[[socket.socket], None]) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        loop.call_later(pause_s, then, listener)

    def _forget(self, protocol: HttpProtocol) -> None:
        self._connections.discard(protocol)

    def _turn_away(self, connection: socket.socket, address: Any) -> None:
        text = f"the server has {self._limits.max_connections} connections, which is its limit; try again in a moment"
        self._refusals.count(Reason.TOO_MANY_CONNECTIONS, text, address)
        with connection, contextlib.suppress(OSError):
            if self._certificate is None:
                connection.send(raw_response(ConnectionsError(text, retry_after_s=1)))

    async def _open(self, protocol: HttpProtocol, connection: socket.socket, address: Any) -> None:
        """Hand a connection over to its protocol, after the TLS handshake if there is one."""
        loop = asyncio.get_running_loop()
        encryption: dict[str, Any] = {}
        if self._certificate is not None:
            encryption = {
                "ssl": self._certificate.context(),
                "ssl_handshake_timeout": self._limits.header_timeout_s,
                "ssl_shutdown_timeout": self._limits.client_timeout_s,
            }
        is_open = False
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
            await loop.connect_accepted_socket(lambda: protocol, connection, **encryption)
            is_open = True
        except ConnectionResetError:
            pass  # left, or looked only whether somebody listens
        except OSError as error:
            what = error.reason if isinstance(error, ssl.SSLError) else error
            self._refusals.count(Reason.TLS_HANDSHAKE, f"no TLS handshake: {what}", address)
        finally:
            if not is_open:
                self._forget(protocol)

    def _opened(self, protocol: HttpProtocol, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._opening.discard(task)
        if task.cancelled():  # perhaps before it began
            self._forget(protocol)
            self.server_state.connections.discard(protocol)  # or just when its handshake was over: nobody waits for it
            connection.close()

    def _protocol(self) -> HttpProtocol:
        make = cast(Any, self.config.http_protocol_class)
        protocol: HttpProtocol = make(
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            _loop=asyncio.get_running_loop(),
        )
        return protocol
