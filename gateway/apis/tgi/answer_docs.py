"""The shapes of the answers and errors of TGI's routes in ``/openapi.json``."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any, Literal

from pydantic import BaseModel, Field

from kvrelay import __version__
from kvrelay.gateway.apis.answer_docs import Documented, errors_as, events_of
from kvrelay.gateway.apis.openai.sampling import MAX_CHOICES, MAX_PROMPTS, MAX_STOPS

FinishReason = Literal["length", "eos_token", "stop_sequence"]


class TgiError(BaseModel):
    """TGI's error object."""

    error: str = Field(min_length=1, description="What is wrong.")
    request_id: str | None = Field(None, description="The request's id, as in the header x-request-id.")
    error_type: Literal[
        "validation",
        "template_error",
        "overloaded",
        "generation",
        "incomplete_generation",
        "unhealthy",
        "timeout",
        "unauthorized",
    ] = Field(description="Its kind.")


class PrefillToken(BaseModel):
    """A token of the prompt; the first one has no log probability."""

    id: int = Field(ge=0, description="Its id.")
    text: str = Field(description="Its text.")
    logprob: float | None = Field(description="Its log probability.")


class Token(PrefillToken):
    """A token that was generated, or could have been. Log probabilities are of the raw logits."""

    special: bool = Field(description="Whether it is a special token.")


class Sequence(BaseModel):
    """How one text came to be."""

    finish_reason: FinishReason = Field(description="Why it ended.")
    generated_tokens: int = Field(ge=0, description="How many tokens it has.")
    seed: int | None = Field(description="What it was sampled with; null if the likeliest were taken.")
    prefill: list[PrefillToken] = Field(description="The prompt's tokens, if asked for.")
    tokens: list[Token] = Field(description="The text's tokens.")
    top_tokens: list[list[Token]] | None = Field(None, description="The likeliest at each place, if asked for.")


class BestOfSequence(Sequence):
    """One of those that were not the best."""

    generated_text: str = Field(description="The text.")


class Details(Sequence):
    """Of the best text."""

    best_of_sequences: list[BestOfSequence] | None = Field(None, description="The others of `best_of`.")


class GenerateAnswer(BaseModel):
    """Of ``/generate``."""

    generated_text: str = Field(description="The text.")
    details: Details | None = Field(None, description="How it came to be, if asked for.")


class StreamDetails(BaseModel):
    """With the last token."""

    finish_reason: FinishReason = Field(description="Why the text ended.")
    generated_tokens: int = Field(ge=1, description="How many tokens it has.")
    seed: int | None = Field(description="What it was sampled with; null if the likeliest were taken.")
    input_length: int = Field(ge=1, description="How many tokens the prompt has.")


class StreamEvent(BaseModel):
    """One token; the last one brings the whole text."""

    index: int = Field(ge=1, description="The token's number, from 1.")
    token: Token = Field(description="The token.")
    top_tokens: list[Token] | None = Field(None, description="The likeliest at its place, if asked for.")
    generated_text: str | None = Field(description="The whole text, with the last token.")
    details: StreamDetails | None = Field(description="How it came to be, with the last token, if asked for.")


class Info(BaseModel):
    """Of ``/info``."""

    model_id: str = Field(description="The served model.")
    model_sha: str | None = Field(description="Digest of its weights.")
    model_dtype: str = Field(description="Number format of its KV.")
    model_device_type: str = Field(description="What it is computed on.")
    model_pipeline_tag: str = Field(default="text-generation", description="Always text-generation.")
    max_concurrent_requests: int = Field(ge=1, description="So many requests may wait here.")
    max_best_of: int = Field(default=MAX_CHOICES, ge=1, description="Limit of `best_of`.")
    max_stop_sequences: int = Field(default=MAX_STOPS, ge=1, description="Limit of `stop`.")
    max_input_tokens: int = Field(ge=1, description="So many tokens a prompt may have.")
    max_input_length: int = Field(ge=1, description="The same, by its name before TGI 2.3.")
    max_total_tokens: int = Field(ge=2, description="So many tokens prompt and text may have.")
    validation_workers: int = Field(default=1, ge=1, description="Processes that read requests.")
    max_client_batch_size: int = Field(
        default=MAX_PROMPTS, ge=1, description="So many prompts one body of /v1/completions may have."
    )
    router: str = Field(default="kvrelay", description="Always kvrelay.")
    version: str = Field(default=__version__, description="Of kvrelay.")
    sha: str | None = Field(default=None, description="Always null.")
    docker_label: str | None = Field(default=None, description="Always null.")


_ERRORS: dict[int | str, str] = {
    401: "No API key, or one that is not known",
    413: "The body exceeds the limit",
    422: "A field is wrong: names it, its value and the limit",
    424: "The request failed during generation",
    429: "The model is overloaded, or this API key asks for more than it may",
    500: "Incomplete generation",
    503: "Nobody can serve the request now",
    504: "The request's time ran out",
    "4XX": "Another way in which a request can be wrong",
}


def tgi_answers(*whole: Any, events: Any = None, also: Any = None) -> Documented:
    """A route's responses: one of ``whole`` as JSON, or ``events``, or an error.

    ``also``: a further shape of errors, such as OpenAI's.
    """
    answer: dict[str, Any] = {"description": "The answer"}
    if whole:
        answer["model"] = reduce(or_, whole)
    if events is not None:
        answer["content"] = events_of("each event's data is a token in JSON, or the error that ends the stream")
    return {200: answer, **errors_as(TgiError if also is None else TgiError | also, _ERRORS)}


HEALTHY: Documented = {200: {"description": "Tokens can be generated"}, **errors_as(TgiError, {503: "With the reason"})}
