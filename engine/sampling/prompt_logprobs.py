"""Log probabilities of the prompt's own tokens, computed chunk by chunk with the prompt."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvrelay.common.sampling import SampledToken
from kvrelay.engine.step.batch import Batch
from kvrelay.engine.step.slots import Slots

_MAX_POSITIONS = 128  # positions whose logits are in memory at a time: with a vocabulary of 150,000, 80 MB of fp32


def prompt_logprobs(
    batch: Batch, slots: Slots, hidden: torch.Tensor, logits_of: Callable[[torch.Tensor], torch.Tensor]
) -> dict[int, tuple[SampledToken, ...]]:
    """The log probabilities of prompt tokens that the batch's rows predict, by row, for rows that ask for them.

    ``hidden`` ``[num_tokens, hidden]``: the batch's hidden states. ``logits_of`` makes logits ``[n, vocab]`` from some of them.
    """
    found: dict[int, tuple[SampledToken, ...]] = {}
    for index, row in enumerate(batch.rows):
        if row.prompt_logprobs is None:
            continue
        first, end = row.prompt_logprobs
        sequence = slots.sequences[row.slot]
        # The hidden state of a token predicts the next one.
        first_hidden = int(batch.query_start_loc[index]) - row.start - 1
        entries: list[SampledToken] = []
        for start in range(first, end, _MAX_POSITIONS):
            stop = min(start + _MAX_POSITIONS, end)
            logits = logits_of(hidden[first_hidden + start : first_hidden + stop]).float()
            entries += _entries(logits, sequence.token_ids[start:stop], sequence.sampling.num_prompt_logprobs or 0)
        found[index] = tuple(entries)
    return found


def _entries(logits: torch.Tensor, token_ids: list[int], num_top: int) -> list[SampledToken]:
    # logits: [n, vocab] fp32. Not log_softmax, which would make as much again of what is mostly not looked at.
    totals = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, torch.tensor(token_ids, device=logits.device)[:, None]).sub_(totals)[:, 0].tolist()
    top = logits.topk(min(num_top, logits.shape[-1]), dim=-1)
    values, indices = top.values.sub_(totals).tolist(), top.indices.tolist()
    return [
        SampledToken(token_id, logprob, tuple(zip(ids, logprobs, strict=True)))
        for token_id, logprob, ids, logprobs in zip(token_ids, chosen, indices, values, strict=True)
    ]
