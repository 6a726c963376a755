"""The size of a step, and whose turn it is in it, from a budget for the time to first token. Pure functions.

Two rules keep short prompts from waiting for long ones. Both use the budget and the measured cost of steps:

*Size.* A new prompt waits for the running step. So a step takes at most a quarter of the budget. Small steps pay the fixed cost
(launches, reading weights) more often. So a step is never so small that the fixed cost is more than a tenth of it, whatever the
budget. Unmeasured sizes are approached slowly: the first steps are small, and each is at most a few times as large as the largest
measured one. So a slow GPU, which has the same default limit as a fast one, does not compute for seconds before its cost is known.

*Order.* Prompts whose first token would come too late may overtake a longer prompt (:mod:`kvrelay.worker.scheduling.overtaking`).
They overtake only a prompt that has its blocks. Otherwise short prompts would take the blocks that a long one waits for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

from kvrelay.worker.scheduling.overtaking import in_the_way, overtaking
from kvrelay.worker.scheduling.step_cost import StepCost

_STEPS_IN_BUDGET = 4
# Tokens of a step while no cost is known: enough that a GPU computes rather than waits for memory.
_UNKNOWN_TOKENS = 512
_GROWTH = 4  # largest step to try, relative to those measured
_MAX_FIXED_SHARE = 0.1  # largest share of a step's time that may be fixed cost


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in line."""

    num_tokens: int  # tokens left to compute, without those of a waiting prompt that are expected to be cached
    arrival_s: float
    is_started: bool  # whether it has its blocks
    num_together: int = 1  # tokens from its next one on that one step must compute together


@dataclass(frozen=True, slots=True)
class Turn:
    """The prompt at ``index`` of the line has its turn. ``max_tokens``: its bound if it overtakes; None: the rest of the step."""

    index: int
    max_tokens: int | None = None


def step_tokens(
    ttft_budget_s: float, cost: StepCost | None, max_tokens: int, block_size: int, largest_step: int = 0
) -> int:
    """Tokens of the next step: whole blocks, unless ``max_tokens`` is reached. With ``ttft_budget_s`` 0: ``max_tokens``.

    ``largest_step``: the largest that ``cost`` was learned from. Small steps are bound by memory, and predict little about a
    token's cost in a large one. So a step is at most a few times as large. ``cost`` None: no step was measured yet.
    """
    if ttft_budget_s == 0:
        return max_tokens
    max_tokens = min(max_tokens, _UNKNOWN_TOKENS if cost is None else max(_UNKNOWN_TOKENS, _GROWTH * largest_step))
    if cost is None:
        return max_tokens
    within_budget = (ttft_budget_s / _STEPS_IN_BUDGET - cost.fixed_s) / cost.token_s
    worth_its_cost = cost.fixed_s * (1 / _MAX_FIXED_SHARE - 1) / cost.token_s
    num_blocks = max(1, math.ceil(max(within_budget, worth_its_cost) / block_size))
    return min(max_tokens, num_blocks * block_size)


def turns(
    line: Seq[Prompt], num_tokens: int, now_s: float, ttft_budget_s: float, cost: StepCost | None, block_size: int
) -> list[Turn]:
    """The order in which the prompts of ``line`` (the next one first) share a step of ``num_tokens``. Each prompt appears once."""
    in_order = [Turn(index) for index in range(len(line))]
    num_left = [prompt.num_tokens for prompt in line]
    first = in_the_way(num_left, num_tokens)
    if ttft_budget_s == 0 or cost is None or first is None or not line[first].is_started:
        return in_order
    if line[first].num_together > num_tokens // 2:  # it would find no room behind those that overtake
        return in_order
    late = {
        place
        for place, num_ahead in enumerate(accumulate(num_left))
        if now_s - ttft_budget_s + cost.seconds(num_ahead, num_tokens) > line[place].arrival_s
    }
    shares = dict(overtaking(num_left, num_tokens, late, block_size))  # blocks are sent whole
    ahead = [Turn(place, share) for place, share in shares.items()]
    return in_order[:first] + ahead + [turn for turn in in_order[first:] if turn.index not in shares]
