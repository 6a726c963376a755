"""Entry point of a gateway process."""

from __future__ import annotations

import logging
import socket

import uvicorn

from kvrelay.common.errors import SettingsError
from kvrelay.common.logs import configure_logs
from kvrelay.gateway.app import create_app
from kvrelay.gateway.settings import GatewaySettings

logger = logging.getLogger(__name__)


def serve(settings: GatewaySettings) -> int:
    """Serve HTTP until SIGTERM or SIGINT; returns the exit code. Raises KvrelayError if it cannot start."""
    configure_logs(settings.log_level, settings.log_format)
    listener = _listen(settings.host, settings.port)
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        loop="uvloop",
        http="httptools",
        timeout_graceful_shutdown=max(1, round(settings.drain_s)),
    )
    host, port = listener.getsockname()[:2]
    logger.info("gateway: http://%s:%d", host, port)
    uvicorn.Server(config).run(sockets=[listener])
    logger.info("gateway: stopped")
    return 0


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
