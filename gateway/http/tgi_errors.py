"""Errors as TGI's clients know them: ``{"error": TEXT, "error_type": KIND}``, and TGI's statuses where it has one.

What has no counterpart there (keys, bounds on bodies, time) keeps its status, in the same shape.
"""

from __future__ import annotations

from kvrelay.gateway.errors import (
    ApiError,
    AttemptsFailedError,
    ChatTemplateError,
    InvalidRequestError,
    OverloadedError,
    RequestTimeoutError,
    TooManyRequestsError,
    UnauthorizedError,
    UnavailableError,
)

PATHS = frozenset(
    {
        "/",
        "/generate",
        "/generate_stream",
        "/info",
        "/health",
        "/ping",
        "/tokenize",
        "/chat_tokenize",
    }
)
"""Whatever goes wrong with a request to one of these is told in TGI's shape."""


_KINDS: tuple[tuple[type[ApiError], int | None, str, str], ...] = (
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
    """Status and body."""
    status, kind, prefix = _described(error)
    body = {"error": f"{prefix}{error}", "error_type": kind}
    return status, body if error.request_id is None else {**body, "request_id": error.request_id}


def _described(error: ApiError) -> tuple[int, str, str]:
    # An error that has another status than its class is one of HTTP: a method that the path does not take.
    is_usual = error.status == type(error).status
    for kind, status, name, prefix in _KINDS:
        if is_usual and isinstance(error, kind):
            return error.status if status is None else status, name, prefix
    if error.status >= 500:
        return 500, "incomplete_generation", "Incomplete generation: "
    return error.status, "validation", ""  # a body that is too large, or too slow
