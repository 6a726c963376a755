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
from kvrelay.gateway.http.api_request import SECONDS, TIMEOUT_HEADER
from kvrelay.gateway.http.bodies import Described

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


class ErrorDetail(Described):
    """What went wrong."""

    message: str = Field(min_length=1)
    """What is wrong, and the way out."""
    type: Literal["invalid_request_error", "requests", "server_error"]
    """Whose fault it is."""
    param: str | None
    """The field that is wrong."""
    code: str
    """What is wrong, for programs."""


class ErrorBody(Described):
    """OpenAI's error object."""

    error: ErrorDetail
    """Its message, and what programs read."""


class Usage(Described):
    """Tokens of a request."""

    prompt_tokens: int = Field(ge=1)
    """Tokens of the prompt."""
    completion_tokens: int = Field(ge=0)
    """Tokens that were generated."""
    total_tokens: int = Field(ge=1)
    """All together."""


class CalledFunction(Described):
    """What is to be called, and with what."""

    name: str = Field(min_length=1)
    """The function's name."""
    arguments: str
    """Its arguments, as JSON text."""


class ToolCall(Described):
    """A call that the model asks for."""

    id: str = Field(min_length=1)
    """To be repeated with the result."""
    type: Literal["function"]
    """Always a function."""
    function: CalledFunction
    """What is to be called."""


class AnswerMessage(Described):
    """What the model said, thought, and asks to be called."""

    role: Literal["assistant"]
    """Always the assistant."""
    content: str | None
    """What it said; null beside calls."""
    refusal: str | None = None
    """Always null."""
    reasoning_content: str | None = None
    """What it thought."""
    tool_calls: list[ToolCall] | None = None
    """What it asks to be called."""


class ChatChoice(Described):
    """A chat's answer."""

    index: int = Field(ge=0)
    """Which of `n` answers."""
    message: AnswerMessage
    """The answer."""
    finish_reason: Literal["stop", "length", "tool_calls"]
    """Why it ended."""
    stop_reason: int | str | None = None
    """The stop string or token that ended it."""
    logprobs: dict[str, Any] | None
    """Log probabilities, if asked for."""
    token_ids: list[int] | None = None
    """The answer's tokens, if asked for."""


class TextChoice(Described):
    """A text's continuation."""

    index: int = Field(ge=0)
    """Which of the answers, prompt by prompt."""
    text: str
    """The continuation."""
    finish_reason: Literal["stop", "length"]
    """Why it ended."""
    stop_reason: int | str | None = None
    """The stop string or token that ended it."""
    logprobs: dict[str, Any] | None
    """Log probabilities, if asked for."""
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    """Those of the prompt, if asked for."""
    token_ids: list[int] | None = None
    """The continuation's tokens, if asked for."""


class ChatAnswer(Described):
    """Of ``/v1/chat/completions`` without ``stream``."""

    id: str
    """The request's id."""
    object: Literal["chat.completion"]
    """What this is."""
    created: int
    """Seconds since 1970."""
    model: str
    """The served model."""
    system_fingerprint: str | None = None
    """Equal while model, weights and number format are."""
    choices: list[ChatChoice] = Field(min_length=1)
    """The answers."""
    usage: Usage
    """Tokens of the request."""
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    """Log probabilities of the prompt, if asked for."""


class TextAnswer(Described):
    """Of ``/v1/completions`` without ``stream``."""

    id: str
    """The request's id."""
    object: Literal["text_completion"]
    """What this is."""
    created: int
    """Seconds since 1970."""
    model: str
    """The served model."""
    system_fingerprint: str | None = None
    """Equal while model, weights and number format are."""
    choices: list[TextChoice] = Field(min_length=1)
    """The continuations."""
    usage: Usage
    """Tokens of the request."""


class ResponseUsage(Described):
    """Tokens of a response."""

    input_tokens: int = Field(ge=1)
    """Tokens of the prompt."""
    output_tokens: int = Field(ge=0)
    """Tokens that were generated."""
    total_tokens: int = Field(ge=1)
    """All together."""


class ResponseAnswer(Described):
    """Of ``/v1/responses`` without ``stream``."""

    id: str
    """The request's id."""
    object: Literal["response"]
    """What this is."""
    created_at: int
    """Seconds since 1970."""
    status: Literal["completed", "incomplete"]
    """Whether the answer was cut off by its limit."""
    model: str
    """The served model."""
    output: list[dict[str, Any]]
    """Thoughts, messages and calls, in their order."""
    usage: ResponseUsage
    """Tokens of the request."""


class ServedModel(Described):
    """The model that is served."""

    id: str
    """Its name."""
    object: Literal["model"]
    """What this is."""
    created: int
    """Always 0."""
    owned_by: str
    """Always kvrelay."""
    max_model_len: int | None = None
    """So many tokens prompt and answer may have; null while no worker is up."""


class ModelList(Described):
    """Of ``/v1/models``."""

    object: Literal["list"]
    """What this is."""
    data: list[ServedModel]
    """The one model."""


class Version(Described):
    """Of what runs here."""

    version: str
    """kvrelay's."""


class Health(Described):
    """Of the health routes."""

    status: Literal["ok", "unavailable"]
    """Whether requests are well placed here."""
    reasons: list[str] = Field(default_factory=list)
    """Why not."""


def events_of(description: str) -> dict[str, Any]:
    """The content of a response that is a stream of events; ``description`` says what their data is."""
    properties = {"data": {"type": "string", "minLength": 1}}
    schema = {"type": "object", "description": description, "properties": properties, "required": ["data"]}
    return {"text/event-stream": {"schema": schema}}


def answers(whole: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """A POST's responses: ``whole``, or a stream of events, or one of the errors."""
    events = events_of("each event's data is a chunk in JSON, the last one's is [DONE]")
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
VERSION: dict[int | str, dict[str, Any]] = {200: {"model": Version}}
READY: dict[int | str, dict[str, Any]] = {**HEALTHY, 503: {"model": Health, "description": "With the reasons"}}
METRICS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}

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
