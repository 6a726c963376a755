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


class GuideKind(enum.StrEnum):
    """What a guide's text is."""

    JSON_OBJECT = "json_object"  # any JSON object; no text
    JSON_SCHEMA = "json_schema"  # a JSON Schema, as JSON
    REGEX = "regex"
    GRAMMAR = "grammar"  # EBNF in llama.cpp's notation (GBNF); its first rule is ``root``
    CHOICE = "choice"  # a JSON array of strings, one of which is the whole output
    STRUCTURAL_TAG = "structural_tag"  # xgrammar's structural tag, as JSON


class Guide(msgspec.Struct, frozen=True, kw_only=True):
    """What the output must match. Whether the text is one of its kind is found out by the worker that compiles it."""

    kind: GuideKind
    text: str = ""


class Watermark(msgspec.Struct, frozen=True, kw_only=True):
    """Kirchenbauer et al., "A Watermark for Large Language Models", 2023: each token raises a random part of the next ones."""

    gamma: float = 0.5  # the part of the vocabulary that is raised …
    delta: float = 2.0  # … and by how much


class BeamSearch(msgspec.Struct, frozen=True, kw_only=True):
    """Instead of sampling: the likeliest sequences, as transformers' beam search finds them."""

    width: int
    num_return: int = 1  # of the finished beams, the best first
    length_penalty: float = 1.0  # a beam's score is its log probability / length ** length_penalty
    early_stopping: bool | None = False  # True: at ``width`` finished; False: a heuristic; None: no better can come


class SamplingOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What of the sampling parameters is taken as the client says it.

    ``temperature == 0`` is greedy. ``top_k == 0``, ``top_p == 1``, ``typical_p == 1`` and ``min_p == 0`` switch a filter off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0  # no stop token before so many
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token_id, what is added)
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    num_prompt_logprobs: int | None = None  # as num_logprobs, of the prompt's tokens but the first
    guide: Guide | None = None
    processors: tuple[str, ...] = ()  # names of the operator's logits processors, in the order of their application
    beam_search: BeamSearch | None = None


class SamplingParams(SamplingOptions, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of one sequence, complete and validated.

    First what is set or forbidden (bias, ``allowed_token_ids``, ``bad_words``, stop tokens before ``min_tokens``, the guide),
    then penalties, the watermark, the operator's processors; then filters in the order temperature, top-k, top-p, min-p,
    typical. ``seed`` is never None here: the gateway draws one when the client gave none, so that every attempt at the
    request continues with the same noise.
    """

    max_tokens: int
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()  # end-of-text ids included, unless the client asked to ignore them
    num_logprobs: int | None = None  # None: no logprobs; 0: the sampled token's only; n: and the n likeliest
    choice: int = 0  # which of a request's sequences this is: each has noise of its own
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that never come
    watermark: Watermark | None = None

    @property
    def needs_penalties(self) -> bool:
        """Whether the logits depend on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def after_prefill(self) -> SamplingParams:
        """For a worker that takes the sequence over: the prompt's log probabilities are told, and not to be made again."""
        return self if self.num_prompt_logprobs is None else msgspec.structs.replace(self, num_prompt_logprobs=None)

    @property
    def num_sequences(self) -> int:
        """How many places in a batch they take together."""
        return 1 if self.beam_search is None else self.beam_search.width

    @property
    def num_top_logprobs(self) -> int | None:
        """How many of the likeliest tokens the sampler tells with the sampled one; None: not even that one's log probability.

        A beam search chooses among them. It needs so many of each beam that ``width`` are left if every stop token is one.
        """
        if self.beam_search is None:
            return self.num_logprobs
        return max(self.num_logprobs or 0, self.beam_search.width + len(self.stop_token_ids))


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """One sampled token. Log probabilities are of the raw logits (before temperature, filters and penalties)."""

    token_id: int
    logprob: float | None = None  # None unless num_logprobs is set
    top_logprobs: tuple[tuple[int, float], ...] = ()  # (token_id, logprob), likeliest first
