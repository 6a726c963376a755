"""What one serving process is made of: the application, its certificate, its HTTP server."""

from __future__ import annotations

import dataclasses
import gc
import logging
from pathlib import Path

from kvrelay.common.descriptors import raise_descriptor_limit
from kvrelay.gateway.app import create_app
from kvrelay.gateway.http_server import HttpServer
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.refusals import Refusals
from kvrelay.gateway.settings import GatewaySettings, HttpLimits, TlsSettings
from kvrelay.gateway.siblings import Siblings
from kvrelay.gateway.tls import Certificate

logger = logging.getLogger(__name__)

_GC_THRESHOLD = 20_000
_OTHER_DESCRIPTORS = 256  # links to workers, the Kubernetes API, files


def make_server(settings: GatewaySettings, metrics: GatewayMetrics, siblings: Siblings | None = None) -> HttpServer:
    """Load everything; ``siblings`` are the other processes of the same gateway, if there are any. Raises KvrelayError."""
    limits = _fitting(settings.http, raise_descriptor_limit())
    certificate = _certificate(settings.tls)
    app = create_app(settings, metrics=metrics, siblings=siblings)
    refusals = Refusals(metrics.refused_connections)
    server = HttpServer(
        app,
        limits,
        refusals,
        certificate=certificate,
        drain_s=settings.drain_s,
        busy_poll_s=settings.processes.busy_poll_ms * 1e-3,
        door=siblings,
    )
    # What is loaded stays; and a collection, which stops all streams, need not come after every 700 objects.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 20, 50)
    return server


def _fitting(limits: HttpLimits, num_descriptors: int) -> HttpLimits:
    """``limits`` with no more connections than there are descriptors for."""
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
