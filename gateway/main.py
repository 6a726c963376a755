"""Entry point of a gateway: one process that serves, or, with ``--workers`` above 1, the parent of several."""

from __future__ import annotations

import logging
import socket

from kvrelay.common.errors import SettingsError
from kvrelay.common.logs import configure_logs
from kvrelay.gateway.settings import GatewaySettings

logger = logging.getLogger(__name__)


def serve(settings: GatewaySettings) -> int:
    """Serve HTTP until SIGTERM or SIGINT; returns the exit code. Raises KvrelayError if it cannot start."""
    configure_logs(settings.log_level, settings.log_format)
    # The port first: that it is taken is told before the tokenizer is loaded.
    listener = _listen(settings.host, settings.port)
    try:
        code = _serve_alone(settings, listener) if settings.processes.workers == 1 else _supervise(settings, listener)
    finally:
        listener.close()
    logger.info("gateway: stopped")
    return code


def _serve_alone(settings: GatewaySettings, listener: socket.socket) -> int:
    from prometheus_client import CollectorRegistry  # noqa: PLC0415 - what serves is not loaded by a parent of those who do

    from kvrelay.gateway.metrics import GatewayMetrics  # noqa: PLC0415
    from kvrelay.gateway.serving import make_server  # noqa: PLC0415

    server = make_server(settings, GatewayMetrics(CollectorRegistry()))
    logger.info("gateway: %s", _address(settings, listener))
    server.run(sockets=[listener])
    return 0


def _supervise(settings: GatewaySettings, listener: socket.socket) -> int:
    from kvrelay.gateway.processes import Processes  # noqa: PLC0415 - a process that serves alone has none

    num_processes = settings.processes.workers
    logger.info("gateway: %d processes at %s", num_processes, _address(settings, listener))
    return Processes(settings, listener).run()


def _address(settings: GatewaySettings, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"{'http' if settings.tls.tls_cert is None else 'https'}://{host}:{port}"


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises SettingsError naming the address if it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"--port: cannot listen on {host}:{port} ({error.strerror}); choose another port"
        ) from error
    return listener
