"""What every HTTP request passes: API keys and their limits, bounds on its body, a request id, errors as objects, counting."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrelay.gateway.api_keys import ApiKeys
from kvrelay.gateway.api_request import ApiRequest, Endpoint
from kvrelay.gateway.docs_page import PATHS as DOCS_PATHS
from kvrelay.gateway.errors import (
    ApiError,
    BodyTooLargeError,
    InvalidRequestError,
    NotFoundError,
    ShuttingDownError,
    SlowClientError,
    TooManyRequestsError,
    UnauthorizedError,
)
from kvrelay.gateway.http_protocol import EXTENSION, Exchange
from kvrelay.gateway.key_limits import KeyUse
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.refusals import Reason
from kvrelay.gateway.reply import Reply
from kvrelay.gateway.sse import ClientLeftError
from kvrelay.gateway.tgi.errors import PATHS as TGI_PATHS
from kvrelay.gateway.tgi.errors import tgi_error

logger = logging.getLogger(__name__)

# What probes and Prometheus ask for, and what only describes the API.
_OPEN_PATHS = frozenset(
    {"/health", "/health/live", "/health/ready", "/ping", "/version", "/metrics", "/openapi.json", *DOCS_PATHS}
)


class Edge:
    """ASGI middleware: reads the body within its bound, names the request, counts it. Only CORS is further out.

    A POST to a path in ``endpoints`` is answered right here; everything else is the app's. A web framework's own layers take
    longer than all that the gateway does with a request, and much longer again when they are not in the cache.
    """

    def __init__(
        self,
        app: ASGIApp,
        endpoints: Mapping[str, Endpoint],
        max_body_bytes: int,
        client_timeout_s: float,
        metrics: GatewayMetrics,
        api_keys: ApiKeys | None = None,
    ) -> None:
        """``api_keys``: who may ask for anything but health, metrics and the API's description; None: everybody."""
        self._api_keys = api_keys
        self._app = app
        self._endpoints = endpoints
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
        request = ApiRequest(scope, receive)
        exchange: Exchange | None = scope.get("extensions", {}).get(EXTENSION)
        is_of_a_page = request.field(b"origin") is not None
        reply = Reply(send, request.request_id, exchange, begins_by_send=is_of_a_page)
        endpoint = self._endpoints.get(scope["path"]) if scope["method"] == "POST" else None

        self._num_in_flight += 1
        use: KeyUse | None = None
        try:
            try:
                if self._api_keys is not None and scope["path"] not in _OPEN_PATHS:
                    use = self._api_keys.enter(request.field(b"authorization"))
                    request.min_priority = use.min_priority
                request.whole_body = await self._read_body(receive, request)
                if not scope["path"].isprintable():
                    # For the framework a path with a line end behind it is the path, and it would call an endpoint.
                    raise NotFoundError("Not Found")
            except (
                BodyTooLargeError,
                SlowClientError,
                UnauthorizedError,
                TooManyRequestsError,
                NotFoundError,
            ) as error:
                await error_response(error, scope["path"])(scope, receive, reply)
                return
            if endpoint is None:
                await self._app(scope, _replaying(request.whole_body, receive), reply)
            else:
                await _answer(endpoint, request, reply)
        except ClientLeftError:
            self._metrics.disconnects.inc()
        except Exception:
            # What was answered was logged, here or in Starlette, which raises it again; uvicorn would log it once more.
            if reply.status == 0:
                raise
        finally:
            self._num_in_flight -= 1
            if use is not None:
                use.leave()
            route = scope.get("route")
            path = scope["path"] if endpoint is not None else route.path if route is not None else "other"
            outcome = request.cut or str(reply.status or "client_left")
            self._metrics.requests.labels(path, outcome).inc()

    async def _read_body(self, receive: Receive, request: ApiRequest) -> bytes:
        """Raises BodyTooLargeError, SlowClientError, and ClientLeftError if only a part of the body came."""
        limit = self._max_body_bytes
        announced = request.field(b"content-length") or "0"
        if announced.isdigit() and int(announced) > limit:
            raise BodyTooLargeError(f"the body has {announced} bytes; the limit is {limit}")
        body = bytearray()
        try:
            async with asyncio.timeout(self._client_timeout_s):
                await self._read_into(body, receive)
        except TimeoutError as error:
            self._metrics.refused_connections.labels(Reason.BODY_TIMEOUT).inc()
            raise SlowClientError(
                f"only {len(body)} bytes of the body had arrived after {self._client_timeout_s:g} s, which is the limit"
            ) from error
        return bytes(body)

    async def _read_into(self, body: bytearray, receive: Receive) -> None:
        limit = self._max_body_bytes
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientLeftError
            body += message.get("body", b"")
            if len(body) > limit:
                raise self._too_large()
            if not message.get("more_body", False):
                return

    def _too_large(self) -> ApiError:
        return BodyTooLargeError(f"the body has more than {self._max_body_bytes} bytes, which is the limit")


def _replaying(body: bytes, receive: Receive) -> Receive:
    """A receive that gives the whole body, then what the connection says."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay


async def _answer(endpoint: Endpoint, request: ApiRequest, reply: Reply) -> None:
    try:
        response = await endpoint(request)
        await response(request.scope, request.receive, reply)
    except ClientLeftError:
        raise
    except (Exception, asyncio.CancelledError) as error:
        if reply.status:  # too late for another answer
            raise
        await _error_answer(request, error)(request.scope, request.receive, reply)


def _error_answer(request: Request, error: BaseException) -> Response:
    path = request.scope["path"]
    if isinstance(error, ApiError):
        return error_response(error, path)
    if isinstance(error, asyncio.CancelledError):  # nobody else cancels a request
        return error_response(ShuttingDownError(), path)
    logger.error("a request failed", exc_info=error, extra={"request_id": request.state.request_id})
    return error_response(ApiError("the server failed on this request; its log has the reason"), path)


def error_response(error: ApiError, path: str | None = None) -> JSONResponse:
    """An error as an HTTP response, in the shape that the API at ``path`` has; None: OpenAI's."""
    headers = {} if error.retry_after is None else {"retry-after": error.retry_after}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, SlowClientError):
        headers["connection"] = "close"  # what still comes of the body is not waited for
    status, body = tgi_error(error) if path in TGI_PATHS else (error.status, error.body())
    return JSONResponse(body, status_code=status, headers=headers)


def install_error_handlers(app: FastAPI) -> None:
    """Make every error of ``app``, also an unknown path, an error object."""

    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_response(error, request.scope["path"])

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        api_error = InvalidRequestError(str(error.detail))
        api_error.status = error.status_code
        api_error.code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
        response = error_response(api_error, request.scope["path"])
        response.headers.update(error.headers or {})  # such as Allow
        return response

    async def on_unexpected(request: Request, error: Exception) -> Response:
        return _error_answer(request, error)

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_unexpected)
