"""The outputs of an executor, with the names of vLLM's and TensorRT-LLM's outputs. Immutable plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's probability in the model's own distribution (before temperature, filters and penalties)."""

    logprob: float
    rank: int | None = None  # from 1, among the likeliest that were asked for; None: not among them


TokenLogprobs = dict[int, Logprob]
"""One position by token id: the sampled token first, then the likeliest ones."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of a request's outputs so far. Fields that end in ``_diff`` have what is new since the iterator's last output."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None  # sum over all tokens; None unless log probabilities were asked for
    logprobs: list[TokenLogprobs] | None  # by token
    finish_reason: str | None  # "stop", "length", "cancelled"; None: more is to come
    stop_reason: str | int | None  # the stop string or stop token that ended it; None for the model's own end token
    text_diff: str
    token_ids_diff: list[int]
    logprobs_diff: list[TokenLogprobs] | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The state of a request."""

    request_id: str
    prompt: str | None  # None if token ids or a chat were given
    prompt_token_ids: list[int]  # empty until the first tokens arrive
    prompt_logprobs: list[TokenLogprobs | None] | None  # the first entry is None: the first token has no probability
    outputs: list[CompletionOutput]  # ``n`` of them
    finished: bool  # the request is over
    num_cached_tokens: int  # prompt tokens that came from the cache


@dataclass(frozen=True, slots=True)
class Piece:
    """New text and tokens of one output. ``logprobs``: by token; None if not asked for."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
