"""What every HTTP request passes: a bound on its body, a request id, OpenAI error objects, counting."""

from __future__ import annotations

import logging
import re
import secrets
import time

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrelay.gateway.errors import ApiError, BodyTooLargeError, InvalidRequestError
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.streaming import ClientLeftError

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Edge:
    """ASGI middleware: reads the body within its bound, names the request, counts it. The outermost layer."""

    def __init__(self, app: ASGIApp, max_body_bytes: int, metrics: GatewayMetrics) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        given = request.headers.get("x-request-id", "")
        # An id from outside goes into logs and messages: only what is plainly an id is taken.
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["received_s"] = time.monotonic()
        status = 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        self._metrics.in_flight.inc()
        try:
            try:
                receive = await self._read_body(request)
            except BodyTooLargeError as error:
                await error_response(error)(scope, receive, send_named)
                return
            await self._app(scope, receive, send_named)
        except ClientLeftError:
            self._metrics.disconnects.inc()
        except Exception:
            # Starlette raises again what the handler below has logged and answered; uvicorn would log it once more.
            if status == 0:
                raise
        finally:
            self._metrics.in_flight.dec()
            route = scope.get("route")
            path = route.path if route is not None else "other"
            self._metrics.requests.labels(path, str(status) if status else "client_left").inc()

    async def _read_body(self, request: Request) -> Receive:
        """A receive that gives the whole body, then what the connection says.

        Raises BodyTooLargeError, and ClientLeftError if only a part of the body came.
        """
        limit = self._max_body_bytes
        announced = request.headers.get("content-length", "0")
        if announced.isdigit() and int(announced) > limit:
            raise BodyTooLargeError(f"the body has {announced} bytes; the limit is {limit}")
        body = bytearray()
        while True:
            message = await request.receive()
            if message["type"] != "http.request":
                raise ClientLeftError
            body += message.get("body", b"")
            if len(body) > limit:
                raise BodyTooLargeError(f"the body has more than {limit} bytes, which is the limit")
            if not message.get("more_body", False):
                break
        pending: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await request.receive()

        return replay


def error_response(error: ApiError) -> JSONResponse:
    """An error as an HTTP response."""
    headers = {} if error.retry_after_s is None else {"retry-after": str(max(1, round(error.retry_after_s)))}
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


def install_error_handlers(app: FastAPI) -> None:
    """Make every error of ``app`` an OpenAI error object."""

    async def on_api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_response(error)

    async def on_validation_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(_validation_error(error))

    async def on_http_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        api_error = InvalidRequestError(str(error.detail))
        api_error.status = error.status_code
        api_error.code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
        response = error_response(api_error)
        response.headers.update(error.headers or {})  # such as Allow
        return response

    async def on_client_left(_: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    async def on_unexpected(request: Request, error: Exception) -> Response:
        logger.error("a request failed", exc_info=error, extra={"request_id": request.state.request_id})
        return error_response(ApiError("the server failed on this request; its log has the reason"))

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientLeftError, on_client_left)
    app.add_exception_handler(Exception, on_unexpected)


def _validation_error(error: RequestValidationError) -> InvalidRequestError:
    """The most telling complaint, naming the field, its value and what is allowed."""
    complaints = error.errors()
    if complaints[0]["type"] == "json_invalid":
        reason = complaints[0].get("ctx", {}).get("error", complaints[0]["msg"])
        return InvalidRequestError(f"the body is not valid JSON: {reason}")
    if isinstance(complaints[0].get("input"), bytes):
        return InvalidRequestError("the body is not JSON by its header; send content-type: application/json")
    # A field of several types complains once per type; the type that fits best got the furthest into the value.
    deepest = max(len(complaint["loc"]) for complaint in complaints)
    chosen = [complaint for complaint in complaints if len(complaint["loc"]) == deepest]
    names = [str(part) for part in chosen[0]["loc"] if part != "body" and not _is_type_name(part)]
    messages = " or ".join(
        dict.fromkeys(complaint["msg"] for complaint in chosen[:4] if complaint["loc"][:-1] == chosen[0]["loc"][:-1])
    )
    value = chosen[0].get("input")
    shown = "" if isinstance(value, dict) or chosen[0]["type"] == "missing" else f", not {str(value)[:80]!r}"
    return InvalidRequestError(f"{'.'.join(names) or 'body'}: {messages}{shown}", param=names[0] if names else "body")


def _is_type_name(part: object) -> bool:
    """Whether a part of a location names a type of a union, and not a field."""
    return isinstance(part, str) and (part in ("str", "int") or "[" in part or "constrained" in part)
