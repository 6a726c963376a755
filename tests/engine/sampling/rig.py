"""The sampler without a model: plain torch operations, and references in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.engine.sampling.bitmask import apply_bitmask
from kvrelay.engine.sampling.draw import draw_tokens
from kvrelay.engine.sampling.logits import LogitRules
from kvrelay.engine.sampling.penalties import Penalties, penalize
from kvrelay.engine.sampling.processors import LogitsProcessor
from kvrelay.engine.sampling.rows import Asking, SamplingRows
from kvrelay.engine.sampling.sampler import process_logits, sample
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.plan import Rules
from kvrelay.engine.step.planner import Planner
from kvrelay.engine.step.rules import Asked, make_rules
from kvrelay.engine.step.sequence import Sequence
from kvrelay.engine.step.slots import Slots

FILTERS: list[dict[str, float]] = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10_000},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_p": 0.0},
    {"min_p": 0.2},
    {"top_k": 20, "top_p": 0.6},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.1},
    {"min_p": 1.0},
    {"typical_p": 0.2},
    {"typical_p": 0.9},
    {"typical_p": 0.0},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.7},
]


class PlainOps:
    """Implements SamplerOps in plain torch."""

    def upload(self, arrays: Seq[npt.NDArray[Any]]) -> list[torch.Tensor]:
        return [torch.from_numpy(array) for array in arrays]

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(dim=-1)

    def mask_tokens(self, logits: torch.Tensor, rows: Seq[int], bitmask: npt.NDArray[np.int32]) -> None:
        apply_bitmask(logits, rows, bitmask)

    def penalize(self, logits: torch.Tensor, penalties: Penalties, last_tokens: torch.Tensor | None) -> None:
        penalize(logits, penalties, last_tokens)

    def draw_tokens(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        return draw_tokens(logits, rows)


def asked(sequences: list[Sequence], vocab_size: int, num_ahead: Seq[int] | None = None) -> tuple[Asking, Rules | None]:
    """The engine's inputs for these sequences. ``num_ahead``: the tokens in flight of each."""
    ahead = num_ahead or [0] * len(sequences)
    planner, slots = Planner(len(sequences), vocab_size), Slots(len(sequences), 1)
    # These rows do not sample, so that their guides are not asked here.
    joined = planner.plan([StepRow(one, one.num_uncomputed_tokens + 1) for one in sequences])
    slots.apply(joined)
    positions = np.array([len(one.token_ids) + count for one, count in zip(sequences, ahead, strict=True)])
    rules = make_rules(list(map(Asked, sequences, ahead)), vocab_size)
    return Asking.of(slots, np.array([row.slot for row in joined.rows]), positions), rules


def run(
    logits: torch.Tensor, sequences: list[Sequence], processors: Mapping[str, LogitsProcessor] | None = None
) -> list[SampledToken]:
    """Run ``sample`` on a copy of ``logits``."""
    asking, rules = asked(sequences, logits.shape[-1])
    return sample(logits.clone(), asking, rules, PlainOps(), processors or {}).read()


def processed(
    logits: torch.Tensor, sequences: list[Sequence], processors: Mapping[str, LogitsProcessor] | None = None
) -> torch.Tensor:
    """The logits from which the draw is made."""
    logits = logits.clone()
    asking, rules = asked(sequences, logits.shape[-1])
    placed = LogitRules(rules or Rules())
    placed.mask(logits, apply_bitmask)
    process_logits(logits, asking, placed, PlainOps(), processors or {})
    return logits


def kept_tokens(logits: torch.Tensor, params: SamplingParams) -> dict[int, float]:
    """Token -> probability after the filters, step by step: sort, add up, and include ties."""
    scaled = [value / params.temperature for value in logits.double().tolist()]
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    if params.top_k:
        limit = scaled[order[min(params.top_k, len(order)) - 1]]
        order = [token for token in order if scaled[token] >= limit]

    def probabilities(of: list[int]) -> dict[int, float]:
        highest = max(scaled[token] for token in of)
        weights = {token: math.exp(scaled[token] - highest) for token in of}
        return {token: weight / sum(weights.values()) for token, weight in weights.items()}

    def until(order: list[int], key: dict[int, float], mass: float) -> list[int]:
        """The first of ``order`` whose mass reaches ``mass``, and all tokens that equal the last of them by ``key``."""
        total, limit = 0.0, key[order[0]]
        for token, probability in probabilities(order).items():
            if total >= mass:
                break
            total, limit = total + probability, key[token]
        return [token for token in order if key[token] <= limit]

    if params.top_p < 1:
        order = until(order, {token: -scaled[token] for token in order}, params.top_p)
    left = probabilities(order)
    highest = max(left.values())
    order = [token for token in order if left[token] >= params.min_p * highest]
    if params.typical_p < 1:
        left = probabilities(order)
        entropy = -sum(p * math.log(p) for p in left.values())
        distance = {token: abs(-math.log(p) - entropy) for token, p in left.items()}
        order = until(sorted(order, key=lambda token: distance[token]), distance, params.typical_p)
    return probabilities(order)
