"""How large a step is, and who computes in it: chunk sizes from a budget for the time to first token. Pure functions.

Two things keep short prompts from waiting for long ones, both from the budget and from what steps were measured to cost:

*Size.* A prompt that comes waits for the step under way before anything can be done for it. So a step takes a quarter of the
budget at most. Small steps pay the fixed cost (launches, weights read once) more often; so they are never so small that it
is more than a tenth of a step, whatever the budget says. What is not known is approached: the first steps are small, and none is
more than a few times as large as the largest that was measured. So a slow GPU, whose steps may be as large as a fast one's by
default, does not compute for seconds before it knows better.

*Order.* Prompts that would have their first token too late may overtake a longer one
(:mod:`kvrelay.worker.scheduling.overtaking`). Only a prompt that has its blocks is overtaken. Else short
prompts would take the room that a long one waits for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

from kvrelay.worker.scheduling.overtaking import in_the_way, overtaking
from kvrelay.worker.scheduling.step_cost import StepCost

_STEPS_IN_BUDGET = 4
_UNKNOWN_TOKENS = 512  # of a step while nothing is known: enough that a GPU computes rather than waits for memory
_GROWTH = 4  # from what was measured to what is tried
_MAX_FIXED_SHARE = 0.1  # of a step's time


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in line."""

    num_tokens: int  # to be computed; what of a waiting prompt is expected to be cached does not count
    arrival_s: float
    is_started: bool  # it has its blocks


@dataclass(frozen=True, slots=True)
class Turn:
    """Who is next in a step: the prompt at ``index`` of the line, with ``max_tokens`` if it overtakes, else with what is left."""

    index: int
    max_tokens: int | None = None


def step_tokens(
    ttft_budget_s: float, cost: StepCost | None, max_tokens: int, block_size: int, largest_step: int = 0
) -> int:
    """Tokens of the next step, whole blocks unless the bound that is met is not. No budget (0): ``max_tokens``.

    ``largest_step``: of those that ``cost`` was learned from. Small steps are bound by memory and tell little of what a token costs
    in a large one, so a step is at most a few times as large. No cost yet (None) is as if there had been none.
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
    """In which order the prompts of ``line``, the next one first, share a step of ``num_tokens``. Each comes once."""
    in_order = [Turn(index) for index in range(len(line))]
    num_left = [prompt.num_tokens for prompt in line]
    first = in_the_way(num_left, num_tokens)
    if ttft_budget_s == 0 or cost is None or first is None or not line[first].is_started:
        return in_order
    late = {
        place
        for place, num_ahead in enumerate(accumulate(num_left))
        if now_s - ttft_budget_s + cost.seconds(num_ahead, num_tokens) > line[place].arrival_s
    }
    shares = dict(overtaking(num_left, num_tokens, late, block_size))  # blocks are shipped whole
    ahead = [Turn(place, share) for place, share in shares.items()]
    return in_order[:first] + ahead + [turn for turn in in_order[first:] if turn.index not in shares]
