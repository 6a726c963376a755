"""The gateway's ASGI application: routes, health, metrics, docs, around one worker pool."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from kvrelay import __version__
from kvrelay.gateway.api import OpenAIRoutes
from kvrelay.gateway.chat_template import ChatTemplate
from kvrelay.gateway.generation import Generator
from kvrelay.gateway.http import Edge, install_error_handlers
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.relay import Relay
from kvrelay.gateway.settings import GatewaySettings
from kvrelay.gateway.streaming import Responder
from kvrelay.gateway.tokenizer import Tokenizer
from kvrelay.gateway.workers import WorkerPool
from kvrelay.wire.settings import LinkSettings


def create_app(settings: GatewaySettings, *, link_settings: LinkSettings | None = None) -> ASGIApp:
    """The application; its lifespan connects to the workers. Raises ModelError if the tokenizer cannot be loaded."""
    directory = Path(settings.model)
    tokenizer = Tokenizer.load(directory)
    template = ChatTemplate.load(directory, tokenizer.special_tokens)
    metrics = GatewayMetrics(CollectorRegistry())
    gateway_id = f"gateway-{secrets.token_hex(8)}"
    pool = WorkerPool(
        settings.prefill_workers, settings.decode_workers, gateway_id, metrics, link_settings or LinkSettings()
    )
    responder = Responder(Generator(Relay(pool, settings.relay, metrics), tokenizer, metrics), metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        pool.start()
        yield
        await pool.stop()

    app = FastAPI(title="kvrelay", version=__version__, lifespan=lifespan)
    install_error_handlers(app)
    model_name = settings.served_model_name or directory.name
    routes = OpenAIRoutes(model_name, tokenizer, template, pool, responder)
    app.include_router(routes.router)
    _add_operations(app, pool, metrics)
    return Edge(app, routes.endpoints, settings.max_body_bytes, metrics)


def _add_operations(app: FastAPI, pool: WorkerPool, metrics: GatewayMetrics) -> None:
    @app.get("/health/live", tags=["operations"])
    async def live() -> Response:
        """The process answers."""
        return JSONResponse({"status": "ok"})

    @app.get("/health/ready", tags=["operations"])
    async def ready() -> Response:
        """Requests can be served; else 503 with the reasons."""
        reasons = pool.not_ready()
        if reasons:
            return JSONResponse({"status": "unavailable", "reasons": reasons}, status_code=503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", tags=["operations"])
    async def prometheus() -> Response:
        """Prometheus metrics."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)
