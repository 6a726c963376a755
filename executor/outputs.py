"""What comes out of an executor. Names are those of vLLM's and TensorRT-LLM's outputs. Plain values; nothing here changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely a token was, by the model's own distribution (before temperature, filters and penalties)."""

    logprob: float
    rank: int | None = None  # from 1, among the likeliest that were asked for; None: it is not one of them


TokenLogprobs = dict[int, Logprob]
"""Of one position: the token that came, and behind it the likeliest ones, by token id."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of a request's outputs, as far as it has come. What ends in ``_diff`` is new since the iterator's last output."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None  # of all tokens; None unless log probabilities were asked for
    logprobs: list[TokenLogprobs] | None  # by token
    finish_reason: str | None  # "stop", "length", "cancelled"; None: more is to come
    stop_reason: str | int | None  # the stop string or stop token that ended it; None for the model's own end
    text_diff: str
    token_ids_diff: list[int]
    logprobs_diff: list[TokenLogprobs] | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What has become of a request."""

    request_id: str
    prompt: str | None  # None if token ids or a chat were given
    prompt_token_ids: list[int]  # empty until the first tokens come
    prompt_logprobs: list[TokenLogprobs | None] | None  # None in front: the first token has no probability
    outputs: list[CompletionOutput]  # ``n`` of them
    finished: bool  # nothing more comes
    num_cached_tokens: int  # of the prompt, that need not be computed


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of one output. ``logprobs``: None if nobody asked for them, else by token."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
