"""The gateway's ASGI application: routes, health, metrics and docs for the models that it serves."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from kvrelay import __version__
from kvrelay.common.clock import Clock
from kvrelay.common.errors import SettingsError
from kvrelay.gateway.adapters import AdapterRegistry
from kvrelay.gateway.apis import adapters as adapter_routes
from kvrelay.gateway.apis import tokenize
from kvrelay.gateway.apis.answer_docs import HEALTHY, READY, VERSION
from kvrelay.gateway.apis.answering import IGNORED_HEADER, IgnoredFields
from kvrelay.gateway.apis.anthropic import routes as anthropic
from kvrelay.gateway.apis.openai import routes as openai
from kvrelay.gateway.apis.responses import routes as responses
from kvrelay.gateway.apis.tgi import routes as tgi
from kvrelay.gateway.chat.image_fetch import ImageFetcher
from kvrelay.gateway.desk.access import Access
from kvrelay.gateway.desk.feed import Feed
from kvrelay.gateway.desk.picker import PickerMetrics
from kvrelay.gateway.desk.records import Records
from kvrelay.gateway.desk.report import log_activity
from kvrelay.gateway.desk.routes import add_desk
from kvrelay.gateway.http.api_keys import LIMIT_HEADERS, ApiKeys
from kvrelay.gateway.http.edge import Edge, Observer, install_error_handlers
from kvrelay.gateway.http.key_tokens import exchange
from kvrelay.gateway.image_hosts import ImageHosts
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.model import Model, ModelFiles, Models
from kvrelay.gateway.model_names import worker_address
from kvrelay.gateway.relay.relay import Relay
from kvrelay.gateway.relay.request import TIMINGS_HEADER
from kvrelay.gateway.settings import GatewaySettings, TraceSettings
from kvrelay.gateway.workers.discovery import Pods, followed
from kvrelay.gateway.workers.pool import WorkerPool
from kvrelay.wire.messages import Role
from kvrelay.wire.network import Network
from kvrelay.wire.security.keys import WireKeys
from kvrelay.wire.settings import LinkSettings

if TYPE_CHECKING:
    from kvrelay.gateway.desk.traces import Traces

_CONNECT_S = 5.0  # after the start, for links to the workers of all models


def create_app(
    settings: GatewaySettings,
    *,
    link_settings: LinkSettings | None = None,
    metrics: GatewayMetrics | None = None,
    is_ending: Callable[[], bool] = lambda: False,
) -> ASGIApp:
    """The ASGI application. Its lifespan connects to the workers. Raises ModelError if a tokenizer cannot be loaded, and
    SettingsError.

    ``is_ending``: whether the server is waiting for its last requests. Endless streams then end themselves.
    """
    metrics = metrics or GatewayMetrics(CollectorRegistry())
    models = _models(settings, link_settings or LinkSettings(), metrics)
    fetcher = ImageFetcher(ImageHosts(settings.image_hosts), metrics, time.monotonic)
    workers = settings.workers
    pods = Pods.connect(workers.namespace, workers.worker_selector) if workers.discovery == "kubernetes" else None

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        async with followed(workers, pods, {model.name: model.pool for model in models}), fetcher.running():
            tasks = [asyncio.create_task(log_activity(models, time.monotonic))]
            for adapters in models.adapters.values():
                await adapters.scan()
                tasks.append(asyncio.create_task(adapters.watch()))
            if api_keys is not None:
                tasks.append(asyncio.create_task(exchange(api_keys, [model.pool for model in models])))
            yield
            for task in tasks:
                task.cancel()
            if traces is not None:
                await asyncio.to_thread(traces.close)

    app = FastAPI(title="kvrelay", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.models, app.state.ignored_fields, app.state.image_fetcher = models, IgnoredFields(), fetcher
    install_error_handlers(app)
    for routes in (openai, responses, anthropic, tgi, tokenize, adapter_routes):
        app.router.routes += routes.router.routes  # one flat list: nested routers would be searched one after the other
    _add_operations(app, models, metrics)
    PickerMetrics(models, metrics.registry)
    records = Records(time.monotonic, time.time)
    access = Access(metrics, time.monotonic, [model.name for model in models], is_logged=settings.access_log)
    observers: list[Observer] = [records, access]
    traces = _traces(settings.traces)
    if traces is not None:
        observers.append(traces)
    add_desk(app, models, records, Feed(models, metrics, records, time.monotonic, is_ending))
    _add_docs_page(app)
    api_keys = None if settings.api_keys is None else ApiKeys(Path(settings.api_keys), time.monotonic, access.know)
    paths = frozenset(route.path for route in app.routes if isinstance(route, Route))
    edge = Edge(
        app,
        paths,
        settings.max_body_bytes,
        settings.http.client_timeout_s,
        metrics,
        api_keys,
        observers,
        settings.max_image_bytes,
    )
    return _with_cors(edge, settings.allowed_origins) if settings.allowed_origins else edge


def _models(settings: GatewaySettings, link_settings: LinkSettings, metrics: GatewayMetrics) -> Models:
    """The models of the settings, each with its own worker pool. Raises ModelError and SettingsError."""
    directories = {model.name or Path(model.path).name: Path(model.path) for model in settings.named_models()}
    aliases = settings.aliases_of(list(directories))
    adapters = {name: AdapterRegistry(Path(path)) for name, path in settings.adapters_of(list(directories)).items()}
    settings.check_workers(list(directories))
    keys = None if settings.keys is None else WireKeys.load(Path(settings.keys), Role.GATEWAY)
    workers = settings.workers
    with_prefill_workers = {worker_address(text)[0] or next(iter(directories)) for text in workers.prefill_workers}

    def model(name: str, directory: Path) -> Model:
        files = ModelFiles.load(directory, settings.tool_parser, settings.reasoning_parser)
        network, of_model = Network.open(), metrics.of_model(name)
        has_prefill_workers = workers.discovery == "kubernetes" or name in with_prefill_workers
        pool = WorkerPool(
            f"gateway-{secrets.token_hex(8)}",
            of_model,
            link_settings,
            network,
            needs_prefill_workers=settings.relay.local_prefill == "never" and has_prefill_workers,
            keys=keys,
            model=name,
        )
        return Model(name, files, Relay(pool, settings.relay, of_model, network.clock))

    models = [model(name, directory) for name, directory in directories.items()]
    return Models(models, adapters, aliases, settings.default_model)


def _traces(settings: TraceSettings) -> Traces | None:
    """The sender of traces; None if tracing is off. Raises SettingsError if its packages are not installed."""
    if settings.trace_endpoint is None:
        return None
    try:
        from kvrelay.gateway.desk.traces import Traces  # noqa: PLC0415 - only who traces needs OpenTelemetry
    except ImportError as error:
        raise SettingsError(
            f"--trace-endpoint needs OpenTelemetry ({error}); install it: pip install 'kvrelay[tracing]'"
        ) from error
    return Traces(settings.trace_endpoint, settings, time.monotonic)


def _with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Answers CORS preflights, which carry no API key, and adds CORS headers to every answer, also to refusals."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("x-request-id", "retry-after", TIMINGS_HEADER, IGNORED_HEADER, *LIMIT_HEADERS),
    )


def _add_docs_page(app: FastAPI) -> None:
    """Serve Swagger UI from local files, so that it needs no internet.

    Its links are relative because a proxy may add a path prefix.
    """
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title="kvrelay",
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="docs/favicon-32x32.png",
        swagger_ui_parameters={"validatorUrl": None},  # else the page sends the description to swagger.io
    )
    app.get("/docs", include_in_schema=False)(lambda: page)
    app.get("/", include_in_schema=False)(
        lambda: RedirectResponse("docs")
    )  # for whoever opens the address in a browser
    app.mount("/docs", StaticFiles(packages=[("fastapi_swagger", "resources")]))


class _Readiness:
    """Whether this gateway should get requests.

    It is ready if one model is up. At the start it is ready only once all models are up, or after a while. So a model without
    workers fails alone, and a gateway that replaces another one already serves every model that is up.
    """

    def __init__(self, models: Models, clock: Clock) -> None:
        self._models = models
        self._clock = clock
        self._wait_until_s: float | None = clock() + _CONNECT_S  # None: the start is over

    def look(self) -> tuple[bool, dict[str, list[str]]]:
        """Whether it is ready, and why models cannot be served, by model name."""
        unavailable = {model.name: reasons for model in self._models if (reasons := model.pool.public_reasons)}
        if self._wait_until_s is not None and (not unavailable or self._clock() >= self._wait_until_s):
            self._wait_until_s = None
        is_waiting = self._wait_until_s is not None
        return not is_waiting and len(unavailable) < len(list(self._models)), unavailable


def _add_operations(app: FastAPI, models: Models, metrics: GatewayMetrics) -> None:
    readiness = _Readiness(models, time.monotonic)

    @app.get("/health/live", tags=["operations"], responses=HEALTHY)
    async def live() -> Response:
        """The process answers."""
        return JSONResponse({"status": "ok"})

    @app.get("/health/ready", tags=["operations"], responses=READY)
    async def ready() -> Response:
        """Requests are well placed here; else 503 with the reasons. Without any worker they are: the answer to them says so.

        A model whose workers are down fails alone; `unavailable` names it. What is wrong with which worker is in `/debug/workers`.
        """
        is_ready, unavailable = readiness.look()
        if not is_ready:
            reasons = [reason for reasons in unavailable.values() for reason in reasons]
            return JSONResponse({"status": "unavailable", "reasons": reasons}, status_code=503)
        return JSONResponse({"status": "ok", "unavailable": unavailable} if unavailable else {"status": "ok"})

    @app.get("/version", tags=["operations"], responses=VERSION)
    async def version() -> Response:
        """kvrelay's version."""
        return JSONResponse({"version": __version__})

    @app.get("/metrics", tags=["operations"], response_class=PlainTextResponse)
    async def prometheus() -> Response:
        """Prometheus metrics."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)
