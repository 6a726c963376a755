"""A worker's small HTTP server: ``/health``, ``/health/live``, ``/health/ready``, ``/metrics``, ``/debug/kv``, and
``POST /debug/profile``.

It runs on the worker's asyncio loop, so that probes fail if the loop hangs. Not for user traffic.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator
from typing import Any, Protocol

import uvicorn
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvrelay.common.errors import SettingsError
from kvrelay.common.listening import listen, way_out
from kvrelay.engine.step.interface import Profiler

_MAX_PROFILE_STEPS = 100  # a step of 30 layers is 2 MB of trace, and the worker waits while it is written


class AdminProbe(Protocol):
    """The questions that the admin server asks the component."""

    def not_live(self) -> list[str]:
        """Reasons to restart the process; empty if there are none."""

    def not_ready(self) -> list[str]:
        """Reasons to send no traffic; empty if ready."""

    def debug_kv(self) -> dict[str, Any]:
        """Every block's place and owner, as JSON-able data."""

    @property
    def profiler(self) -> Profiler | None:
        """What records steps; None if this process leads none, or cannot record them."""


def admin_app(probe: AdminProbe, registry: CollectorRegistry) -> Starlette:
    """The ASGI application."""

    def verdict(reasons: list[str]) -> JSONResponse:
        if reasons:
            return JSONResponse({"status": "unavailable", "reasons": reasons}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def live(_: Request) -> Response:
        return verdict(probe.not_live())

    async def ready(_: Request) -> Response:
        return verdict(probe.not_ready())

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def debug_kv(_: Request) -> Response:
        return JSONResponse(probe.debug_kv())

    async def profile(request: Request) -> Response:
        steps = request.query_params.get("steps", "20")
        if not (re.fullmatch("[0-9]{1,3}", steps) and 1 <= int(steps) <= _MAX_PROFILE_STEPS):
            return JSONResponse({"error": f"steps is 1 to {_MAX_PROFILE_STEPS}"}, 400)
        if (profiler := probe.profiler) is None:
            return JSONResponse({"error": "a model on torch must be loaded in this process"}, 501)
        if (traces := profiler.ask(int(steps))) is None:
            return JSONResponse({"error": "a recording is under way"}, 409)
        return JSONResponse({"num_steps": int(steps), "traces": traces}, 202)

    async def nowhere(request: Request, _: Exception) -> Response:
        paths = ", ".join(route.path for route in routes)
        return Response(f"there is no {request.url.path[:80]!r} here, but {paths}\n", 404, media_type="text/plain")

    routes = [
        Route("/health", ready),
        Route("/health/live", live),
        Route("/health/ready", ready),
        Route("/metrics", metrics),
        Route("/debug/kv", debug_kv),
        Route("/debug/profile", profile, methods=["POST"]),
    ]
    return Starlette(routes=routes, exception_handlers={404: nowhere})


class _Server(uvicorn.Server):
    """Leaves the process's signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class AdminServer:
    """Serves :func:`admin_app` on the running loop between ``start`` and ``stop``."""

    def __init__(self, host: str, port: int, probe: AdminProbe, registry: CollectorRegistry) -> None:
        self._host = host
        self._port = port
        config = uvicorn.Config(
            admin_app(probe, registry),
            log_config=None,
            log_level="error",  # uvicorn would warn of each request that is not HTTP
            access_log=False,
            lifespan="off",
            ws="none",
            date_header=False,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listen, and return the port. Raises SettingsError if the address is not available."""
        try:
            # Here and not in uvicorn's task: probes wait, and a taken port raises.
            listeners = listen(self._host, self._port)
        except OSError as error:
            advice = way_out(error, "--admin-host", "--admin-port")
            raise SettingsError(f"cannot listen on {self._host}:{self._port}: {error.strerror}; {advice}") from error
        port: int = listeners[0].getsockname()[1]
        self._task = asyncio.create_task(self._server.serve(sockets=listeners))
        return port

    async def stop(self) -> None:
        """Close the listener and all connections."""
        if self._task is not None:
            self._server.should_exit = True
            await self._task
