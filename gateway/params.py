"""From a validated body to sampling parameters: defaults, the model's limits, and a seed for every request."""

from __future__ import annotations

import secrets

from kvrelay.common.model_card import ModelCard
from kvrelay.common.sampling import SamplingParams
from kvrelay.gateway.errors import ContextLengthError, InvalidRequestError
from kvrelay.gateway.openai_schema import SamplingBody


def sampling_params(
    body: SamplingBody,
    *,
    max_tokens: int | None,
    num_logprobs: int | None,
    num_prompt_tokens: int,
    limit_tokens: int,
    eos_ids: tuple[int, ...],
    prompt_param: str,
) -> SamplingParams:
    """The parameters of one choice; ``max_tokens`` None means as much as fits. ``prompt_param``: where its prompt came from.

    Raises ContextLengthError naming tokens and limit if prompt and output cannot fit ``limit_tokens``.
    """
    room = limit_tokens - num_prompt_tokens
    if room < 1:
        raise ContextLengthError(
            f"the prompt has {num_prompt_tokens} tokens; at most {limit_tokens - 1} leave room for an answer within "
            f"this deployment's {limit_tokens} tokens of prompt and output: shorten the prompt",
            param=prompt_param,
        )
    if max_tokens is not None and max_tokens > room:
        raise ContextLengthError(
            f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}: together more than this "
            f"deployment's {limit_tokens} tokens; lower max_tokens to {room}, or shorten the prompt",
            param="max_tokens",
        )
    top_k = body.top_k if body.top_k is not None and body.top_k > 0 else 0
    temperature = 1.0 if body.temperature is None else body.temperature
    drawn = secrets.randbits(63) if temperature and body.seed is None else 0  # greedy sampling draws nothing
    seed = drawn if body.seed is None else body.seed % 2**64
    return SamplingParams(
        max_tokens=room if max_tokens is None else max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=0.0 if body.min_p is None else body.min_p,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=0.0 if body.presence_penalty is None else body.presence_penalty,
        frequency_penalty=0.0 if body.frequency_penalty is None else body.frequency_penalty,
        seed=seed,
        stop_token_ids=() if body.ignore_eos else eos_ids,
        num_logprobs=num_logprobs,
    )


def limit_tokens(cards: list[ModelCard]) -> int:
    """What every worker that is up can hold of one request."""
    return min(card.max_model_len for card in cards)


def check_token_ids(token_ids: list[int], vocab_size: int) -> None:
    """Raises InvalidRequestError on an id that the model does not have."""
    largest = max(token_ids)
    if largest >= vocab_size:
        raise InvalidRequestError(
            f"prompt holds token id {largest}; this model's ids are 0 to {vocab_size - 1}", param="prompt"
        )
