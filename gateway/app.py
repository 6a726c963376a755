"""The gateway's ASGI application: routes, health, metrics, docs, around the models that it serves."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from kvrelay import __version__
from kvrelay.gateway.apis import tokenize
from kvrelay.gateway.apis.answer_docs import HEALTHY, READY, VERSION
from kvrelay.gateway.apis.answering import IGNORED_HEADER, IgnoredFields
from kvrelay.gateway.apis.openai import routes as openai
from kvrelay.gateway.apis.responses import routes as responses
from kvrelay.gateway.apis.tgi import routes as tgi
from kvrelay.gateway.desk.feed import Feed
from kvrelay.gateway.desk.records import Records
from kvrelay.gateway.desk.report import Activity, known_workers
from kvrelay.gateway.desk.routes import add_desk
from kvrelay.gateway.http.api_keys import ApiKeys
from kvrelay.gateway.http.edge import Edge, install_error_handlers
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.model import Model, ModelFiles, Models
from kvrelay.gateway.relay.relay import Relay
from kvrelay.gateway.relay.request import TIMINGS_HEADER
from kvrelay.gateway.settings import GatewaySettings
from kvrelay.gateway.workers.discovery import Pods, followed
from kvrelay.gateway.workers.pool import WorkerPool
from kvrelay.wire.messages import Role
from kvrelay.wire.network import Network
from kvrelay.wire.security.keys import WireKeys
from kvrelay.wire.settings import LinkSettings


def create_app(
    settings: GatewaySettings,
    *,
    link_settings: LinkSettings | None = None,
    metrics: GatewayMetrics | None = None,
    is_ending: Callable[[], bool] = lambda: False,
) -> ASGIApp:
    """The application; its lifespan connects to the workers. Raises ModelError if the tokenizer cannot be loaded.

    ``is_ending``: whether the server only waits for requests that run; what would run for ever ends itself then.
    """
    metrics = metrics or GatewayMetrics(CollectorRegistry())
    served = [_served(settings, link_settings or LinkSettings(), metrics)]
    models = Models([model for model, _ in served])

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        async with AsyncExitStack() as stack:
            for model, pods in served:
                await stack.enter_async_context(followed(settings.workers, pods, model.pool))
            activity = asyncio.create_task(Activity(models, metrics.tokens, time.monotonic).run())
            yield
            activity.cancel()

    app = FastAPI(title="kvrelay", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.models, app.state.ignored_fields = models, IgnoredFields()
    install_error_handlers(app)
    for routes in (openai, responses, tgi, tokenize):
        app.router.routes += routes.router.routes  # routers within routers would have to be asked one after the other
    _add_operations(app, models, metrics)
    records = Records(time.monotonic, time.time)
    add_desk(app, records, Feed(models, metrics, records, time.monotonic, is_ending))
    _add_docs_page(app)
    api_keys = None if settings.api_keys is None else ApiKeys(Path(settings.api_keys), time.monotonic)
    paths = frozenset(route.path for route in app.routes if isinstance(route, Route))
    edge = Edge(app, paths, settings.max_body_bytes, settings.http.client_timeout_s, metrics, api_keys, records)
    return _with_cors(edge, settings.allowed_origins) if settings.allowed_origins else edge


def _served(
    settings: GatewaySettings, link_settings: LinkSettings, metrics: GatewayMetrics
) -> tuple[Model, Pods | None]:
    """The model of the settings, and the pods of its workers, unless they are listed. Raises ModelError and SettingsError."""
    directory, workers = Path(settings.model), settings.workers
    files = ModelFiles.load(directory, settings.tool_parser, settings.reasoning_parser)
    is_discovered = workers.discovery == "kubernetes"
    has_prefill_workers = is_discovered or bool(workers.prefill_workers)
    network = Network.open()
    pool = WorkerPool(
        f"gateway-{secrets.token_hex(8)}",
        metrics,
        link_settings,
        network,
        needs_prefill_workers=settings.relay.local_prefill == "never" and has_prefill_workers,
        keys=None if settings.keys is None else WireKeys.load(Path(settings.keys), Role.GATEWAY),
    )
    pods = Pods.connect(workers.namespace, workers.worker_selector) if is_discovered else None
    relay = Relay(pool, settings.relay, metrics, network.clock)
    return Model(settings.served_model_name or directory.name, files, relay), pods


def _with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Answers preflights, which carry no API key, and adds CORS headers to every answer, also to refusals."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("x-request-id", "retry-after", TIMINGS_HEADER, IGNORED_HEADER),
    )


def _add_docs_page(app: FastAPI) -> None:
    """Swagger UI with its files from here, so that it needs no internet. Its links are relative: a proxy may add a prefix."""
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title="kvrelay",
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="docs/favicon-32x32.png",
        swagger_ui_parameters={"validatorUrl": None},  # else the description is sent to swagger.io
    )
    app.get("/docs", include_in_schema=False)(lambda: page)
    app.mount("/docs", StaticFiles(packages=[("fastapi_swagger", "resources")]))


def _add_operations(app: FastAPI, models: Models, metrics: GatewayMetrics) -> None:
    @app.get("/health/live", tags=["operations"], responses=HEALTHY)
    async def live() -> Response:
        """The process answers."""
        return JSONResponse({"status": "ok"})

    @app.get("/health/ready", tags=["operations"], responses=READY)
    async def ready() -> Response:
        """Requests are well placed here; else 503 with the reasons. Without any worker they are: the answer to them says so."""
        reasons = [reason for model in models for reason in model.pool.not_ready()]
        if reasons:
            return JSONResponse({"status": "unavailable", "reasons": reasons}, status_code=503)
        return JSONResponse({"status": "ok"})

    @app.get("/version", tags=["operations"], responses=VERSION)
    async def version() -> Response:
        """kvrelay's version."""
        return JSONResponse({"version": __version__})

    @app.get("/debug/workers", tags=["operations"], response_model=None)
    async def workers() -> Response:
        """What this gateway knows of its workers, whom it only sends probes, and which way prompts went."""
        return JSONResponse(known_workers(models))

    @app.get("/metrics", tags=["operations"], response_class=PlainTextResponse)
    async def prometheus() -> Response:
        """Prometheus metrics."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)
