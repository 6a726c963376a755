"""Why connections of clients were ended: counted each, told once a second."""

from __future__ import annotations

import logging
from enum import StrEnum

from prometheus_client import Counter

from kvrelay.common.clock import Clock
from kvrelay.common.logs import RareWarnings

logger = logging.getLogger(__name__)


class Reason(StrEnum):
    """The label ``reason`` of ``kvrelay_refused_connections_total``."""

    TOO_MANY_CONNECTIONS = "too_many_connections"
    INVALID_HTTP = "invalid_http"
    HEADERS_TOO_LARGE = "headers_too_large"
    HEADER_TIMEOUT = "header_timeout"
    BODY_TIMEOUT = "body_timeout"
    PIPELINE = "pipeline"
    CLIENT_READS_NOTHING = "client_reads_nothing"


class Refusals:
    """Counts refusals and logs them, one line a second at the most: a flood of them must not become a flood of logs."""

    def __init__(self, counter: Counter, clock: Clock) -> None:
        """``counter`` has one label, the reason."""
        self._counter = counter
        self._warnings = RareWarnings(logger, clock)
        for reason in Reason:
            counter.labels(reason)  # a series that begins at 0 is one that alerts can take the increase of

    def count(self, reason: Reason, detail: str, client: object) -> None:
        """One more; ``detail`` and the ``client``'s address are for the log."""
        self._counter.labels(reason).inc()
        self._warnings.warn(f"ended the connection of {client}: {detail}", str(reason))
