"""Entry point of a gateway process."""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Iterator
from types import FrameType

import uvicorn

from kvrelay.common.errors import SettingsError
from kvrelay.common.logs import configure_logs
from kvrelay.gateway.app import create_app
from kvrelay.gateway.settings import GatewaySettings

logger = logging.getLogger(__name__)

_GC_THRESHOLD = 20_000


class _Server(uvicorn.Server):
    """A uvicorn server whose ``run`` returns after a signal: uvicorn raises it again, and the process would die of it."""

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


def serve(settings: GatewaySettings) -> int:
    """Serve HTTP until SIGTERM or SIGINT; returns the exit code. Raises KvrelayError if it cannot start."""
    configure_logs(settings.log_level, settings.log_format)
    # The port first: that it is taken is told before the tokenizer is loaded.
    listener = _listen(settings.host, settings.port)
    try:
        app = create_app(settings)
    except BaseException:
        listener.close()
        raise
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        proxy_headers=False,  # nothing here depends on who the client says it is
        loop="uvloop",
        http="httptools",
        timeout_graceful_shutdown=max(1, round(settings.drain_s)),
    )
    host, port = listener.getsockname()[:2]
    logger.info("gateway: http://%s:%d", host, port)
    # What is loaded stays; and a collection, which stops all streams, need not come after every 700 objects.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 20, 50)
    _Server(config).run(sockets=[listener])
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
