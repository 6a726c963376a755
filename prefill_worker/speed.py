"""How fast a worker computes prompts, from its latest steps. Pure state."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from itertools import combinations

_MEMORY_S = 5.0  # of computing; what lies further back counts less and less
_NUM_STEPS = 32  # that a cost is fitted to: what prompts of this length, on this machine, cost just now
_MIN_STEPS = 3  # before a cost is told, so that the first step, which compiles and allocates, does not decide
_REFIT_STEPS = 4  # a fit takes 0.1 ms


class Speed:
    """Prompt tokens per second of computing: all tokens by all seconds, both forgotten alike."""

    def __init__(self) -> None:
        self._num_tokens = 0.0
        self._busy_s = 0.0

    def observe(self, num_tokens: int, step_s: float) -> None:
        """One step."""
        kept = max(0.0, 1.0 - step_s / _MEMORY_S)
        self._num_tokens = self._num_tokens * kept + num_tokens
        self._busy_s = self._busy_s * kept + step_s

    @property
    def tokens_per_s(self) -> float:
        """0 before the first step."""
        return self._num_tokens / self._busy_s if self._busy_s > 0 else 0.0


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
