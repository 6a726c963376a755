"""The shapes of answers and errors in ``/openapi.json``. They are documentation only: the gateway does not validate answers with
them.

The tests compare the gateway's answers to generated requests with these shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field

from kvrelay.gateway.http.request import SECONDS, TIMEOUT_HEADER

Documented = dict[int | str, dict[str, Any]]
"""A route's responses, by status."""

_ERRORS: dict[int | str, str] = {
    400: "A field is wrong",
    401: "No API key, or one that is not known",
    404: "The model is not served here",
    413: "The body exceeds the limit",
    429: "This API key asks for more than it may",
    502: "Every attempt at the request failed",
    503: "Nobody can serve the request now",
    504: "The request's time ran out",
    # This entry also keeps FastAPI from documenting a 422: a wrong body is answered with 400.
    "4XX": "Another way in which a request can be wrong",
}


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str = Field(min_length=1, description="What is wrong, and the way out.")
    type: Literal["invalid_request_error", "requests", "server_error"] = Field(description="Whose fault it is.")
    param: str | None = Field(description="The field that is wrong.")
    code: str = Field(description="What is wrong, for programs.")
    request_id: str | None = Field(None, description="The request's id, as in the header x-request-id.")


class ErrorBody(BaseModel):
    """OpenAI's error object."""

    error: ErrorDetail = Field(description="Its message, and what programs read.")


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int = Field(ge=1, description="Tokens of the prompt.")
    completion_tokens: int = Field(ge=0, description="Tokens that were generated.")
    total_tokens: int = Field(ge=1, description="All together.")


class CalledFunction(BaseModel):
    """What is to be called, and with what."""

    name: str = Field(min_length=1, description="The function's name.")
    arguments: str = Field(description="Its arguments, as JSON text.")


class ToolCall(BaseModel):
    """A call that the model asks for."""

    id: str = Field(min_length=1, description="To be repeated with the result.")
    type: Literal["function"] = Field(description="Always a function.")
    function: CalledFunction = Field(description="What is to be called.")


class AnswerMessage(BaseModel):
    """What the model said, thought, and asks to be called."""

    role: Literal["assistant"] = Field(description="Always the assistant.")
    content: str | None = Field(description="What it said; null beside calls.")
    refusal: str | None = Field(None, description="Always null.")
    reasoning_content: str | None = Field(None, description="What it thought.")
    tool_calls: list[ToolCall] | None = Field(None, description="What it asks to be called.")


class Choice(BaseModel):
    """What choices of chats and of texts share."""

    index: int = Field(ge=0, description="Which of the answers; of several texts, prompt by prompt.")
    stop_reason: int | str | None = Field(None, description="The stop string or token that ended it.")
    logprobs: dict[str, Any] | None = Field(description="Log probabilities, if asked for.")
    token_ids: list[int] | None = Field(None, description="Its tokens, if asked for.")


class ChatChoice(Choice):
    """A chat's answer."""

    message: AnswerMessage = Field(description="The answer.")
    finish_reason: Literal["stop", "length", "tool_calls"] = Field(description="Why it ended.")


class TextChoice(Choice):
    """A text's continuation."""

    text: str = Field(description="The continuation.")
    finish_reason: Literal["stop", "length"] = Field(description="Why it ended.")
    prompt_logprobs: list[dict[str, Any] | None] | None = Field(None, description="Those of the prompt, if asked for.")


class Completion(BaseModel):
    """What chats and texts share."""

    id: str = Field(description="The request's id.")
    created: int = Field(description="Seconds since 1970.")
    model: str = Field(description="The served model.")
    system_fingerprint: str | None = Field(None, description="Equal while model, weights and number format are.")
    usage: Usage = Field(description="Tokens of the request.")


