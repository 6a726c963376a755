"""How large a step is, and who computes in it: chunk sizes from a budget for the time to first token. Pure functions.

Served first come, first served in steps as large as they may be, a prompt of 100 tokens behind one of 32,000 waits for all of
them. Two things are done about that, both from the budget and from what steps were measured to cost:

*Size.* A prompt that comes waits for the step under way before anything can be done for it. So a step takes a quarter of the
budget at most. Small steps pay the fixed cost (launches, weights read once) more often; so they are never so small that it
is more than a tenth of a step, whatever the budget says. What is not known is approached: the first steps are small, and none is
more than a few times as large as the largest that was measured. So a slow GPU, whose steps may be as large as a fast one's by
default, does not compute for seconds before it knows better.

*Order.* The first prompt in line that a step cannot finish gets the rest of the step, and all behind it wait: it is in their way.
Those of them that would have their first token too late, and have at most half as much to compute, may overtake it. They
have half of that rest among themselves, the shortest first: shortest remaining time first (Schrage 1968) makes the mean wait
smallest, but alone it starves the long. Here the other half goes on first come, first served, so nobody waits more than twice as
long as if no one overtook. Prompts that are alike do not overtake each other: it would only make the first ones late, too.

Only a prompt that has its blocks is overtaken. Else short prompts would take the room that a long one waits for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kvrelay.worker.step_cost import StepCost

_STEPS_IN_BUDGET = 4
_UNKNOWN_TOKENS = 512  # of a step while nothing is known: enough that a GPU computes rather than waits for memory
_GROWTH = 4  # from what was measured to what is tried
_MAX_FIXED_SHARE = 0.1  # of a step's time
_MAX_OVERTAKING_SHARE = 2  # one in so many of the tokens that the prompt in the way would get


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
    """In which order the prompts of ``line`` (in order of arrival) share a step of ``num_tokens``. Each comes once."""
    in_order = [Turn(index) for index in range(len(line))]
    if ttft_budget_s == 0 or cost is None:
        return in_order
    position, rest = 0, num_tokens
    while position < len(line) and line[position].num_tokens <= rest:
        rest -= line[position].num_tokens
        position += 1
    if position == len(line) or not line[position].is_started:
        return in_order
    behind = _too_late(line, position, num_tokens, now_s - ttft_budget_s, cost)
    free = rest // _MAX_OVERTAKING_SHARE
    overtaking: list[Turn] = []
    for index in sorted(behind, key=lambda index: line[index].num_tokens):
        share = min(line[index].num_tokens, free)
        if share < line[index].num_tokens:
            share -= share % block_size  # blocks are shipped whole
        if share == 0:
            break
        overtaking.append(Turn(index, share))
        free -= share
    ahead = {turn.index for turn in overtaking}
    return in_order[:position] + overtaking + [turn for turn in in_order[position:] if turn.index not in ahead]


def _too_late(line: Seq[Prompt], position: int, num_tokens: int, due_since_s: float, cost: StepCost) -> list[int]:
    """Who behind ``position`` may overtake it. ``due_since_s``: what came by then should have its first token by now."""
    late: list[int] = []
    num_ahead = sum(prompt.num_tokens for prompt in line[:position])
    for index in range(position, len(line)):
        prompt = line[index]
        num_ahead += prompt.num_tokens
        is_late = due_since_s + cost.seconds(num_ahead, num_tokens) > prompt.arrival_s
        if is_late and 2 * prompt.num_tokens <= line[position].num_tokens:
            late.append(index)
    return late
