"""How to choose the next token, and what was chosen: the part of a request that travels from HTTP to the sampler.

The structs here are plain msgspec structs, so the wire can carry them and the engine can read them without
translation. They are validated once, by whoever builds them from user input (the gateway); afterwards they are
immutable facts.
"""

from __future__ import annotations

import enum

import msgspec


class FinishReason(enum.StrEnum):
    """Why a sequence ended, in OpenAI's words where OpenAI has one."""

    STOP = "stop"  # a stop token was sampled (the token is part of the output)
    LENGTH = "length"  # max_tokens or the model's length was reached
    CANCELLED = "cancelled"  # the client or the gateway took the request back


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of one sequence, complete and validated.

    ``temperature == 0`` is greedy. ``top_k == 0``, ``top_p == 1`` and ``min_p == 0`` switch a filter off; filters apply
    in the order temperature, top-k, top-p, min-p. ``seed`` is never None here: the gateway draws one when the
    client gave none, so that every attempt at the request continues with the same noise.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()  # end-of-text ids included, unless the client asked to ignore them
    num_logprobs: int | None = None  # None: no logprobs; 0: the sampled token's only; n: and the n likeliest

    @property
    def needs_penalties(self) -> bool:
        """Whether the logits depend on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """One sampled token. Log probabilities are of the raw logits (before temperature, filters and penalties)."""

    token_id: int
    logprob: float | None = None  # None unless num_logprobs is set
    top_logprobs: tuple[tuple[int, float], ...] = ()  # (token_id, logprob), likeliest first
