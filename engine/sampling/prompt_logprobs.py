"""Log probabilities of the prompt's own tokens, chunk by chunk as the prompt is computed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvrelay.common.sampling import SampledToken
from kvrelay.engine.step.batch import Batch
from kvrelay.engine.step.interface import StepRow

_MAX_POSITIONS = 128  # whose logits there are at a time: with a vocabulary of 150,000, 80 MB of fp32


def add_prompt_logprobs(batch: Batch, hidden: torch.Tensor, logits_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Append to ``sequence.prompt_logprobs`` what the batch's rows predict of prompts, for sequences that ask for it.

    ``hidden`` ``[num_tokens, hidden]`` are the batch's hidden states; ``logits_of`` makes logits ``[n, vocab]`` of some of
    them. What a sequence has already, from before a preemption, is not computed again.
    """
    for index, row in enumerate(batch.rows):
        num_top = row.sequence.sampling.num_prompt_logprobs
        if num_top is None or not (targets := _targets(row)):
            continue
        # The hidden state of a token predicts the next one.
        first_hidden = int(batch.query_start_loc[index]) - row.sequence.num_computed_tokens - 1
        for start in range(targets.start, targets.stop, _MAX_POSITIONS):
            stop = min(start + _MAX_POSITIONS, targets.stop)
            logits = logits_of(hidden[first_hidden + start : first_hidden + stop]).float()
            token_ids = row.sequence.token_ids[start:stop]
            row.sequence.prompt_logprobs += _entries(logits, token_ids, num_top)


def _targets(row: StepRow) -> range:
    """The positions of the prompt that the row's tokens predict and that have no entry yet."""
    sequence = row.sequence
    next_entry = len(sequence.prompt_logprobs) + 1
    if next_entry >= sequence.num_prompt_tokens:
        return range(0)  # complete
    first = sequence.num_computed_tokens + 1
    assert first <= next_entry, (
        f"{sequence.key}: has log probabilities up to {next_entry - 1}, computes from {first - 1}"
    )
    return range(next_entry, min(first + row.num_tokens, sequence.num_prompt_tokens))


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
