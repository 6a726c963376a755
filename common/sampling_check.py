"""Sampling parameters that would break a step, and with it all that are in the batch.

No gateway sends them, since it checks its clients' values; a worker looks all the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.common.model_card import ModelCard
from kvrelay.common.sampling import Guide, SamplingParams

MAX_ALLOWED_TOKENS = 4096  # of one sequence; every step that samples it writes each of them down
MAX_GUIDE_BYTES = 2**16  # what a compiler reads from a stranger
MAX_PROMPT_LOGPROBS = 2**18  # of one prompt, which travel in one message: 4 MiB of the 16 that one may have

_MAX_COUNT = 2**31
_MAX_WEIGHT = 1e6  # of any float of sampling; the API's own bounds are far below
_COUNTS = ("max_tokens", "top_k", "num_logprobs", "num_prompt_logprobs", "min_tokens", "choice")
_WEIGHTS = (
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def invalid_sampling(sampling: SamplingParams, num_prompt_tokens: int, card: ModelCard) -> str | None:
    """Why no worker with this card can sample so, naming value and limit; None if it can."""
    for name in _COUNTS:
        count = getattr(sampling, name)
        if count is not None and not 0 <= count < _MAX_COUNT:
            return f"{name} is {count}; it must be 0 to {_MAX_COUNT - 1}"
    for name in _WEIGHTS:
        if (problem := _unlike_a_weight(name, getattr(sampling, name))) is not None:
            return problem
    if sampling.repetition_penalty <= 0:
        return f"repetition_penalty is {sampling.repetition_penalty}; it must be above 0"
    return (
        _invalid_tokens(sampling, card.vocab_size)
        or _invalid_watermark(sampling)
        or invalid_guide(sampling.guide)
        or _invalid_processors(sampling, card)
        or _too_many_logprobs(sampling, num_prompt_tokens)
    )


def _unlike_a_weight(name: str, value: float) -> str | None:
    if abs(value) <= _MAX_WEIGHT:  # not a number: neither
        return None
    return f"{name} is {value}; it must be {-_MAX_WEIGHT:g} to {_MAX_WEIGHT:g}"


def _invalid_tokens(sampling: SamplingParams, vocab_size: int) -> str | None:
    def outside(name: str, token_ids: Iterable[int]) -> str | None:
        wrong = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
        return None if wrong is None else f"{name} has token {wrong}; a token id must be 0 to {vocab_size - 1}"

    if (num_allowed := len(sampling.allowed_token_ids)) > MAX_ALLOWED_TOKENS:
        return f"allowed_token_ids has {num_allowed} tokens; it must have at most {MAX_ALLOWED_TOKENS}"
    for _, value in sampling.logit_bias:
        if (problem := _unlike_a_weight("logit_bias", value)) is not None:
            return problem
    for word in sampling.bad_words:
        if not word:
            return "bad_words has an empty one; each must have a token"
        if (problem := outside("bad_words", word)) is not None:
            return problem
    return outside("logit_bias", (token_id for token_id, _ in sampling.logit_bias)) or outside(
        "allowed_token_ids", sampling.allowed_token_ids
    )


def invalid_guide(guide: Guide | None) -> str | None:
    """Why no worker takes the guide, as far as that shows without compiling it; None if nothing does."""
    size = 0 if guide is None else len(guide.text.encode(errors="surrogatepass"))
    if size > MAX_GUIDE_BYTES:
        return f"the guide has {size} bytes; it must have at most {MAX_GUIDE_BYTES}"
    return None


def _invalid_watermark(sampling: SamplingParams) -> str | None:
    if sampling.watermark is None:
        return None
    if not 0 < sampling.watermark.gamma < 1:
        return f"watermark.gamma is {sampling.watermark.gamma}; it must lie between 0 and 1"
    return _unlike_a_weight("watermark.delta", sampling.watermark.delta)


def _invalid_processors(sampling: SamplingParams, card: ModelCard) -> str | None:
    for name in sampling.processors:
        if name not in card.processors:
            known = ", ".join(card.processors) or "none"
            return f"processors has {name!r}, which this worker was not started with; it has: {known}"
    if len(set(sampling.processors)) < len(sampling.processors):
        return f"processors is {', '.join(sampling.processors)}; each may be there once"
    return None


def _too_many_logprobs(sampling: SamplingParams, num_prompt_tokens: int) -> str | None:
    if sampling.num_prompt_logprobs is None:
        return None
    num_wanted = (sampling.num_prompt_logprobs + 1) * num_prompt_tokens
    if num_wanted <= MAX_PROMPT_LOGPROBS:
        return None
    return (
        f"num_prompt_logprobs is {sampling.num_prompt_logprobs} for {num_prompt_tokens} tokens of prompt: {num_wanted} log "
        f"probabilities; at most {MAX_PROMPT_LOGPROBS} travel in one answer"
    )