class ChatAnswer(Completion):
    """Of ``/v1/chat/completions`` without ``stream``."""

    object: Literal["chat.completion"] = Field(description="What this is.")
    choices: list[ChatChoice] = Field(min_length=1, description="The answers.")
    prompt_logprobs: list[dict[str, Any] | None] | None = Field(
        None, description="Log probabilities of the prompt, if asked for."
    )


class TextAnswer(Completion):
    """Of ``/v1/completions`` without ``stream``."""

    object: Literal["text_completion"] = Field(description="What this is.")
    choices: list[TextChoice] = Field(min_length=1, description="The continuations.")


class ResponseUsage(BaseModel):
    """Tokens of a response."""

    input_tokens: int = Field(ge=1, description="Tokens of the prompt.")
    output_tokens: int = Field(ge=0, description="Tokens that were generated.")
    total_tokens: int = Field(ge=1, description="All together.")


class ResponseAnswer(BaseModel):
    """Of ``/v1/responses`` without ``stream``."""

    id: str = Field(description="The request's id.")
    object: Literal["response"] = Field(description="What this is.")
    created_at: int = Field(description="Seconds since 1970.")
    status: Literal["completed", "incomplete"] = Field(description="Whether the answer was cut off by its limit.")
    model: str = Field(description="The served model.")
    output: list[dict[str, Any]] = Field(description="Thoughts, messages and calls, in their order.")
    usage: ResponseUsage = Field(description="Tokens of the request.")


class ServedModel(BaseModel):
    """A model that is served, or an alias."""

    id: str = Field(description="Its name.")
    object: Literal["model"] = Field(description="What this is.")
    created: int = Field(description="Always 0.")
    owned_by: str = Field(description="Always kvrelay.")
    max_model_len: int | None = Field(
        None, description="So many tokens prompt and answer may have; null while no worker is up."
    )
    parent: str | None = Field(None, description="Of an adapter: the model that it changes.")
    root: str | None = Field(None, description="Of an alias: the model that it stands for.")
    split: dict[str, float] | None = Field(
        None, description="Of an alias of several models: which part of the conversations each gets."
    )


class ModelList(BaseModel):
    """Of ``/v1/models``."""

    object: Literal["list"] = Field(description="What this is.")
    data: list[ServedModel] = Field(description="The models, then aliases, then adapters.")


class Version(BaseModel):
    """Of what runs here."""

    version: str = Field(description="kvrelay's.")


class Health(BaseModel):
    """Of the health routes."""

    status: Literal["ok", "unavailable"] = Field(description="Whether requests are well placed here.")
    reasons: list[str] = Field(default_factory=list, description="Why not.")
    unavailable: dict[str, list[str]] = Field(
        default_factory=dict, description="Models that cannot be served, while others can, and why."
    )


def events_of(description: str) -> dict[str, Any]:
    """The content of a response that is a stream of events; ``description`` says what their data is."""
    properties = {"data": {"type": "string", "minLength": 1}}
    schema = {"type": "object", "description": description, "properties": properties, "required": ["data"]}
    return {"text/event-stream": {"schema": schema}}


def answers(whole: type[BaseModel], error: type[BaseModel] = ErrorBody) -> Documented:
    """A POST's responses: ``whole``, or a stream of events, or one of the errors."""
    events = events_of("each event's data is a chunk in JSON, the last one's is [DONE]")
    answer = {"model": whole, "description": "The answer; with stream=true its events", "content": events}
    return {200: answer, **errors_as(error, _ERRORS)}


def errors_as(model: Any, descriptions: Mapping[int | str, str]) -> Documented:
    """Responses whose body is a ``model``."""
    return {status: {"model": model, "description": text} for status, text in descriptions.items()}


UNAUTHORIZED = errors_as(ErrorBody, {401: _ERRORS[401]})
HEALTHY: Documented = {200: {"model": Health}}
VERSION: Documented = {200: {"model": Version}}
READY: Documented = {**HEALTHY, 503: {"model": Health, "description": "With the reasons"}}

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
