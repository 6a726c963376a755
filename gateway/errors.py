"""Errors that a client sees, in the shapes of OpenAI's, TGI's and Anthropic's APIs; with 503 and 429 comes Retry-After."""

from __future__ import annotations

import math
from typing import Any

from kvrelay.common.errors import KvrelayError


class ApiError(KvrelayError):
    """Base of all errors that a client sees. The text is meant for the client: no traces, no addresses."""

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        # Errors quote what the client sent, and JSON can smuggle in half characters that no answer can carry.
        super().__init__(message.encode("utf-8", "backslashreplace").decode())
        self.param = param
        self.retry_after_s = retry_after_s
        self.request_id: str | None = None  # of the request that it answers, filled in by whoever answers

    @property
    def type(self) -> str:
        """Whose fault it is, in OpenAI's words."""
        return "server_error" if self.status >= 500 else "requests" if self.status == 429 else "invalid_request_error"

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
    code = "invalid_api_key"


class ForbiddenError(ApiError):
    """The API key does not go so far."""

    status = 403
    code = "forbidden"


class ModelNotFoundError(ApiError):
    """The model is not served here."""

    status = 404
    code = "model_not_found"


class NotFoundError(ApiError):
    """Nothing is at that path."""

    status = 404
    code = "not_found"


class SlowClientError(ApiError):
    """Headers or body took too long to arrive."""

    status = 408
    code = "request_too_slow"


class ClientBehindError(ApiError):
    """Too much of a stream waits for its client."""

    status = 408
    code = "client_behind"


class BodyTooLargeError(ApiError):
    """The body exceeds the limit."""

    status = 413
    code = "body_too_large"


class TooManyRequestsError(ApiError):
    """This API key asks for more than it may."""

    status = 429
    code = "rate_limit_exceeded"


class TokenBudgetError(TooManyRequestsError):
    """This API key has used its tokens."""

    @property
    def type(self) -> str:
        """OpenAI's word for what there is too much of."""
        return "tokens"


class HeadersTooLargeError(ApiError):
    """Request line and headers exceed the limit."""

    status = 431
    code = "headers_too_large"


class UnavailableError(ApiError):
    """Nobody can serve the request now."""

    status = 503
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
    code = "timeout"


class AttemptsFailedError(ApiError):
    """Every attempt at the request failed."""

    status = 502
    code = "attempts_failed"


_TGI_KINDS: tuple[tuple[type[ApiError], int | None, str, str], ...] = (
    (ChatTemplateError, 422, "template_error", "Template error: "),
    (InvalidRequestError, 422, "validation", "Input validation error: "),
    (OverloadedError, 429, "overloaded", "Model is overloaded: "),
    (TooManyRequestsError, 429, "overloaded", "Model is overloaded: "),
    (AttemptsFailedError, 424, "generation", "Request failed during generation: "),
    (UnavailableError, None, "unhealthy", ""),
    (RequestTimeoutError, None, "timeout", ""),
    (UnauthorizedError, None, "unauthorized", ""),
)
"""Of an error and those derived from it, the first that fits: status (None: its own), type, what the text begins with."""


def tgi_error(error: ApiError) -> tuple[int, dict[str, str]]:
    """Status and body for TGI's clients. What has no counterpart there (keys, bounds on bodies, time) keeps its status."""
    status, kind, prefix = error.status, "validation", ""  # of a body that is too large, or too slow
    if status >= 500:
        status, kind, prefix = 500, "incomplete_generation", "Incomplete generation: "
    # An error that has another status than its class is one of HTTP: a method that the path does not take.
    if error.status == type(error).status:
        kinds = (known for known in _TGI_KINDS if isinstance(error, known[0]))
        _, own_status, kind, prefix = next(kinds, (ApiError, status, kind, prefix))
        status = own_status or error.status
    body = {"error": f"{prefix}{error}", "error_type": kind}
    return status, body if error.request_id is None else {**body, "request_id": error.request_id}


_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def anthropic_error(error: ApiError) -> tuple[int, dict[str, Any]]:
    """Status and body for Anthropic's clients."""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    body = {"type": "error", "error": {"type": kind, "message": str(error)}}
    return error.status, body if error.request_id is None else {**body, "request_id": error.request_id}
