"""The draw on the CPU: one uniform number selects the token where the cumulative probability of the kept tokens exceeds it."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from kvrelay.engine.sampling.filters import drop_atypical, least_kept
from kvrelay.engine.sampling.rows import SamplingRows

_CDF_BLOCK = 128  # tokens per block of the two-level cumulative distribution


def draw_tokens(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Token ids ``[num_rows]`` from ``logits`` ``[num_rows, vocab]`` fp32 on the CPU. Greedy if the temperature is 0."""
    is_random = rows.temperature > 0
    random_rows = torch.from_numpy(np.flatnonzero(is_random))
    tokens = torch.empty(len(logits), dtype=torch.int64)
    if not is_random.all():
        greedy_rows = torch.from_numpy(np.flatnonzero(~is_random))
        tokens[greedy_rows] = logits[greedy_rows].argmax(dim=-1)
    if is_random.any():
        scaled = logits[random_rows].div_(torch.from_numpy(rows.temperature[is_random])[:, None])
        least = least_kept(scaled, rows.top_k[is_random], rows.top_p[is_random], rows.min_p[is_random])
        typical_p = rows.typical_p[is_random]
        if (typical_p < 1).any():
            picked = np.flatnonzero(typical_p < 1)
            index = torch.from_numpy(picked)
            scaled[index] = drop_atypical(scaled[index], None if least is None else least[index], typical_p[picked])
        tokens[random_rows] = _invert_cdf(scaled, least, torch.from_numpy(rows.uniforms[is_random]))
    return tokens


def _invert_cdf(logits: torch.Tensor, least: torch.Tensor | None, draws: torch.Tensor) -> torch.Tensor:
    """The first token ``[n]``, in vocabulary order, whose cumulative probability exceeds the draw ``[n]`` fp64.

    Logits below ``least`` have no probability. Sums are fp64: with a vocabulary of 100,000, fp32 would move boundaries by more than
    a rare token's probability. There are two levels, blocks and the tokens of one block, because an fp64 scan of everything costs
    more than the softmax. A row of NaN yields some token, because a broken row must not end its step.
    """
    vocab_size = logits.shape[-1]
    weights = torch.softmax(logits, dim=-1)
    if least is not None:
        weights.mul_(logits >= least)
    weights = F.pad(weights, (0, -weights.shape[-1] % _CDF_BLOCK)).view(len(weights), -1, _CDF_BLOCK)
    by_block = weights.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target = draws[:, None] * by_block[:, -1:]
    block = _first_above(by_block, target)
    before = torch.where(block > 0, by_block.gather(1, (block - 1).clamp(min=0)), 0.0)
    in_block = weights[torch.arange(len(weights)), block[:, 0]].double().cumsum(dim=-1)
    tokens = block * _CDF_BLOCK + _first_above(in_block, target - before)
    return tokens[:, 0].clamp_(max=vocab_size - 1)


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Index ``[n, 1]`` of the first element above the target. If rounding leaves none: of the last one with any weight."""
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    index = torch.minimum(torch.searchsorted(cumulative, target, right=True), last)
    return index.clamp_(max=cumulative.shape[-1] - 1)
