"""Errors of the executor, beside those of the API (:mod:`kvrelay.gateway.errors`), which come out of results as they are.

ApiError
├── WorkerDiedError             500  the worker in this process has ended; nothing can be computed any more
└── UnavailableError            503
    ├── GatewayUnreachableError 503  nobody answers at the address, or the connection broke
    └── ShutDownError           503  the executor was shut down before the request was over
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvrelay.gateway import errors as api
from kvrelay.gateway.errors import ApiError, UnavailableError


class WorkerDiedError(ApiError):
    """The worker in this process has ended: make a new executor."""

    code = "worker_died"


class GatewayUnreachableError(UnavailableError):
    """Nobody answers at the address, or the connection broke before the answer was complete."""

    code = "unreachable"


class ShutDownError(UnavailableError):
    """The executor was shut down before the request was over."""

    code = "shut_down"

    def __init__(self) -> None:
        super().__init__("the executor was shut down before this request was over")


_BY_CODE: dict[str, type[ApiError]] = {
    error.code: error
    for error in (
        api.InvalidRequestError, api.ContextLengthError, api.UnauthorizedError, api.ModelNotFoundError, api.SlowClientError,
        api.BodyTooLargeError, api.TooManyRequestsError, api.HeadersTooLargeError, api.UnavailableError, api.ConnectionsError,
        api.RequestTimeoutError, api.AttemptsFailedError,
    )
}  # fmt: skip
_BY_STATUS: dict[int, type[ApiError]] = {
    400: api.InvalidRequestError,
    401: api.UnauthorizedError,
    404: api.ModelNotFoundError,
    413: api.BodyTooLargeError,
    422: api.InvalidRequestError,
    429: api.TooManyRequestsError,
    502: api.AttemptsFailedError,
    503: api.UnavailableError,
    504: api.RequestTimeoutError,
}


def told_error(status: int, body: Any, retry_after: str | None = None) -> ApiError:
    """The error that a gateway told: of the same class as in its own process, as far as code or status say which.

    ``body``: the answer's JSON, whatever it is; ``retry_after``: the header of that name.
    """
    inner = body.get("error") if isinstance(body, Mapping) else None
    told: Mapping[str, Any] = inner if isinstance(inner, Mapping) else {"message": inner}  # TGI's errors are a text
    found = _BY_CODE.get(str(told.get("code"))) or _BY_STATUS.get(status, ApiError)
    message = str(told.get("message") or f"the gateway answered with status {status}: {str(body)[:200]}")
    param = told.get("param")
    retry_after_s = float(retry_after) if retry_after is not None and retry_after.isdecimal() else None
    return found(message, param=None if param is None else str(param), retry_after_s=retry_after_s)
