"""Turns a client's wishes into sampling parameters: applies the model's limits, refuses contradictions, draws a seed."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec

from kvrelay.common.model_card import SharedLimits
from kvrelay.common.sampling import SamplingOptions, SamplingParams, Watermark
from kvrelay.common.sampling_check import MAX_PROMPT_LOGPROBS, invalid_guide
from kvrelay.gateway.errors import ContextLengthError, InvalidRequestError, UnusableGuideError
from kvrelay.gateway.relay.request import GenerationSpec
from kvrelay.gateway.text.tokenizer import Tokenizer

_NOT_WITH_BEAMS = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "stops", "logit_bias", "allowed_token_ids", "bad_words", "guide", "has_watermark", "processors", "min_tokens",
    "num_prompt_logprobs", "ignore_eos",
)  # fmt: skip
_DEFAULT_BEAM_TOKENS = 256  # room for so many tokens is reserved for every beam from the start
_PUBLIC_NAMES = {"stops": "stop", "has_watermark": "watermark", "num_prompt_logprobs": "prompt_logprobs"}


def sampling_params(
    spec: GenerationSpec,
    *,
    num_prompt_tokens: int,
    limits: SharedLimits,
    eos_ids: tuple[int, ...],
    bad_words: tuple[tuple[int, ...], ...],
    prompt_param: str,
) -> list[SamplingParams]:
    """The parameters of every choice of one prompt. ``eos_ids``: the model's end tokens. ``bad_words``: as :func:`word_ids` returns
    them.

    ``prompt_param``: the field that the prompt came from. Raises ContextLengthError, with tokens and limit, if prompt and output
    cannot fit. Raises InvalidRequestError if the model cannot do what is asked, or if fields contradict each other.
    """
    _check_together(spec)
    limit, vocab_size = limits.max_model_len, limits.vocab_size
    room = limit - num_prompt_tokens
    if room < 1:
        raise ContextLengthError(
            f"the prompt has {num_prompt_tokens} tokens; at most {limit - 1} leave room for an answer within "
            f"this deployment's {limit} tokens of prompt and output: shorten the prompt",
            param=prompt_param,
        )
    if spec.max_tokens is not None and spec.max_tokens > room and not spec.shortens:
        raise ContextLengthError(
            f"the prompt has {num_prompt_tokens} tokens and {spec.max_tokens_param} is {spec.max_tokens}: together more than this "
            f"deployment's {limit} tokens; lower {spec.max_tokens_param} to {room}, or shorten the prompt",
            param=spec.max_tokens_param,
        )
    most = room if spec.beam_search is None else min(room, _DEFAULT_BEAM_TOKENS)
    max_tokens = most if spec.max_tokens is None else min(room, max(1, spec.max_tokens))
    if spec.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens is {spec.min_tokens}, more than the {max_tokens} tokens that may come", param="min_tokens"
        )
    check_token_ids([token_id for token_id, _ in spec.logit_bias], vocab_size, "logit_bias")
    check_token_ids(spec.allowed_token_ids, vocab_size, "allowed_token_ids")
    check_token_ids(spec.stop_token_ids, vocab_size, "stop_token_ids")
    _check_workers_limits(spec, num_prompt_tokens, limits)
    drawn = secrets.randbits(63) if spec.temperature and spec.seed is None else 0  # greedy sampling draws nothing
    needs_logprobs = spec.best_of > spec.num_choices
    options = {name: getattr(spec, name) for name in SamplingOptions.__struct_fields__}
    if spec.beam_search is not None:
        options["temperature"] = 0.0
    first = SamplingParams(
        **options,
        max_tokens=max_tokens,
        seed=drawn if spec.seed is None else spec.seed % 2**64,
        stop_token_ids=tuple(dict.fromkeys((() if spec.ignore_eos else eos_ids) + spec.stop_token_ids)),
        num_logprobs=0 if needs_logprobs and spec.num_logprobs is None else spec.num_logprobs,
        bad_words=bad_words,
        watermark=Watermark() if spec.has_watermark else None,
    )
    # Only the first choice computes the whole prompt, so only it has the prompt's log probabilities.
    others = [
        msgspec.structs.replace(first, choice=choice, num_prompt_logprobs=None)
        for choice in range(1, spec.num_sequences)
    ]
    return [first, *others]


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises InvalidRequestError if the model does not have one of the ids."""
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise InvalidRequestError(
            f"{param} holds token id {largest}; this model's ids are 0 to {vocab_size - 1}", param=param
        )


def _check_together(spec: GenerationSpec) -> None:
    if spec.beam_search is not None:
        plain = GenerationSpec()
        for name in _NOT_WITH_BEAMS:
            value, default = getattr(spec, name), getattr(plain, name)
            if value != default and not (name == "temperature" and value == 0):
                public = _PUBLIC_NAMES.get(name, name)
                raise InvalidRequestError(f"{public} and beam search are given together; leave one out", param=public)
    if spec.best_of < spec.num_choices:
        raise InvalidRequestError(
            f"best_of is {spec.best_of}, less than n, which is {spec.num_choices}", param="best_of"
        )
    if spec.max_tokens == 0 and (spec.guide is not None or spec.beam_search is not None or spec.best_of > 1):
        raise InvalidRequestError(
            f"{spec.max_tokens_param} is 0; without any output there is nothing to choose from",
            param=spec.max_tokens_param,
        )


def _check_workers_limits(spec: GenerationSpec, num_prompt_tokens: int, limits: SharedLimits) -> None:
    """Refuse what a worker would refuse, before it costs anything, naming the client's field."""
    for name in spec.processors:
        if name not in limits.processors:
            known = ", ".join(sorted(limits.processors)) or "there are none"
            raise InvalidRequestError(
                f"logits_processors holds {name!r}; this deployment's processors: {known}", param="logits_processors"
            )
    if (problem := invalid_guide(spec.guide)) is not None:
        raise UnusableGuideError(spec.guide_param, problem)
    if spec.num_prompt_logprobs is None:
        return
    num_entries = (spec.num_prompt_logprobs + 1) * num_prompt_tokens
    if num_entries > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"prompt_logprobs of {num_prompt_tokens} tokens with {spec.num_prompt_logprobs} others each are {num_entries} "
            f"log probabilities; at most {MAX_PROMPT_LOGPROBS} are told: ask for fewer, or shorten the prompt",
            param="prompt_logprobs",
        )


def word_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The token sequences that spell ``words``, at the beginning of a text and after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for spelled in (word, f" {word.lstrip(' ')}"):
            if ids := tuple(tokenizer.encode(spelled, add_special_tokens=False)):
                found[ids] = None
    return tuple(found)
