"""Whether a worker can ever compute a request: the checks that both kinds of worker make before anything else."""

from __future__ import annotations

from kvrelay.common.model_card import ModelCard
from kvrelay.wire.messages import Submit


def invalid_submit(submit: Submit, card: ModelCard) -> str | None:
    """Why the request can never be computed by a worker with this card, naming value and limit; None if it can."""
    num_tokens = len(submit.token_ids)
    if not 0 < submit.num_prompt_tokens <= num_tokens:
        return f"num_prompt_tokens is {submit.num_prompt_tokens}; it must be 1 to {num_tokens}"
    if num_tokens >= card.max_model_len:
        return f"{num_tokens} tokens leave no room to generate: the limit is {card.max_model_len} tokens"
    if not all(0 <= token_id < card.vocab_size for token_id in submit.token_ids):
        return f"a token id lies outside of 0 to {card.vocab_size - 1}"
    return None
