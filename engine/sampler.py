"""From logits to tokens: penalties, temperature, top-k, top-p, min-p, seeded noise, log probabilities.

Rows pay for what they ask for: a greedy row is one argmax, and penalties and filters touch only the rows that have them. A
random row draws one uniform number (:mod:`kvrelay.engine.noise`) and takes the token where the cumulative probability of what the
filters left, in vocabulary order, passes it. So a token depends on logits, seed and position, never on the batch.

Filters (as Hugging Face's, for ties inclusive): top-k keeps every logit not below the k-th largest; top-p keeps the smallest set of
likeliest tokens whose mass reaches p; min-p keeps tokens of at least ``min_p`` times the likeliest one's probability.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

import numpy as np
import torch

from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.engine.noise import uniforms
from kvrelay.engine.sequence import Sequence


def sample(logits: torch.Tensor, sequences: Seq[Sequence]) -> list[SampledToken]:
    """One token per row of ``logits`` ``[num_rows, vocab]`` fp32, which is changed in place. Any device."""
    params = [sequence.sampling for sequence in sequences]
    wants_logprobs = [index for index, row in enumerate(params) if row.num_logprobs is not None]
    raw = torch.log_softmax(logits[wants_logprobs], dim=-1) if wants_logprobs else None
    _penalize(logits, sequences)
    tokens = logits.argmax(dim=-1)
    random_rows = [index for index, row in enumerate(params) if row.temperature > 0]
    if random_rows:
        tokens[random_rows] = _draw(logits[random_rows], [sequences[index] for index in random_rows])
    token_ids: list[int] = tokens.tolist()
    sampled = [SampledToken(token_id) for token_id in token_ids]
    if raw is not None:
        for place, index in enumerate(wants_logprobs):
            sampled[index] = _with_logprobs(raw[place], token_ids[index], params[index].num_logprobs or 0)
    return sampled


def _with_logprobs(logprobs: torch.Tensor, token_id: int, num_logprobs: int) -> SampledToken:
    values, indices = logprobs.topk(min(num_logprobs, logprobs.shape[-1])) if num_logprobs else (None, None)
    top: tuple[tuple[int, float], ...] = ()
    if values is not None and indices is not None:
        top = tuple(zip(indices.tolist(), values.tolist(), strict=True))
    return SampledToken(token_id, float(logprobs[token_id]), top)


def _penalize(logits: torch.Tensor, sequences: Seq[Sequence]) -> None:
    """Penalties as sparse entries: one (row, token) for each distinct token of a sequence that asks for any."""
    rows: list[int] = []
    tokens: list[int] = []
    counts: list[int] = []
    concerned: list[int] = []
    for row, sequence in enumerate(sequences):
        if not sequence.sampling.needs_penalties:
            continue
        concerned.append(row)
        output_counts = Counter(sequence.token_ids[sequence.num_prompt_tokens :])
        distinct = set(sequence.token_ids)
        rows += [row] * len(distinct)
        tokens += distinct
        counts += [output_counts[token] for token in distinct]
    if not rows:
        return
    device = logits.device
    index = torch.tensor([rows, tokens], device=device)
    count = torch.tensor(counts, dtype=torch.float32, device=device)

    def per_entry(name: str) -> torch.Tensor:
        by_row = {row: getattr(sequences[row].sampling, name) for row in concerned}
        return torch.tensor([by_row[row] for row in rows], dtype=torch.float32, device=device)

    values = logits[index[0], index[1]]
    repetition = per_entry("repetition_penalty")
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= per_entry("frequency_penalty") * count + per_entry("presence_penalty") * (count > 0)
    logits[index[0], index[1]] = values


def _draw(logits: torch.Tensor, sequences: Seq[Sequence]) -> torch.Tensor:
    # logits: [n, vocab] fp32, one row per sequence with a temperature
    params = [sequence.sampling for sequence in sequences]
    device = logits.device
    temperature = torch.tensor([row.temperature for row in params], device=device)
    logits = logits / temperature[:, None]
    filtered = [index for index, row in enumerate(params) if _has_filter(row)]
    if filtered:
        logits[filtered] = _filter(logits[filtered], [params[index] for index in filtered])
    seeds = np.array([row.seed for row in params], dtype=np.uint64)
    positions = np.array([sequence.num_tokens for sequence in sequences], dtype=np.uint64)
    draws = torch.from_numpy(uniforms(seeds, positions)).to(device)
    # In fp64: with a vocabulary of 100,000 an fp32 sum would move token boundaries by more than rare tokens are wide.
    cumulative = torch.softmax(logits.double(), dim=-1).cumsum(dim=-1)
    chosen = torch.searchsorted(cumulative, (draws * cumulative[:, -1])[:, None], right=True)[:, 0]
    # A draw that rounding puts behind the total takes the last token that has any probability.
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())[:, 0]
    return torch.minimum(chosen, last)


def _has_filter(row: SamplingParams) -> bool:
    return row.top_k > 0 or row.top_p < 1.0 or row.min_p > 0.0


def _filter(logits: torch.Tensor, params: Seq[SamplingParams]) -> torch.Tensor:
    """Logits with -inf for what the filters take away; ``[n, vocab]``."""
    device, vocab = logits.device, logits.shape[-1]
    top_k = torch.tensor([min(row.top_k, vocab) or vocab for row in params], device=device)
    top_p = torch.tensor([row.top_p for row in params], dtype=torch.float64, device=device)
    min_p = torch.tensor([row.min_p for row in params], device=device)
    ordered = logits.sort(dim=-1, descending=True).values
    threshold = ordered.gather(1, (top_k - 1)[:, None])
    # Softmax of what top-k left, in order; a token stays if the mass before it has not reached p.
    kept = ordered.masked_fill(ordered < threshold, -torch.inf)
    probabilities = torch.softmax(kept.double(), dim=-1)
    mass_before = probabilities.cumsum(dim=-1) - probabilities
    num_kept = (mass_before < top_p[:, None]).sum(dim=-1).clamp(min=1)
    by_mass = ordered.gather(1, (num_kept - 1)[:, None])
    threshold = torch.maximum(threshold, torch.where(top_p[:, None] < 1.0, by_mass, -torch.inf))
    by_peak = ordered[:, :1] + min_p.log()[:, None]  # log 0 = -inf keeps everything
    threshold = torch.maximum(threshold, by_peak)
    return logits.masked_fill(logits < threshold, -torch.inf)
