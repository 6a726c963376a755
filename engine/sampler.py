"""From logits to tokens, step by step; each step is a module of its own.

    set and forbid (logits) → penalties → watermark → processors → temperature, filters → draw

Rows pay for what they ask for: a batch of plain greedy rows is one argmax, and all else touches only the rows that ask for it.
A random row draws one uniform number (:mod:`kvrelay.engine.noise`) and takes the token where the cumulative probability of what the
filters left, in vocabulary order, passes it. So a token depends on logits, parameters, tokens so far, seed and choice, never on the
batch. Log probabilities are those of the raw logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Protocol

import torch

from kvrelay.common.sampling import SampledToken
from kvrelay.engine.logits import LogitRules, has_rules
from kvrelay.engine.penalties import Penalties
from kvrelay.engine.processors import LogitsProcessor, run_processors
from kvrelay.engine.sampling_rows import SamplingRows
from kvrelay.engine.sequence import Sequence
from kvrelay.engine.watermark import add_watermark


class SamplerOps(Protocol):
    """What the sampler needs of a device."""

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """The likeliest tokens ``[n]`` int64 of ``logits`` ``[n, vocab]`` in the model's dtype or fp32."""

    def penalize(self, logits: torch.Tensor, penalties: Penalties) -> None:
        """Apply penalties to ``logits`` ``[n, vocab]`` fp32 in place; only called if there are entries."""

    def draw_tokens(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """Token ids ``[n]`` int64 drawn from ``logits`` ``[n, vocab]`` fp32, which may be changed; greedy at temperature 0."""


def sample(
    logits: torch.Tensor, sequences: Seq[Sequence], ops: SamplerOps, processors: Mapping[str, LogitsProcessor]
) -> list[SampledToken]:
    """One token per row of ``logits`` ``[num_rows, vocab]`` of any dtype, which may be changed in place.

    ``processors`` must have every name that a sequence asks for.
    """
    params = [sequence.sampling for sequence in sequences]
    wants_logprobs = [index for index, row in enumerate(params) if row.num_top_logprobs is not None]
    raw = torch.log_softmax(logits[wants_logprobs].float(), dim=-1) if wants_logprobs else None
    if any(_is_processed(sequence) for sequence in sequences):
        logits = logits.float()
        process_logits(logits, sequences, ops, processors)
    if all(row.temperature == 0 for row in params):
        tokens = ops.argmax(logits)
    else:
        tokens = ops.draw_tokens(logits.float(), SamplingRows.of(sequences))
    token_ids: list[int] = tokens.tolist()
    sampled = [SampledToken(token_id) for token_id in token_ids]
    if raw is not None:
        counts = [params[index].num_top_logprobs or 0 for index in wants_logprobs]
        chosen = [token_ids[index] for index in wants_logprobs]
        for index, token in zip(wants_logprobs, with_logprobs(raw, chosen, counts), strict=True):
            sampled[index] = token
    return sampled


def process_logits(
    logits: torch.Tensor, sequences: Seq[Sequence], ops: SamplerOps, processors: Mapping[str, LogitsProcessor]
) -> None:
    """Everything before temperature and filters, on ``logits`` ``[num_rows, vocab]`` fp32 in place."""
    rules: LogitRules | None = None
    if any(has_rules(sequence) for sequence in sequences):
        rules = LogitRules.of(sequences, logits.shape[-1])
        rules.apply(logits)
    if any(sequence.sampling.needs_penalties for sequence in sequences):
        penalties = Penalties.of(sequences)
        if penalties.entry_rows:
            ops.penalize(logits, penalties)
    add_watermark(logits, sequences)
    if any(sequence.sampling.processors for sequence in sequences):
        run_processors(logits, sequences, processors)
        if rules is not None:
            rules.forbid(logits)


def with_logprobs(raw: torch.Tensor, token_ids: Seq[int], counts: Seq[int]) -> list[SampledToken]:
    """``token_ids`` with their log probabilities and the likeliest ``counts`` of each row of ``raw`` ``[n, vocab]`` fp32."""
    chosen = raw.gather(1, torch.tensor(token_ids, device=raw.device)[:, None])[:, 0].tolist()
    most = min(max(counts), raw.shape[-1])
    top = raw.topk(most, dim=-1)
    values, indices = top.values.tolist(), top.indices.tolist()
    return [
        SampledToken(token_id, logprob, tuple(zip(ids[:count], logprobs[:count], strict=True)))
        for token_id, logprob, count, ids, logprobs in zip(token_ids, chosen, counts, indices, values, strict=True)
    ]


def _is_processed(sequence: Sequence) -> bool:
    params = sequence.sampling
    return params.needs_penalties or params.watermark is not None or bool(params.processors) or has_rules(sequence)
