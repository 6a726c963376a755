"""Refuses beam searches that a worker cannot compute, or whose result would not fit its message."""

from __future__ import annotations

from kvrelay.common.model_card import ModelCard
from kvrelay.common.sampling import BeamSearch, SampledToken, SamplingParams

MAX_WIDTH = 128

_MAX_VALUES = 2**19  # tokens and log probabilities of one result: 8 MiB of a message, which may have 16
_MAX_LENGTH_PENALTY = 16.0  # of either sign; powers of lengths stay far inside a float's range
_OFF = SamplingParams(max_tokens=1)
_EXCLUDED = (
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "guide",
    "watermark",
    "processors",
)


def invalid_beams(sampling: SamplingParams, num_prompt_tokens: int, num_tokens: int, card: ModelCard) -> str | None:
    """Why the beam search is invalid for a model with this card, naming value and limit; None if it is valid.

    ``num_tokens``: tokens at its start, output of earlier attempts included.
    """
    search = sampling.beam_search
    if search is None:
        return None
    if num_tokens != num_prompt_tokens:
        return f"a beam search starts at the prompt, not behind {num_tokens - num_prompt_tokens} tokens"
    return (
        _out_of_range(search)
        or _contradiction(sampling)
        or _too_long_answer(sampling, search, _max_output(sampling, num_prompt_tokens, card))
    )


def _out_of_range(search: BeamSearch) -> str | None:
    if not 1 <= search.width <= MAX_WIDTH:
        return f"beam_search.width is {search.width}; it must be 1 to {MAX_WIDTH}"
    if not 1 <= search.num_return <= search.width:
        return f"beam_search.num_return is {search.num_return}; it must be 1 to the width, {search.width}"
    limit = _MAX_LENGTH_PENALTY
    if not abs(search.length_penalty) <= limit:  # written so that NaN fails, too
        return f"beam_search.length_penalty is {search.length_penalty}; it must be {-limit:g} to {limit:g}"
    return None


def _contradiction(sampling: SamplingParams) -> str | None:
    if sampling.temperature not in (0.0, 1.0):
        return f"beam_search goes without temperature, which is {sampling.temperature}; leave one of them out"
    both = next((name for name in _EXCLUDED if getattr(sampling, name) != getattr(_OFF, name)), None)
    return None if both is None else f"beam_search goes without {both}; leave one of them out"


def _too_long_answer(sampling: SamplingParams, search: BeamSearch, max_output: int) -> str | None:
    per_token = 1 if sampling.num_logprobs is None else 2 + sampling.num_logprobs
    num_values = search.num_return * max_output * per_token
    if num_values <= _MAX_VALUES:
        return None
    return (
        f"{search.num_return} beams of up to {max_output} tokens are {num_values} tokens and log probabilities; at most "
        f"{_MAX_VALUES} travel in one answer: lower max_tokens, beam_search.num_return or num_logprobs"
    )


def unfit_beams(sampling: SamplingParams, num_prompt_tokens: int, card: ModelCard, max_running: int) -> str | None:
    """Why a decode worker that runs ``max_running`` sequences could not compute a valid beam search even alone; None if it could.

    At worst the beams share only the prompt's full blocks. A search that needs more blocks than exist would be preempted forever.
    """
    search = sampling.beam_search
    if search is None:
        return None
    if search.width > max_running:
        return (
            f"beam_search.width is {search.width}; this worker runs {max_running} sequences at a time (--max-num-seqs)"
        )
    max_output = _max_output(sampling, num_prompt_tokens, card)
    num_shared, num_left = divmod(num_prompt_tokens, card.layout.block_size)
    num_blocks = num_shared + search.width * -(-(num_left + max_output) // card.layout.block_size)
    if num_blocks > card.num_blocks:
        return (
            f"{search.width} beams of up to {max_output} tokens need {num_blocks} KV blocks; this worker has {card.num_blocks}: "
            "lower max_tokens or beam_search.width"
        )
    return None


def invalid_first_token(token: SampledToken, sampling: SamplingParams, vocab_size: int) -> str | None:
    """Why a sequence cannot continue from the token that a prefill worker reports; None if it can."""
    for token_id in (token.token_id, *(candidate for candidate, _ in token.top_logprobs)):
        if not 0 <= token_id < vocab_size:
            return f"the first token is {token_id}; it must be 0 to {vocab_size - 1}"
    num_needed = 0 if sampling.beam_search is None else min(sampling.num_top_logprobs or 0, vocab_size)
    if len(token.top_logprobs) < num_needed:
        return f"{len(token.top_logprobs)} candidates came for the first token; a beam search needs {num_needed} here"
    return None


def _max_output(sampling: SamplingParams, num_prompt_tokens: int, card: ModelCard) -> int:
    return max(1, min(sampling.max_tokens, card.max_model_len - num_prompt_tokens))
