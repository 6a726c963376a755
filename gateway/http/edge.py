"""The ASGI middleware that every HTTP request passes: keys and limits, bounds on bodies, request ids, error objects, counting."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrelay.gateway.errors import (
    ApiError,
    BodyTooLargeError,
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
    ShuttingDownError,
    SlowClientError,
    anthropic_error,
    tgi_error,
)
from kvrelay.gateway.http.api_keys import ApiKeys, KeyUse
from kvrelay.gateway.http.request import ApiRequest
from kvrelay.gateway.metrics import GatewayMetrics, Reason

logger = logging.getLogger(__name__)

OPERATORS_PATHS = "/debug/"  # paths that show workers and other clients' requests
CONSOLE = "/console"  # a page and its files, which contain no data

# Open to everybody: paths for probes and Prometheus, and the API's description.
_OPEN_PATHS = frozenset(
    {"/health", "/health/live", "/health/ready", "/ping", "/version", "/metrics", "/openapi.json", "/docs", CONSOLE}
)
_OPEN_FOLDERS = ("/docs/", f"{CONSOLE}/")
# Paths whose errors have TGI's shape.
TGI_PATHS = frozenset(
    {"/", "/generate", "/generate_stream", "/info", "/health", "/ping", "/tokenize", "/chat_tokenize"}
)
# Paths whose bodies may have images.
_IMAGE_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/tokenize",
        "/chat_tokenize",
    }
)
_ANTHROPIC_PATHS = frozenset({"/v1/messages", "/v1/messages/count_tokens"})  # paths whose errors have Anthropic's shape


class Observer(Protocol):
    """Is called for every request that was let in. Must not wait, and must not raise."""

    def begin(self, request: ApiRequest) -> None:
        """A request begins."""

    def end(self, request: ApiRequest, route: str) -> None:
        """A request was answered or given up. Also called for requests that were not let in."""


class Edge:
    """ASGI middleware: gives a request its id, bounds its body, cancels it when its client leaves, counts it.

    Only CORS is further out.
    """

    def __init__(
        self,
        app: ASGIApp,
        paths: Collection[str],
        max_body_bytes: int,
        client_timeout_s: float,
        metrics: GatewayMetrics,
        api_keys: ApiKeys | None = None,
        observers: Sequence[Observer] = (),
        max_image_bytes: int = 0,
    ) -> None:
        """``paths``: the paths of the app's routes, by which requests are counted.

        ``api_keys``: the keys that may use anything but health, metrics and the API's description. None: everybody may.
        ``max_image_bytes``: how much larger than ``max_body_bytes`` a body with images may be.
        """
        self._api_keys = api_keys
        self._observers = observers
        self._app = app
        self._paths = paths
        self._max_body_bytes = max_body_bytes
        self._max_image_bytes = max_image_bytes
        self._client_timeout_s = client_timeout_s
        self._metrics = metrics
        self._num_in_flight = 0
        metrics.in_flight.set_function(lambda: self._num_in_flight)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        most_bytes = self._max_body_bytes + (self._max_image_bytes if path in _IMAGE_PATHS else 0)
        client = _Client(receive, most_bytes, self._client_timeout_s, self._metrics)
        request = ApiRequest(scope, client.receive)
        request.has_left = lambda: client.has_left
        request.max_body_bytes = self._max_body_bytes

        async def reply(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *request.answer_headers()]
            await send(message)
            if message["type"] == "http.response.start":
                request.status = message["status"]

        self._num_in_flight += 1
        use: KeyUse | None = None
        try:
            use = self._let_in(request, path)
            client.check_length(request.headers.get("content-length", ""))
            if not path.isprintable():
                # The framework ignores a line end after a path and would call the endpoint.
                raise NotFoundError(_no_such_path(path))
            await self._app(scope, client.receive, reply)
        except ApiError as error:
            await error_response(request.fail(error), path)(scope, receive, reply)
        except asyncio.CancelledError:
            if not client.has_left:
                if request.status:  # an answer has begun; there can be no other
                    raise
                # Only a shutdown cancels a request, after the gateway has waited as long as it may.
                await error_response(request.fail(ShuttingDownError()), path)(scope, receive, reply)
        except Exception:
            # If there was an answer, the error is logged already. Starlette raises it again, and uvicorn would log it once
            # more.
            if not request.status:
                raise
        finally:
            self._num_in_flight -= 1
            if use is not None:
                use.leave()
                request.settle()
            if client.end():
                self._metrics.disconnects.inc()
            self._note_end(request, path)
            del request.state.api_request  # else its body would live until the garbage collector runs

    def _let_in(self, request: ApiRequest, path: str) -> KeyUse | None:
        """Check the API key, if the path needs one. Returns the key's use, on which ``leave`` must be called.

        Raises UnauthorizedError, ForbiddenError, TooManyRequestsError.
        """
        use: KeyUse | None = None
        if self._api_keys is not None and path not in _OPEN_PATHS and not path.startswith(_OPEN_FOLDERS):
            headers = request.headers
            request.key_name = self._api_keys.check(headers.get("authorization"), headers.get("x-api-key"))
            request.key_use = self._api_keys.use_of(request.key_name)
            use = self._api_keys.enter(request.key_name)
            request.key_limits = use.limits
            if path.startswith(OPERATORS_PATHS) and not use.limits.operator:
                use.leave()
                raise ForbiddenError("this API key is not an operator's: its line in --api-keys lacks 'operator=1'")
        for observer in self._observers:
            observer.begin(request)
        return use

    def _note_end(self, request: ApiRequest, path: str) -> None:
        route = request.scope.get("route")
        name = path if route is None else route.path
        name = name if name in self._paths else "other"
        self._metrics.requests.labels(request.model, name, request.outcome).inc()
        for observer in self._observers:
            observer.end(request, name)


class _Client:
    """The sender of a request. Its body is read within bounds. If it leaves after that, the request's task is cancelled."""

    def __init__(self, receive: Receive, max_body_bytes: int, timeout_s: float, metrics: GatewayMetrics) -> None:
        self.has_left = False
        self._receive = receive
        self._max_body_bytes = max_body_bytes
        self._timeout_s = timeout_s
        self._until_s = asyncio.get_running_loop().time() + timeout_s
        self._metrics = metrics
        self._num_bytes = 0
        self._watcher: asyncio.Task[None] | None = None  # once the body has arrived
        self._task = asyncio.current_task()

    def check_length(self, announced: str) -> None:
        """Raises BodyTooLargeError if the announced length exceeds the limit."""
        if announced.isdigit() and int(announced) > self._max_body_bytes:
            raise BodyTooLargeError(f"the body has {announced} bytes; the limit is {self._max_body_bytes}")

    async def receive(self) -> Message:
        """ASGI's ``receive``.

        Raises BodyTooLargeError, SlowClientError, and CancelledError if the client leaves before the body is complete.
        """
        if self._watcher is not None:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._until_s):
                message = await self._receive()
        except TimeoutError as error:
            self._metrics.refused_connections.labels(Reason.BODY_TIMEOUT).inc()
            raise SlowClientError(
                f"only {self._num_bytes} bytes of the body had arrived after {self._timeout_s:g} s, which is the limit"
            ) from error
        if message["type"] != "http.request":
            self.has_left = True
            raise asyncio.CancelledError
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._max_body_bytes:
            raise BodyTooLargeError(f"the body has more than {self._max_body_bytes} bytes, which is the limit")
        if not message.get("more_body", False):
            self._watcher = asyncio.create_task(self._watch())
        return message

    def end(self) -> bool:
        """End the request. Returns whether the client left before."""
        if self._watcher is not None:
            self._watcher.cancel()
        if self.has_left and self._task is not None:
            self._task.uncancel()
        return self.has_left

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.has_left = True
        assert self._task is not None, "a request is handled in a task"
        self._task.cancel()


