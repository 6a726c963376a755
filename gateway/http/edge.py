"""What every HTTP request passes: API keys and their limits, bounds on its body, a request id, errors as objects, counting."""

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

OPERATORS_PATHS = "/debug/"  # what begins so tells of workers and of others' requests
CONSOLE = "/console"  # a page, and its files below it, that tell nothing by themselves

# What probes and Prometheus ask for, and what only describes the API.
_OPEN_PATHS = frozenset(
    {"/health", "/health/live", "/health/ready", "/ping", "/version", "/metrics", "/openapi.json", "/docs", CONSOLE}
)
_OPEN_FOLDERS = ("/docs/", f"{CONSOLE}/")
# Whatever goes wrong with a request to one of these is told in TGI's shape.
TGI_PATHS = frozenset(
    {"/", "/generate", "/generate_stream", "/info", "/health", "/ping", "/tokenize", "/chat_tokenize"}
)
_ANTHROPIC_PATHS = frozenset({"/v1/messages", "/v1/messages/count_tokens"})  # the same, in Anthropic's


class Observer(Protocol):
    """Hears of every request that was let in. Must not wait, and raises nothing."""

    def begin(self, request: ApiRequest) -> None:
        """It begins."""

    def end(self, request: ApiRequest, route: str) -> None:
        """It was answered, or given up. Told also of those that were not let in."""


class Edge:
    """ASGI middleware: names a request, bounds its body, ends it with its client, counts it. Only CORS is further out."""

    def __init__(
        self,
        app: ASGIApp,
        paths: Collection[str],
        max_body_bytes: int,
        client_timeout_s: float,
        metrics: GatewayMetrics,
        api_keys: ApiKeys | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        """``paths`` are those of the app's routes: requests are counted by them.

        ``api_keys``: who may ask for anything but health, metrics and the API's description; None: everybody.
        """
        self._api_keys = api_keys
        self._observers = observers
        self._app = app
        self._paths = paths
        self._max_body_bytes = max_body_bytes
        self._client_timeout_s = client_timeout_s
        self._metrics = metrics
        self._num_in_flight = 0
        metrics.in_flight.set_function(lambda: self._num_in_flight)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client = _Client(receive, self._max_body_bytes, self._client_timeout_s, self._metrics)
        request = ApiRequest(scope, client.receive)
        path: str = scope["path"]

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
                # For the framework a path with a line end behind it is the path, and it would call an endpoint.
                raise NotFoundError("Not Found")
            await self._app(scope, client.receive, reply)
        except ApiError as error:
            await error_response(request.fail(error), path)(scope, receive, reply)
        except asyncio.CancelledError:
            if not client.has_left:
                if request.status:  # too late for another answer
                    raise
                # Only a gateway that has to end, and has waited for as long as it may, cancels a request.
                await error_response(request.fail(ShuttingDownError()), path)(scope, receive, reply)
        except Exception:
            # What was answered was logged; Starlette raises it again, and uvicorn would log it once more.
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
            del request.state.api_request  # else its body would be there until the garbage collector comes

    def _let_in(self, request: ApiRequest, path: str) -> KeyUse | None:
        """The use of its API key, to be left, if it needs one. Raises UnauthorizedError, ForbiddenError, TooManyRequestsError."""
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
    """Who sends a request: its body comes within bounds; if it leaves behind that, the request's task is cancelled."""

    def __init__(self, receive: Receive, max_body_bytes: int, timeout_s: float, metrics: GatewayMetrics) -> None:
        self.has_left = False
        self._receive = receive
        self._max_body_bytes = max_body_bytes
        self._timeout_s = timeout_s
        self._until_s = asyncio.get_running_loop().time() + timeout_s
        self._metrics = metrics
        self._num_bytes = 0
        self._watcher: asyncio.Task[None] | None = None  # once the body is here
        self._task = asyncio.current_task()

    def check_length(self, announced: str) -> None:
        """Raises BodyTooLargeError on the header of a body that is not worth beginning with."""
        if announced.isdigit() and int(announced) > self._max_body_bytes:
            raise BodyTooLargeError(f"the body has {announced} bytes; the limit is {self._max_body_bytes}")

    async def receive(self) -> Message:
        """ASGI's. Raises BodyTooLargeError, SlowClientError, and CancelledError if only a part of the body comes."""
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
        """The request is over. Returns whether the client left before that."""
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
    """An error as an HTTP response, in the shape that the API at ``path`` has; None: OpenAI's."""
    headers = {} if error.retry_after is None else {"retry-after": error.retry_after}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, SlowClientError):
        headers["connection"] = "close"  # what still comes of the body is not waited for
    if path in TGI_PATHS:
        status, body = tgi_error(error)
    elif path in _ANTHROPIC_PATHS:
        status, body = anthropic_error(error)
    else:
        status, body = error.status, error.body()
    return JSONResponse(body, status_code=status, headers=headers)


def install_error_handlers(app: FastAPI) -> None:
    """Make every error of ``app``, also an unknown path, an error object."""

    async def on_error(request: Request, error: Exception) -> Response:
        asked: ApiRequest = request.state.api_request
        headers: Mapping[str, str] | None = None
        if isinstance(error, HTTPException):
            api_error: ApiError = InvalidRequestError(str(error.detail))
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
