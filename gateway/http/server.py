"""uvicorn's server, set up: it accepts, encrypts, and drains; each connection's bounds are :class:`HttpProtocol`'s."""

from __future__ import annotations

import asyncio
import functools
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from kvrelay.gateway.http.exchange import GatheredWrites
from kvrelay.gateway.http.protocol import HttpProtocol
from kvrelay.gateway.http.refusals import Refusals
from kvrelay.gateway.http.settings import HttpLimits
from kvrelay.gateway.http.tls import Certificate


def make_http_server(
    app: ASGIApp, limits: HttpLimits, refusals: Refusals, *, certificate: Certificate | None = None, drain_s: float
) -> uvicorn.Server:
    """What serves ``app`` on sockets that are bound already.

    ``certificate``: None means plain HTTP. ``drain_s``: how long running requests may take after a signal.
    """
    protocol = functools.partial(HttpProtocol, limits=limits, refusals=refusals, writes=GatheredWrites())
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
        log_level="error",  # it would warn of each request that is not HTTP: Refusals does so once a second
        access_log=False,
        proxy_headers=False,  # nothing here depends on who the client says it is
        loop="uvloop",
        http=cast(type[asyncio.Protocol], protocol),
        ws="none",
        timeout_graceful_shutdown=max(1, round(drain_s)),
        timeout_keep_alive=limits.keep_alive_s,  # type: ignore[arg-type]  # seconds of a timer: parts, too
        **tls,
    )
    return uvicorn.Server(config)