def error_response(error: ApiError, path: str | None = None) -> JSONResponse:
    """An error as an HTTP response, in the shape of the API at ``path``. None: in OpenAI's."""
    headers = {} if error.retry_after is None else {"retry-after": error.retry_after}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, SlowClientError):
        headers["connection"] = "close"  # the gateway does not wait for the rest of the body
    if path in TGI_PATHS:
        status, body = tgi_error(error)
    elif path in _ANTHROPIC_PATHS:
        status, body = anthropic_error(error)
    else:
        status, body = error.status, error.body()
    return JSONResponse(body, status_code=status, headers=headers)


def _refusal(request: Request, error: HTTPException) -> str:
    """What the framework refuses, and the way out."""
    path = request.scope["path"]
    if error.status_code == 404:
        return _no_such_path(path)
    if error.status_code == 405 and error.headers is not None and "Allow" in error.headers:
        return f"{path[:80]!r} does not take {request.method[:20]!r}; send {error.headers['Allow']}"
    return str(error.detail)


def _no_such_path(path: str) -> str:
    return f"there is no {path[:80]!r} here; /docs lists all paths"


def install_error_handlers(app: FastAPI) -> None:
    """Answer every error of ``app`` with an error object, also an unknown path."""

    async def on_error(request: Request, error: Exception) -> Response:
        asked: ApiRequest = request.state.api_request
        headers: Mapping[str, str] | None = None
        if isinstance(error, HTTPException):
            api_error: ApiError = InvalidRequestError(_refusal(request, error))
            api_error.status = error.status_code
            api_error.code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
            headers = error.headers  # such as Allow
        elif isinstance(error, ApiError):
            api_error = error
        else:
            logger.error("a request failed", exc_info=error, extra=asked.log_context)
            api_error = ApiError("the server failed on this request; its log has the reason")
        response = error_response(asked.fail(api_error), request.scope["path"])
        response.headers.update(headers or {})
        return response

    for kind in (ApiError, HTTPException, Exception):
        app.add_exception_handler(kind, on_error)
