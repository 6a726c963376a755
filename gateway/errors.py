"""Errors that a client sees, as OpenAI error objects.

KvrelayError
└── ApiError                     status, type, code, param
    ├── InvalidRequestError      400  a field is wrong: names it, its value and the limit
    │   └── ContextLengthError   400  prompt and output do not fit the model
    ├── UnauthorizedError        401  no API key, or one that is not known
    ├── ModelNotFoundError       404
    ├── BodyTooLargeError        413
    ├── UnavailableError         503  no worker, or no room; carries Retry-After
    ├── RequestTimeoutError      504  the request's time ran out
    └── AttemptsFailedError      502  every attempt failed
"""

from __future__ import annotations

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

    def body(self) -> dict[str, Any]:
        """The OpenAI error object."""
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}


class InvalidRequestError(ApiError):
    """A field is wrong."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class ContextLengthError(InvalidRequestError):
    """Prompt and output do not fit the model."""

    code = "context_length_exceeded"


class UnauthorizedError(ApiError):
    """No API key, or one that is not known."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class ModelNotFoundError(ApiError):
    """The model is not served here."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class BodyTooLargeError(ApiError):
    """The body exceeds the limit."""

    status = 413
    type = "invalid_request_error"
    code = "body_too_large"


class UnavailableError(ApiError):
    """Nobody can serve the request now."""

    status = 503
    type = "server_error"
    code = "unavailable"


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
