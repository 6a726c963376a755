"""What ``/openapi.json`` says of answers: their shapes, errors included. For documentation only: nothing is checked by it.

(The tests do: what the gateway answers to generated requests is compared with these.)
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from kvrelay.gateway.errors import (
    AttemptsFailedError,
    BodyTooLargeError,
    InvalidRequestError,
    ModelNotFoundError,
    RequestTimeoutError,
    TooManyRequestsError,
    UnauthorizedError,
    UnavailableError,
)

_ERRORS = (
    InvalidRequestError,
    UnauthorizedError,
    ModelNotFoundError,
    BodyTooLargeError,
    TooManyRequestsError,
    AttemptsFailedError,
    UnavailableError,
    RequestTimeoutError,
)


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str = Field(min_length=1)
    type: Literal["invalid_request_error", "requests", "server_error"]
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """OpenAI's error object."""

    error: ErrorDetail


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int = Field(ge=1)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=1)


class CalledFunction(BaseModel):
    """What is to be called, and with what."""

    name: str = Field(min_length=1)
    arguments: str  # JSON


class ToolCall(BaseModel):
    """A call that the model asks for."""

    id: str = Field(min_length=1)
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(BaseModel):
    """What the model said, thought, and asks to be called."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """A chat's answer."""

    index: int = Field(ge=0)
    message: AnswerMessage
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None = None
    logprobs: dict[str, Any] | None
    token_ids: list[int] | None = None


class TextChoice(BaseModel):
    """A text's continuation."""

    index: int = Field(ge=0)
    text: str
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None = None
    logprobs: dict[str, Any] | None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    token_ids: list[int] | None = None


class ChatAnswer(BaseModel):
    """Of ``/v1/chat/completions`` without ``stream``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChatChoice] = Field(min_length=1)
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class TextAnswer(BaseModel):
    """Of ``/v1/completions`` without ``stream``."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[TextChoice] = Field(min_length=1)
    usage: Usage


class ResponseUsage(BaseModel):
    """Tokens of a response."""

    input_tokens: int = Field(ge=1)
    output_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=1)


class ResponseAnswer(BaseModel):
    """Of ``/v1/responses`` without ``stream``."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage


class ServedModel(BaseModel):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None = None


class ModelList(BaseModel):
    """Of ``/v1/models``."""

    object: Literal["list"]
    data: list[ServedModel]


class Health(BaseModel):
    """Of the health routes."""

    status: Literal["ok", "unavailable"]
    reasons: list[str] = Field(default_factory=list)


def answers(whole: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """A POST's responses: ``whole``, or a stream of events, or one of the errors."""
    event = {
        "type": "object",
        "description": "each event's data is a chunk in JSON, the last one's is [DONE]",
        "properties": {"data": {"type": "string", "minLength": 1}},
        "required": ["data"],
    }
    events = {"text/event-stream": {"schema": event}}
    documented: dict[int | str, dict[str, Any]] = {
        200: {"model": whole, "description": "The answer; with stream=true its events", "content": events}
    }
    for error in _ERRORS:
        documented[error.status] = {"model": ErrorBody, "description": (error.__doc__ or "").strip()}
    # Also keeps FastAPI from documenting a 422 of its own: what is wrong with a body is answered with 400.
    documented["4XX"] = {"model": ErrorBody, "description": "Another way in which a request can be wrong"}
    return documented


UNAUTHORIZED: dict[int | str, dict[str, Any]] = {
    401: {"model": ErrorBody, "description": (UnauthorizedError.__doc__ or "").strip()}
}
HEALTHY: dict[int | str, dict[str, Any]] = {200: {"model": Health}}
READY: dict[int | str, dict[str, Any]] = {**HEALTHY, 503: {"model": Health, "description": "With the reasons"}}
METRICS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}

TIMEOUT_HEADER = "x-request-timeout"
SECONDS = r"[0-9]{1,9}(\.[0-9]{0,9})?"
# Read by the routes themselves: FastAPI does not see the requests that it documents.
REQUEST_HEADERS: dict[str, Any] = {
    "parameters": [
        {
            "name": TIMEOUT_HEADER,
            "in": "header",
            "required": False,
            "description": "Seconds that the client waits for the whole answer; the server's own limit holds, too. "
            "Who could not be answered in time gets 503 at once, and what is out of time 504.",
            "schema": {"type": "string", "pattern": f"^{SECONDS}$", "example": "30"},
        }
    ]
}
