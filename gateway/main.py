"""Entry point of a gateway: one process that serves HTTP. More work than one core can do needs more replicas."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import logging
import signal
import socket
import time
from pathlib import Path
from types import FrameType
from typing import Any, cast

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from kvrelay.common.errors import SettingsError
from kvrelay.common.listening import host_port, listen, way_out
from kvrelay.common.logs import configure_logs
from kvrelay.common.system import raise_descriptor_limit
from kvrelay.gateway.app import create_app
from kvrelay.gateway.http.protocol import HttpProtocol
from kvrelay.gateway.http.sse import GatheredWrites
from kvrelay.gateway.http.tls import Certificate
from kvrelay.gateway.metrics import GatewayMetrics, Refusals
from kvrelay.gateway.settings import GatewaySettings, HttpLimits, TlsSettings

logger = logging.getLogger(__name__)

_GC_THRESHOLD = 20_000
_OTHER_DESCRIPTORS = 256  # descriptors for links to workers, the Kubernetes API, files
_ACCEPT_S = 0.01  # a moment in which the loop accepts all clients that have connected


def serve(settings: GatewaySettings) -> int:
    """Serve HTTP until SIGTERM or SIGINT; returns the exit code. Raises KvrelayError if it cannot start."""
    configure_logs(settings.log_level, settings.log_format)
    with contextlib.ExitStack() as opened:
        # The port comes first: if it is taken, the error comes before the tokenizer is loaded.
        listeners = [opened.enter_context(listener) for listener in _listen(settings.host, settings.port)]
        server = make_server(settings)
        host, port = listeners[0].getsockname()[:2]

        def stop(_number: int, _frame: FrameType | None) -> None:
            server.should_exit = True

        # uvicorn handles the signals and raises them again after it has ended. That must not kill the process.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        logger.info("gateway: %s://%s", "http" if settings.tls.tls_cert is None else "https", host_port(host, port))
        server.run(sockets=listeners)
    logger.info("gateway: stopped")
    return 0


def make_server(settings: GatewaySettings) -> uvicorn.Server:
    """Load everything and make the server. Raises KvrelayError."""
    metrics = GatewayMetrics(CollectorRegistry())
    limits = _fitting(settings.http, raise_descriptor_limit())
    certificate = _certificate(settings.tls)
    server: uvicorn.Server
    app = create_app(settings, metrics=metrics, is_ending=lambda: server.should_exit)
    refusals = Refusals(metrics.refused_connections, time.monotonic)
    server = make_http_server(app, limits, refusals, certificate=certificate, drain_s=settings.drain_s)
    # The loaded objects stay. A collection stops all streams, so it should not run after every 700 objects.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 20, 50)
    return server


def _fitting(limits: HttpLimits, num_descriptors: int) -> HttpLimits:
    """``limits`` with at most as many connections as there are descriptors."""
    most = max(1, num_descriptors - _OTHER_DESCRIPTORS)
    if limits.max_connections <= most:
        return limits
    logger.warning(
        "--max-connections is %d, but this process may open %d files; %d connections are served at a time. "
        "Raise the hard limit of open files (ulimit -Hn), or lower --max-connections",
        limits.max_connections,
        num_descriptors,
        most,
    )
    return dataclasses.replace(limits, max_connections=most)


def _certificate(settings: TlsSettings) -> Certificate | None:
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return Certificate(Path(settings.tls_cert), Path(settings.tls_key))


def _listen(host: str, port: int) -> list[socket.socket]:
    try:
        return listen(host, port)
    except OSError as error:
        raise SettingsError(
            f"cannot listen on {host}:{port}: {error.strerror}; {way_out(error, '--host', '--port')}"
        ) from error


def make_http_server(
    app: ASGIApp, limits: HttpLimits, refusals: Refusals, *, certificate: Certificate | None = None, drain_s: float
) -> uvicorn.Server:
    """The server that serves ``app`` on bound sockets.

    ``certificate``: None means plain HTTP. ``drain_s``: how long running requests may take after a signal.
    """
    server: uvicorn.Server
    protocol = functools.partial(
        HttpProtocol,
        limits=limits,
        refusals=refusals,
        writes=GatheredWrites(),
        is_ending=lambda: server.should_exit,
    )
    tls: dict[str, Any] = {}
    if certificate is not None:
        tls = {
            "ssl_context_factory": lambda *_: certificate.context,
            "callback_notify": certificate.look_again,
            "timeout_notify": 1,
        }
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="error",  # uvicorn would warn of each request that is not HTTP; Refusals logs that once a second
        access_log=False,
        proxy_headers=False,  # nothing depends on the client's claimed address
        loop="uvloop",
        http=cast(type[asyncio.Protocol], protocol),
        ws="none",
        timeout_graceful_shutdown=max(1, round(drain_s)),
        timeout_keep_alive=limits.keep_alive_s,  # type: ignore[arg-type]  # seconds of a timer: parts, too
        **tls,
    )
    server = _Server(config)
    return server


class _Server(uvicorn.Server):
    """Says when it begins to drain, as workers do, and resets no client that has connected by then."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running requests finish, then end. uvicorn calls this after a signal."""
        logger.info("gateway: draining for at most %d s", self.config.timeout_graceful_shutdown or 0)
        await asyncio.sleep(_ACCEPT_S)  # the end of a listener resets those that it has not accepted
        log = logging.getLogger("uvicorn.error")
        log.addFilter(_as_warning)
        try:
            await super().shutdown(sockets)
        finally:
            log.removeFilter(_as_warning)


def _as_warning(record: logging.LogRecord) -> bool:
    """Makes a warning with a way out of uvicorn's error about requests that outlast the drain, which is what the operator set."""
    if record.msg.startswith("Cancel %s running task"):
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.msg = "gateway: %s requests outlast the drain and are cut off; a longer --drain-s lets more of them end"
    return True
