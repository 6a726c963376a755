"""What model steps cost, learned from the latest ones, and how much of prompts a step takes that others wait for. Pure state.

A prefill worker's steps are prompts; what follows from their cost is in :mod:`kvrelay.prefill_worker.chunking`. On a decode worker
prompts are computed beside sequences that generate, each of which waits for the whole step. :class:`MixedSteps` bounds what
prompts may add to it: by time, as a token's cost differs a hundredfold between machines.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from itertools import combinations

_NUM_STEPS = 32  # that a cost is fitted to: what prompts of this length, on this machine, cost just now
_MIN_STEPS = 3  # before a cost is told, so that the first step, which compiles and allocates, does not decide
_REFIT_STEPS = 4  # a fit takes 0.1 ms

# Of steps that prompts share with sequences that generate:
_AUTO_FACTOR = 1.4  # without a budget of its own such a step takes so many times as long as one without prompts …
_AUTO_LEAST_S = 0.010  # … or this long, where that is more: nobody sees 100 tokens/s stutter
_MIN_PROMPT_SHARE = 0.25  # of the time of a step without prompts, whatever the budget: prompts move on
_NUM_BARE = 12  # steps without prompts that count: sequences come, go, and get longer; of so many sequences as now …
_NUM_ALIKE = 8  # … the latest alone, since a few more rows may cost a step nothing, or half its time …
_BARE_EVERY = 32  # … and how often there is one …
_BARE_EVERY_EARLY = 3  # … while too few are known
_NUM_MIXED = 8  # steps with prompts that count: the later tokens of a prompt cost more
# Smaller chunks pay for launches, weights and half-empty tiles alone: the fewer tokens, the dearer each, the fewer.
_LEAST_TOKENS = {"cpu": 8, "cuda": 64}
_UNKNOWN_TOKENS = 32  # of the first steps with prompts; a CPU core computes the demo model's in 10 ms
# From what was measured to what is tried: what a few tokens add is hardly more than what steps differ by.
_GROWTH = 1.25


@dataclass(frozen=True, slots=True)
class StepCost:
    """A step of ``n`` tokens takes ``fixed_s + n * token_s``: launches and reading the weights, then arithmetic."""

    fixed_s: float
    token_s: float  # above 0

    def seconds(self, num_tokens: int, step_tokens: int) -> float:
        """For ``num_tokens``, computed in steps of ``step_tokens``."""
        return num_tokens * (self.token_s + self.fixed_s / step_tokens)

    def step_s(self, num_tokens: int) -> float:
        """For one step of ``num_tokens``."""
        return self.fixed_s + num_tokens * self.token_s


class StepCosts:
    """Learns what a step costs from the steps themselves, by the median of slopes (Theil 1950, Sen 1968).

    A median, because some steps are disturbed: by other programs, or because a kernel runs for the first time. Slopes are taken
    between steps of clearly different sizes; while all are alike, as in the midst of a long prompt, the fixed part is kept.
    """

    def __init__(self, num_steps: int = _NUM_STEPS, refit_steps: int = _REFIT_STEPS, fixed_share: float = 0.0) -> None:
        """Of the last ``num_steps`` steps, fitted anew every ``refit_steps``.

        ``fixed_share``: how much of a step is taken for fixed while all are alike from the start.
        """
        self._steps: deque[tuple[int, float]] = deque(maxlen=num_steps)
        self._refit_steps = refit_steps
        self._fixed_share = fixed_share
        self._num_new = 0
        self.cost: StepCost | None = None  # before enough steps were seen

    def observe(self, num_tokens: int, step_s: float) -> None:
        """One step. One that took no time at all (a clock that stands still) tells nothing."""
        if num_tokens <= 0 or step_s <= 0:
            return
        self._steps.append((num_tokens, step_s))
        self._num_new += 1
        if len(self._steps) >= _MIN_STEPS and (self.cost is None or self._num_new >= self._refit_steps):
            self._num_new = 0
            guess_s = self._fixed_share * statistics.median(step_s for _, step_s in self._steps)
            self.cost = _fit(self._steps, guess_s if self.cost is None else self.cost.fixed_s)

    @property
    def largest_step(self) -> int:
        """Tokens of the largest step that is remembered; 0 before the first."""
        return max((num_tokens for num_tokens, _ in self._steps), default=0)

    @property
    def tokens_per_s(self) -> float | None:
        """Of the steps that are remembered: all tokens by all seconds; None before the first."""
        seconds = sum(step_s for _, step_s in self._steps)
        return sum(num_tokens for num_tokens, _ in self._steps) / seconds if self._steps else None


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
    """What prompts may add to steps that generate, from what steps took without prompts, of prompts alone, and of both."""

    def __init__(self, itl_budget_s: float | None, max_tokens: int, device_type: str) -> None:
        """``itl_budget_s``: of a step, prompts included; 0: no bound; None: by what one takes without them.

        ``max_tokens``: of prompts in a step, at most. ``device_type``: what computes, "cpu" or "cuda".
        """
        self._itl_budget_s = itl_budget_s
        self._least_tokens = min(max_tokens, _LEAST_TOKENS[device_type])
        self._max_tokens = max_tokens
        # Of steps without prompts: over the sequences that generate, and by their number.
        self._bare = StepCosts(_NUM_BARE, refit_steps=1, fixed_share=0.9)
        self._bare_s: dict[int, deque[float]] = {}
        self._alone = StepCosts()  # over tokens of prompts: steps in which nobody generates
        # Of the others: tokens of prompts, and what each of them added. No line is fitted to these: their number follows from what
        # they cost, and that from their place in the prompt.
        self._added: deque[tuple[int, float]] = deque(maxlen=_NUM_MIXED)
        self._num_since_bare = 0

    def observe(self, num_prompt_tokens: int, num_generating: int, step_s: float) -> None:
        """A step of so many tokens of prompts, beside so many sequences that generate. One that took no time tells nothing."""
        if step_s <= 0:
            return
        if num_prompt_tokens == 0:
            self._bare.observe(num_generating, step_s)
            self._bare_s.setdefault(num_generating, deque(maxlen=_NUM_ALIKE)).append(step_s)
            self._num_since_bare = 0
        elif num_generating == 0:
            self._alone.observe(num_prompt_tokens, step_s)
        else:
            self._num_since_bare += 1
            if (bare_s := self._without_prompts_s(num_generating)) is not None:
                # Not nothing: else a budget would buy any number.
                added_s = max(step_s - bare_s, step_s / 100)
                self._added.append((num_prompt_tokens, added_s / num_prompt_tokens))

    def prompt_tokens(self, num_generating: int) -> int:
        """Tokens of prompts for the next step, beside so many sequences that generate.

        None now and then, to see what the step takes without them.
        """
        if num_generating == 0 or self._itl_budget_s == 0:
            return self._max_tokens
        bare_s, token_s = self._without_prompts_s(num_generating), self._token_s
        if self._num_since_bare + 1 >= (_BARE_EVERY_EARLY if bare_s is None else _BARE_EVERY):
            return 0
        if bare_s is None or token_s is None:
            return min(self._max_tokens, _UNKNOWN_TOKENS)
        num_tokens = self._tokens_beside(bare_s, token_s)
        largest = int(_GROWTH * max((num for num, _ in self._added), default=0)) or _UNKNOWN_TOKENS
        return min(num_tokens, self._max_tokens, max(self._least_tokens, largest))

    def spare_s(self, num_generating: int) -> float | None:
        """Time for prompts beside a step of so many sequences; infinity: as much as they take. None: not known yet."""
        if num_generating == 0 or self._itl_budget_s == 0:
            return math.inf
        bare_s = self._without_prompts_s(num_generating)
        return None if bare_s is None else spare_beside(bare_s, self._itl_budget_s)

    def tokens_per_s(self, num_generating: int) -> float | None:
        """Tokens of prompts that steps beside so many sequences compute within the budget; 0: none. None: not known yet."""
        bare_s, token_s = self._without_prompts_s(num_generating), self._token_s
        if num_generating == 0 and (alone := self._alone.cost) is not None:
            num_tokens = min(self._max_tokens, max(_UNKNOWN_TOKENS, int(_GROWTH * self._alone.largest_step)))
            return num_tokens / alone.step_s(num_tokens)
        if token_s is None or num_generating == 0:
            return None if token_s is None else 1 / token_s
        if bare_s is None:
            return None
        num_tokens = self._max_tokens
        if self._itl_budget_s != 0:
            if budget_beside(bare_s, self._itl_budget_s) <= bare_s:
                return 0.0
            num_tokens = min(num_tokens, self._tokens_beside(bare_s, token_s))
        return num_tokens / (bare_s + num_tokens * token_s)

    def _without_prompts_s(self, num_generating: int) -> float | None:
        """What a step of so many sequences takes alone; None: not known yet."""
        if self._bare.cost is None:
            return None
        if alike := self._bare_s.get(num_generating):
            # The lower quartile: a prompt's arrival disturbs the steps before it. Taken for too much, what others cost would make
            # the budget larger, and what prompts add smaller.
            return sorted(alike)[(len(alike) - 1) // 4]
        return self._bare.cost.step_s(num_generating)

    def _tokens_beside(self, bare_s: float, token_s: float) -> int:
        return max(self._least_tokens, tokens_beside(bare_s, token_s, self._itl_budget_s))

    @property
    def _token_s(self) -> float | None:
        """What a token of a prompt adds to a step; until that was seen, what it costs in steps of its own."""
        if self._added:
            # The upper quartile: too many tokens stall a stream, too few of them are made up for.
            return sorted(token_s for _, token_s in self._added)[3 * (len(self._added) - 1) // 4]
        return None if self._alone.cost is None else self._alone.cost.token_s


def budget_beside(bare_s: float, itl_budget_s: float | None) -> float:
    """How long a step with prompts may take that takes ``bare_s`` without. ``itl_budget_s``: a bound, or None for our own."""
    return max(_AUTO_FACTOR * bare_s, _AUTO_LEAST_S) if itl_budget_s is None else itl_budget_s


def spare_beside(bare_s: float, itl_budget_s: float | None) -> float:
    """What the budget leaves to prompts beside a step of ``bare_s``; a quarter of that at least, whatever the budget."""
    return max(budget_beside(bare_s, itl_budget_s) - bare_s, _MIN_PROMPT_SHARE * bare_s)


def tokens_beside(bare_s: float, token_s: float, itl_budget_s: float | None) -> int:
    """Tokens of prompts for a step to take its budget, of which each adds ``token_s`` to ``bare_s``; at least one."""
    return max(1, int(spare_beside(bare_s, itl_budget_s) / token_s))
