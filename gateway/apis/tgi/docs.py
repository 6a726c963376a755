"""What ``/openapi.json`` says of the answers of TGI's routes: their shapes, errors included. For documentation only."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any, Literal

from pydantic import Field

from kvrelay.gateway.apis.docs import events_of
from kvrelay.gateway.http.bodies import Described

FinishReason = Literal["length", "eos_token", "stop_sequence"]


class TgiError(Described):
    """TGI's error object."""

    error: str = Field(min_length=1)
    """What is wrong."""
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
    """Its kind."""


class PrefillToken(Described):
    """A token of the prompt; the first one has no log probability."""

    id: int = Field(ge=0)
    """Its id."""
    text: str
    """Its text."""
    logprob: float | None
    """Its log probability."""


class Token(PrefillToken):
    """A token that was generated, or could have been. Log probabilities are of the raw logits."""

    special: bool
    """Whether it is a special token."""


class Sequence(Described):
    """How one text came to be."""

    finish_reason: FinishReason
    """Why it ended."""
    generated_tokens: int = Field(ge=0)
    """How many tokens it has."""
    seed: int | None
    """What it was sampled with; null if the likeliest were taken."""
    prefill: list[PrefillToken]
    """The prompt's tokens, if asked for."""
    tokens: list[Token]
    """The text's tokens."""
    top_tokens: list[list[Token]] | None = None
    """The likeliest at each place, if asked for."""


class BestOfSequence(Sequence):
    """One of those that were not the best."""

    generated_text: str
    """The text."""


class Details(Sequence):
    """Of the best text."""

    best_of_sequences: list[BestOfSequence] | None = None
    """The others of `best_of`."""


class GenerateAnswer(Described):
    """Of ``/generate``."""

    generated_text: str
    """The text."""
    details: Details | None = None
    """How it came to be, if asked for."""


class StreamDetails(Described):
    """With the last token."""

    finish_reason: FinishReason
    """Why the text ended."""
    generated_tokens: int = Field(ge=1)
    """How many tokens it has."""
    seed: int | None
    """What it was sampled with; null if the likeliest were taken."""
    input_length: int = Field(ge=1)
    """How many tokens the prompt has."""


class StreamEvent(Described):
    """One token; the last one brings the whole text."""

    index: int = Field(ge=1)
    """The token's number, from 1."""
    token: Token
    """The token."""
    top_tokens: list[Token] | None = None
    """The likeliest at its place, if asked for."""
    generated_text: str | None
    """The whole text, with the last token."""
    details: StreamDetails | None
    """How it came to be, with the last token, if asked for."""


class Info(Described):
    """Of ``/info``."""

    model_id: str
    """The served model."""
    model_sha: str | None
    """Digest of its weights."""
    model_dtype: str
    """Number format of its KV."""
    model_device_type: str
    """What it is computed on."""
    model_pipeline_tag: str
    """Always text-generation."""
    max_concurrent_requests: int = Field(ge=1)
    """So many requests may wait here."""
    max_best_of: int = Field(ge=1)
    """Limit of `best_of`."""
    max_stop_sequences: int = Field(ge=1)
    """Limit of `stop`."""
    max_input_tokens: int = Field(ge=1)
    """So many tokens a prompt may have."""
    max_input_length: int = Field(ge=1)
    """The same, by its older name."""
    max_total_tokens: int = Field(ge=2)
    """So many tokens prompt and text may have."""
    validation_workers: int = Field(ge=1)
    """Processes that read requests."""
    max_client_batch_size: int = Field(ge=1)
    """So many prompts one body may have."""
    router: str
    """Always kvrelay."""
    version: str
    """Of kvrelay."""
    sha: str | None
    """Always null."""
    docker_label: str | None
    """Always null."""


class SpanToken(Described):
    """A token of a text, and where it stands there, in characters."""

    id: int = Field(ge=0)
    """Its id."""
    text: str
    """Its text."""
    start: int = Field(ge=0)
    """Where it begins, in characters."""
    stop: int = Field(ge=0)
    """Where it ends."""


class ChatTokens(Described):
    """Of ``/chat_tokenize``."""

    tokenize_response: list[SpanToken]
    """The tokens."""
    templated_text: str
    """The chat as its template writes it."""


class PromptTokens(Described):
    """Of ``/tokenize``, in vLLM's form."""

    count: int = Field(ge=0)
    """How many tokens there are."""
    max_model_len: int | None
    """So many tokens prompt and answer may have."""
    tokens: list[int]
    """Their ids."""
    token_strs: list[str] | None
    """How the vocabulary writes them, if asked for."""


class Detokenized(Described):
    """Of ``/detokenize``, as vLLM's."""

    prompt: str
    """The text, special tokens included."""


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
        answer["model"] = reduce(or_, whole)
    if events is not None:
        answer["content"] = events_of("each event's data is a token in JSON, or the error that ends the stream")
    model = TgiError if also is None else TgiError | also
    documented: dict[int | str, dict[str, Any]] = {200: answer}
    for status, description in _ERRORS.items():
        documented[status] = {"model": model, "description": description}
    documented["4XX"] = {"model": model, "description": "Another way in which a request can be wrong"}
    return documented


HEALTHY: dict[int | str, dict[str, Any]] = {
    200: {"description": "Tokens can be generated"},
    503: {"model": TgiError, "description": "With the reason"},
}
