"""Errors that a client sees, as OpenAI error objects; where they are answered with 503 or 429 they carry Retry-After."""

from __future__ import annotations

import math
from typing import Any

from kvrelay.common.errors import KvrelayError


class ApiError(KvrelayError):
    """Base of all errors that a client sees. The text is meant for the client: no traces, no addresses."""

    status = 500
    type = "server_error"
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        # Errors quote what the client sent, and JSON can smuggle in half characters that no answer can carry.
        super().__init__(message.encode("utf-8", "backslashreplace").decode())
        self.param = param
        self.retry_after_s = retry_after_s
        self.request_id: str | None = None  # of the request that it answers, filled in by whoever answers

    @property
    def retry_after(self) -> str | None:
        """The header of that name: whole seconds, at least one. None without."""
        return None if self.retry_after_s is None else str(max(1, math.ceil(self.retry_after_s)))

    def body(self) -> dict[str, Any]:
        """The OpenAI error object."""
        error = {"message": str(self), "type": self.type, "param": self.param, "code": self.code}
        return {"error": error if self.request_id is None else {**error, "request_id": self.request_id}}


class InvalidRequestError(ApiError):
    """A field is wrong."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class ContextLengthError(InvalidRequestError):
    """Prompt and output do not fit the model."""

    code = "context_length_exceeded"


class ChatTemplateError(InvalidRequestError):
    """The model's chat template is missing, or does not take the messages."""


class UnusableGuideError(InvalidRequestError):
    """What the output is to match cannot be followed: it does not compile, or takes too much."""

    def __init__(self, param: str | None, reason: str) -> None:
        """``param``: the client's field that it came from, if it is one."""
        super().__init__(f"{param or 'the guide'} cannot be followed: {reason}", param=param)


class InvalidHttpError(InvalidRequestError):
    """What came is not HTTP/1.1, or could be read in two ways."""

    code = "invalid_http"


class UnauthorizedError(ApiError):
    """No API key, or one that is not known."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class ForbiddenError(ApiError):
    """The API key does not go so far."""

    status = 403
    type = "invalid_request_error"
    code = "forbidden"


class ModelNotFoundError(ApiError):
    """The model is not served here."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class NotFoundError(ApiError):
    """Nothing is at that path."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class SlowClientError(ApiError):
    """Headers or body took too long to arrive."""

    status = 408
    type = "invalid_request_error"
    code = "request_too_slow"


class ClientBehindError(ApiError):
    """Too much of a stream waits for its client."""

    status = 408
    type = "invalid_request_error"
    code = "client_behind"


class BodyTooLargeError(ApiError):
    """The body exceeds the limit."""

    status = 413
    type = "invalid_request_error"
    code = "body_too_large"


class TooManyRequestsError(ApiError):
    """This API key asks for more than it may."""

    status = 429
    type = "requests"
    code = "rate_limit_exceeded"


class HeadersTooLargeError(ApiError):
    """Request line and headers exceed the limit."""

    status = 431
    type = "invalid_request_error"
    code = "headers_too_large"


class UnavailableError(ApiError):
    """Nobody can serve the request now."""

    status = 503
    type = "server_error"
    code = "unavailable"


class OverloadedError(UnavailableError):
    """No worker has room for the request now, or not in time."""


class ConnectionsError(UnavailableError):
    """More connections than are served at a time."""

    code = "too_many_connections"


class ShuttingDownError(UnavailableError):
    """This gateway ends, and could not wait for the request."""

    code = "shutting_down"

    def __init__(self) -> None:
        super().__init__(
            "this gateway is shutting down and could not wait for the answer; ask again", retry_after_s=1.0
        )


class RequestTimeoutError(ApiError):
    """The request's time ran out."""

    status = 504
    type = "server_error"
    code = "timeout"


class AttemptsFailedError(ApiError):
    """Every attempt at the request failed."""

    status = 502
    type = "server_error"
    code = "attempts_failed"
