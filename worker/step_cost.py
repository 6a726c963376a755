"""What model steps cost, learned from the latest ones, and how much of prompts a step takes that others wait for. Pure state.

A prefill worker's steps are prompts; what follows from their cost is in :mod:`kvrelay.prefill_worker.chunking`. On a decode worker
prompts are computed beside sequences that generate, each of which waits for the whole step. :class:`MixedSteps` bounds what
prompts may add to it: by time, as a token's cost differs a hundredfold between machines.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from itertools import combinations

_NUM_STEPS = 32  # that a cost is fitted to: what prompts of this length, on this machine, cost just now
_MIN_STEPS = 3  # before a cost is told, so that the first step, which compiles and allocates, does not decide
_REFIT_STEPS = 4  # a fit takes 0.1 ms

# Of steps that prompts share with sequences that generate:
_BUDGET_STEPS = 2.0  # by default such a step takes twice as long as one without prompts
_MIN_PROMPT_SHARE = 0.25  # of the time of a step without prompts, whatever the budget: prompts move on
_NUM_BARE = 3  # steps without prompts whose median counts …
_BARE_EVERY = 32  # … and how often there is one, since sequences come and go; early the first time
_NUM_MIXED = 12  # steps with prompts whose median counts: the later tokens of a prompt cost more
_UNKNOWN_TOKENS = 64  # of a prompt's first steps; a CPU core computes the demo model's in 20 ms
_GROWTH = 4  # from what was measured to what is tried


@dataclass(frozen=True, slots=True)
class StepCost:
    """A step of ``n`` tokens takes ``fixed_s + n * token_s``: launches and reading the weights, then arithmetic."""

    fixed_s: float
    token_s: float  # above 0

    def seconds(self, num_tokens: int, step_tokens: int) -> float:
        """For ``num_tokens``, computed in steps of ``step_tokens``."""
        return num_tokens * (self.token_s + self.fixed_s / step_tokens)


class StepCosts:
    """Learns what a step costs from the steps themselves, by the median of slopes (Theil 1950, Sen 1968).

    A median, because some steps are disturbed: by other programs, or because a kernel runs for the first time. Slopes are taken
    between steps of clearly different sizes; while all are alike, as in the midst of a long prompt, the fixed part is kept.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=_NUM_STEPS)
        self._num_new = 0
        self._cost: StepCost | None = None

    def observe(self, num_tokens: int, step_s: float) -> None:
        """One step. One that took no time at all (a clock that stands still) tells nothing."""
        if num_tokens <= 0 or step_s <= 0:
            return
        self._steps.append((num_tokens, step_s))
        self._num_new += 1
        if len(self._steps) >= _MIN_STEPS and (self._cost is None or self._num_new >= _REFIT_STEPS):
            self._num_new = 0
            self._cost = _fit(self._steps, 0.0 if self._cost is None else self._cost.fixed_s)

    @property
    def largest_step(self) -> int:
        """Tokens of the largest step that is remembered; 0 before the first."""
        return max((num_tokens for num_tokens, _ in self._steps), default=0)

    @property
    def cost(self) -> StepCost | None:
        """None before enough steps were seen."""
        return self._cost


def _fit(steps: deque[tuple[int, float]], fixed_s: float) -> StepCost:
    """``fixed_s``: of before, for steps that are too much alike to tell it."""
    min_difference = max(tokens for tokens, _ in steps) / 4
    slopes = [
        (one_s - other_s) / (one - other)
        for (one, one_s), (other, other_s) in combinations(steps, 2)
        if abs(one - other) >= min_difference
    ]
    if slopes and (slope := statistics.median(slopes)) > 0:
        fixed_s = max(0.0, statistics.median(step_s - slope * tokens for tokens, step_s in steps))
    # What is left behind the fixed part is the tokens'. A tenth of a step at least is: else a budget would buy any number.
    shares = [max(step_s - fixed_s, step_s / 10) / tokens for tokens, step_s in steps]
    return StepCost(fixed_s, statistics.median(shares))


class MixedSteps:
    """What prompts may add to steps that generate, from what such steps took with prompts and without."""

    def __init__(self, budget_s: float | None) -> None:
        """``budget_s``: of a step, prompts included; None: twice what one takes without them."""
        self._budget_s = budget_s
        self._bare_s: deque[float] = deque(maxlen=_NUM_BARE)
        self._mixed: deque[tuple[int, float]] = deque(maxlen=_NUM_MIXED)  # tokens of prompts, and what each took
        self._num_since_bare = _BARE_EVERY - _NUM_BARE

    def observe(self, num_prompt_tokens: int, num_generating: int, step_s: float) -> None:
        """A step of so many tokens of prompts, beside so many sequences that generate. One that took no time tells nothing."""
        if step_s <= 0:
            return
        if num_prompt_tokens == 0:
            self._bare_s.append(step_s)
            self._num_since_bare = 0
            return
        others_s = self._without_prompts_s if num_generating else 0.0
        # A tenth of a step is the prompts' at least: else a budget would buy any number.
        self._mixed.append((num_prompt_tokens, max(step_s - others_s, step_s / 10) / num_prompt_tokens))
        self._num_since_bare += num_generating > 0

    @property
    def num_tokens(self) -> int:
        """Tokens of prompts for the next step that generates: none now and then, to see what it takes without them."""
        if self._num_since_bare >= _BARE_EVERY:
            return 0
        if not self._bare_s or not self._mixed:
            return _UNKNOWN_TOKENS
        cost = StepCost(self._without_prompts_s, statistics.median(token_s for _, token_s in self._mixed))
        num_tokens = tokens_beside(cost, self._budget_s)
        return min(num_tokens, max(_UNKNOWN_TOKENS, _GROWTH * max(num for num, _ in self._mixed)))

    @property
    def _without_prompts_s(self) -> float:
        return statistics.median(self._bare_s) if self._bare_s else 0.0


def tokens_beside(cost: StepCost, budget_s: float | None) -> int:
    """Tokens of prompts that a step may compute for it to take ``budget_s``, with ``cost.fixed_s`` for those that generate.

    None: twice what it takes without prompts. At least one, and a quarter of that time.
    """
    budget_s = _BUDGET_STEPS * cost.fixed_s if budget_s is None else budget_s
    prompts_s = max(budget_s - cost.fixed_s, _MIN_PROMPT_SHARE * cost.fixed_s)
    return max(1, int(prompts_s / cost.token_s))
