"""What ``/openapi.json`` says of the answers of TGI's routes: their shapes, errors included. For documentation only."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from kvrelay.gateway.api_docs import REQUEST_HEADERS, ErrorBody

FinishReason = Literal["length", "eos_token", "stop_sequence"]


class TgiError(BaseModel):
    """TGI's error object."""

    error: str = Field(min_length=1)
    error_type: Literal[
        "validation",
        "template_error",
        "overloaded",
        "generation",
        "incomplete_generation",
        "unhealthy",
        "timeout",
        "unauthorized",
    ]


class PrefillToken(BaseModel):
    """A token of the prompt; the first one has no log probability."""

    id: int = Field(ge=0)
    text: str
    logprob: float | None


class Token(PrefillToken):
    """A token that was generated, or could have been. Log probabilities are of the raw logits."""

    special: bool


class Sequence(BaseModel):
    """How one text came to be."""

    finish_reason: FinishReason
    generated_tokens: int = Field(ge=0)
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] | None = None


class BestOfSequence(Sequence):
    """One of those that were not the best."""

    generated_text: str


class Details(Sequence):
    """Of the best text."""

    best_of_sequences: list[BestOfSequence] | None = None


class GenerateAnswer(BaseModel):
    """Of ``/generate``."""

    generated_text: str
    details: Details | None = None


class StreamDetails(BaseModel):
    """With the last token."""

    finish_reason: FinishReason
    generated_tokens: int = Field(ge=1)
    seed: int | None
    input_length: int = Field(ge=1)


class StreamEvent(BaseModel):
    """One token; the last one brings the whole text."""

    index: int = Field(ge=1)
    token: Token
    top_tokens: list[Token] | None = None
    generated_text: str | None
    details: StreamDetails | None


class Info(BaseModel):
    """Of ``/info``."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    model_device_type: str
    model_pipeline_tag: str
    max_concurrent_requests: int = Field(ge=1)
    max_best_of: int = Field(ge=1)
    max_stop_sequences: int = Field(ge=1)
    max_input_tokens: int = Field(ge=1)
    max_input_length: int = Field(ge=1)
    max_total_tokens: int = Field(ge=2)
    validation_workers: int = Field(ge=1)
    max_client_batch_size: int = Field(ge=1)
    router: str
    version: str
    sha: str | None
    docker_label: str | None


class SpanToken(BaseModel):
    """A token of a text, and where it stands there, in characters."""

    id: int = Field(ge=0)
    text: str
    start: int = Field(ge=0)
    stop: int = Field(ge=0)


class ChatTokens(BaseModel):
    """Of ``/chat_tokenize``."""

    tokenize_response: list[SpanToken]
    templated_text: str


class PromptTokens(BaseModel):
    """Of ``/tokenize``, in vLLM's form."""

    count: int = Field(ge=0)
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    """Of ``/detokenize``, as vLLM's."""

    prompt: str


_ERRORS = {
    401: "No API key, or one that is not known",
    413: "The body exceeds the limit",
    422: "A field is wrong: names it, its value and the limit",
    424: "The request failed during generation",
    429: "The model is overloaded, or this API key asks for more than it may",
    500: "Incomplete generation",
    503: "Nobody can serve the request now",
    504: "The request's time ran out",
}


def tgi_answers(*whole: Any, events: Any = None, also: Any = None) -> dict[int | str, dict[str, Any]]:
    """A route's responses: one of ``whole`` as JSON, or ``events``, or an error; in OpenAI's shape, too, if ``also`` says so."""
    answer: dict[str, Any] = {"description": "The answer"}
    if whole:
        answer["model"] = _either(*whole)
    if events is not None:
        schema = {
            "type": "object",
            "description": "each event's data is a token in JSON, or the error that ends the stream",
            "properties": {"data": {"type": "string", "minLength": 1}},
            "required": ["data"],
        }
        answer["content"] = {"text/event-stream": {"schema": schema}}
    model = TgiError if also is None else _either(TgiError, also)
    documented: dict[int | str, dict[str, Any]] = {200: answer}
    for status, description in _ERRORS.items():
        documented[status] = {"model": model, "description": description}
    documented["4XX"] = {"model": model, "description": "Another way in which a request can be wrong"}
    return documented


def _either(*models: Any) -> Any:
    either = models[0]
    for model in models[1:]:
        either = either | model
    return either


HEALTHY: dict[int | str, dict[str, Any]] = {
    200: {"description": "Tokens can be generated"},
    503: {"model": TgiError, "description": "With the reason"},
}
TOKENIZE_ERRORS = ErrorBody  # what vLLM's form of a request is answered with
EXTRA = REQUEST_HEADERS
