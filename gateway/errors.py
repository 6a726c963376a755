"""Errors that a client sees, in the shapes of OpenAI's, TGI's and Anthropic's APIs. Answers with 503 and 429 carry Retry-After."""

from __future__ import annotations

import math
from typing import Any

from kvrelay.common.errors import KvrelayError


class ApiError(KvrelayError):
    """Base of all errors that a client sees. The message is for the client: it has no stack traces and no addresses."""

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        # Errors quote the client's text. JSON escapes can spell half of a surrogate pair, which no answer can carry.
        super().__init__(message.encode("utf-8", "backslashreplace").decode())
        self.param = param
        self.retry_after_s = retry_after_s
        self.request_id: str | None = None  # id of the request that this error answers; set when it is answered

    @property
    def type(self) -> str:
        """OpenAI's name for the kind of error."""
        return "server_error" if self.status >= 500 else "requests" if self.status == 429 else "invalid_request_error"

    @property
    def retry_after(self) -> str | None:
        """The value of the header Retry-After: whole seconds, at least one. None without a header."""
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
    """A guide does not compile, or takes too much time or memory."""

    def __init__(self, param: str | None, reason: str) -> None:
        """``param``: the client's field that the guide was made from, if there is one."""
        super().__init__(f"{param or 'the guide'} cannot be followed: {reason}", param=param)


class InvalidHttpError(InvalidRequestError):
    """The bytes are not HTTP/1.1, or could be read in two ways."""

    code = "invalid_http"


class UnauthorizedError(ApiError):
    """There is no API key, or an unknown one."""

    status = 401
    code = "invalid_api_key"


class ForbiddenError(ApiError):
    """The API key does not permit this."""

    status = 403
    code = "forbidden"


class ModelNotFoundError(ApiError):
    """This gateway does not serve the model."""

    status = 404
    code = "model_not_found"


class NotFoundError(ApiError):
    """There is no such path."""

    status = 404
    code = "not_found"


class SlowClientError(ApiError):
    """Headers or body took too long to arrive."""

    status = 408
    code = "request_too_slow"


class ClientBehindError(ApiError):
    """The client reads too slowly: too much of a stream waits for it."""

    status = 408
    code = "client_behind"


class BodyTooLargeError(ApiError):
    """The body exceeds the limit."""

    status = 413
    code = "body_too_large"


class TooManyRequestsError(ApiError):
    """The API key exceeds a limit."""

    status = 429
    code = "rate_limit_exceeded"


class TokenBudgetError(TooManyRequestsError):
    """The API key has used up its tokens."""

    @property
    def type(self) -> str:
        """OpenAI's name for an exceeded token limit."""
        return "tokens"


class HeadersTooLargeError(ApiError):
    """Request line and headers exceed the limit."""

    status = 431
    code = "headers_too_large"


class UnavailableError(ApiError):
    """No worker can serve the request now."""

    status = 503
    code = "unavailable"


class OverloadedError(UnavailableError):
    """No worker has room for the request now, or not in time."""


class ConnectionsError(UnavailableError):
    """There are too many connections."""

    code = "too_many_connections"


class ShuttingDownError(UnavailableError):
    """This gateway is shutting down and could not wait for the request."""

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


class ImageHostError(ApiError):
    """The host of an image that a request names by URL is down, slow, or broken."""

    status = 502
    code = "image_host_failed"


_TGI_KINDS: tuple[tuple[type[ApiError], int | None, str, str], ...] = (
    (ChatTemplateError, 422, "template_error", "Template error: "),
    (InvalidRequestError, 422, "validation", "Input validation error: "),
    (OverloadedError, 429, "overloaded", "Model is overloaded: "),
    (TooManyRequestsError, 429, "overloaded", "Model is overloaded: "),
    (AttemptsFailedError, 424, "generation", "Request failed during generation: "),
    (ImageHostError, 424, "generation", "Request failed before generation: "),
    (UnavailableError, None, "unhealthy", ""),
    (RequestTimeoutError, None, "timeout", ""),
    (UnauthorizedError, None, "unauthorized", ""),
)
"""For an error class and its subclasses, first match wins: status (None: its own), type, beginning of the message."""


def tgi_error(error: ApiError) -> tuple[int, dict[str, str]]:
    """Status and body for TGI's clients. An error that TGI does not know (keys, limits on bodies, timeouts) keeps its status."""
    status, kind, prefix = error.status, "validation", ""  # for bodies that are too large or too slow
    if status >= 500:
        status, kind, prefix = 500, "incomplete_generation", "Incomplete generation: "
    # An error with another status than its class is an HTTP error, such as a method that the path does not take.
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
