"""The cost of model steps, learned from the latest ones, and the tokens of prompts that a mixed step may take. Pure state.

On a prefill worker steps compute prompts; :mod:`kvrelay.prefill_worker.chunking` uses their cost. On a decode worker prompts share
steps with sequences that generate, and each of these waits for the whole step. :class:`MixedSteps` bounds what prompts may add. It
bounds the time and not the tokens, because a token's cost differs a hundredfold between machines.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from itertools import combinations

_NUM_STEPS = 32  # steps that a cost is fitted to: recent ones on this machine, with prompts like now
_MIN_STEPS = 3  # steps before there is a cost, so that the first step, which compiles and allocates, does not decide
_REFIT_STEPS = 4  # a fit takes 0.1 ms

# For steps that prompts share with generating sequences:
# With no budget set, such a step may take this many times as long as one in which all sequences here generate …
_AUTO_FACTOR = 1.4
_AUTO_LEAST_S = 0.010  # … and at least this long: no reader notices a stutter at 100 tokens/s
_MIN_PROMPT_SHARE = 0.25  # least share of a step without prompts that prompts get, so that they always advance
_NUM_BARE = 12  # remembered steps without prompts; few, because batches change
_NUM_ALIKE = 8  # the same for each number of sequences: a few more rows may cost nothing, or half a step
_BARE_EVERY = 32  # one step in this many takes no prompts …
_BARE_EVERY_EARLY = 3  # … and one in this many while too few are known
_NUM_MIXED = 8  # remembered steps with prompts: later tokens of a prompt cost more
# Least chunk. In smaller ones launches, weights and half-empty tiles make tokens dearer, which makes chunks smaller still.
_LEAST_TOKENS = {"cpu": 8, "cuda": 64}
_UNKNOWN_TOKENS = 32  # tokens of the first steps with prompts; a CPU core computes them for the demo model in 10 ms
# Largest step to try, relative to those measured. A few tokens add hardly more than steps vary by themselves.
_GROWTH = 1.25


@dataclass(frozen=True, slots=True)
class StepCost:
    """A step of ``n`` tokens takes ``fixed_s + n * token_s``: first launches and reading weights, then arithmetic."""

    fixed_s: float
    token_s: float  # above 0

    def seconds(self, num_tokens: int, step_tokens: int) -> float:
        """Time for ``num_tokens`` in steps of ``step_tokens``."""
        return num_tokens * (self.token_s + self.fixed_s / step_tokens)

    def step_s(self, num_tokens: int) -> float:
        """Time for one step of ``num_tokens``."""
        return self.fixed_s + num_tokens * self.token_s


class StepCosts:
    """Learns the cost of a step by the median of slopes (Theil 1950, Sen 1968).

    A median, because some steps are disturbed by other programs or by a kernel's first run. Slopes are taken between steps of
    clearly different sizes. While all steps are alike, as within a long prompt, the fixed part keeps its last value.
    """

    def __init__(self, num_steps: int = _NUM_STEPS, refit_steps: int = _REFIT_STEPS, fixed_share: float = 0.0) -> None:
        """Fit to the last ``num_steps`` steps, again after every ``refit_steps``.

        ``fixed_share``: the share of a step that counts as fixed while all steps so far are alike.
        """
        self._steps: deque[tuple[int, float]] = deque(maxlen=num_steps)
        self._refit_steps = refit_steps
        self._fixed_share = fixed_share
        self._num_new = 0
        self.cost: StepCost | None = None  # None before enough steps were seen

    def observe(self, num_tokens: int, step_s: float) -> None:
        """Record a step. A step of zero time (a clock that stands still) is ignored."""
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
        """Tokens of the largest remembered step; 0 before the first."""
        return max((num_tokens for num_tokens, _ in self._steps), default=0)

    @property
    def tokens_per_s(self) -> float | None:
        """All tokens of the remembered steps by all their seconds; None before the first."""
        seconds = sum(step_s for _, step_s in self._steps)
        return sum(num_tokens for num_tokens, _ in self._steps) / seconds if self._steps else None


def _fit(steps: deque[tuple[int, float]], fixed_s: float) -> StepCost:
    """``fixed_s``: the previous value, kept if the steps are too much alike to measure it."""
    min_difference = max(tokens for tokens, _ in steps) / 4
    slopes = [
        (one_s - other_s) / (one - other)
        for (one, one_s), (other, other_s) in combinations(steps, 2)
        if abs(one - other) >= min_difference
    ]
    if slopes and (slope := statistics.median(slopes)) > 0:
        fixed_s = max(0.0, statistics.median(step_s - slope * tokens for tokens, step_s in steps))
    # The rest is the tokens' time, but at least a tenth of a step. Otherwise a budget would buy any number of tokens.
    shares = [max(step_s - fixed_s, step_s / 10) / tokens for tokens, step_s in steps]
    return StepCost(fixed_s, statistics.median(shares))


class MixedSteps:
    """What prompts may add to steps that generate. Learns from steps without prompts, of only prompts, and of both."""

    def __init__(self, itl_budget_s: float | None, max_tokens: int, device_type: str) -> None:
        """``itl_budget_s``: bound of a step with prompts; 0: no bound; None: relative to a step without prompts.

        ``max_tokens``: most prompt tokens of a step. ``device_type``: "cpu" or "cuda".
        """
        self._itl_budget_s = itl_budget_s
        self._least_tokens = min(max_tokens, _LEAST_TOKENS[device_type])
        self._max_tokens = max_tokens
        # Costs of steps without prompts: fitted over the number of generating sequences, and raw by that number.
        self._bare = StepCosts(_NUM_BARE, refit_steps=1, fixed_share=0.9)
        self._bare_s: dict[int, deque[float]] = {}
        self._alone = StepCosts()  # costs of steps with only prompts, over prompt tokens
        # Of mixed steps: (prompt tokens, seconds that each added). No line is fitted to these, because their number itself
        # follows from their cost, and the cost from their place in the prompt.
        self._added: deque[tuple[int, float]] = deque(maxlen=_NUM_MIXED)
        self._num_since_bare = 0

    def observe(self, num_prompt_tokens: int, num_generating: int, step_s: float) -> None:
        """Record a step of ``num_prompt_tokens`` beside ``num_generating`` sequences. A step of zero time is ignored."""
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
                # Above zero: otherwise a budget would buy any number of tokens.
                added_s = max(step_s - bare_s, step_s / 100)
                self._added.append((num_prompt_tokens, added_s / num_prompt_tokens))

    def prompt_tokens(self, num_generating: int, num_behind: int = 0) -> int:
        """Prompt tokens for the next step, beside ``num_generating`` sequences.

        ``num_behind``: prompts behind the first one that the batch has places for. Now and then 0, to measure the step without
        prompts.
        """
        if num_generating == 0 or self._itl_budget_s == 0:
            return self._max_tokens
        bare_s, token_s = self._without_prompts_s(num_generating), self._token_s
        if self._num_since_bare + 1 >= (_BARE_EVERY_EARLY if bare_s is None else _BARE_EVERY):
            return 0
        if bare_s is None or token_s is None:
            return min(self._max_tokens, _UNKNOWN_TOKENS)
        num_tokens = self._tokens_beside(bare_s, self._full_s(bare_s, num_generating, num_behind), token_s)
        largest = int(_GROWTH * max((num for num, _ in self._added), default=0)) or _UNKNOWN_TOKENS
        return min(num_tokens, self._max_tokens, max(self._least_tokens, largest))

    def spare_s(self, num_generating: int) -> float | None:
        """Seconds that prompts may add to a step of ``num_generating`` sequences; infinity: no bound. None: not known yet."""
        if num_generating == 0 or self._itl_budget_s == 0:
            return math.inf
        bare_s = self._without_prompts_s(num_generating)
        return None if bare_s is None else spare_beside(bare_s, bare_s, self._itl_budget_s)

    def tokens_per_s(self, num_generating: int, num_behind: int = 0) -> float | None:
        """Prompt tokens/s within the budget beside ``num_generating`` sequences; 0: none are computed. None: not known yet.

        ``num_behind``: as in ``prompt_tokens``.
        """
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
            full_s = self._full_s(bare_s, num_generating, num_behind)
            if budget_beside(full_s, self._itl_budget_s) <= bare_s:
                return 0.0
            num_tokens = min(num_tokens, self._tokens_beside(bare_s, full_s, token_s))
        return num_tokens / (bare_s + num_tokens * token_s)

    def _without_prompts_s(self, num_generating: int) -> float | None:
        """Seconds of a step of ``num_generating`` sequences without prompts; None: not known yet."""
        if self._bare.cost is None:
            return None
        if alike := self._bare_s.get(num_generating):
            # The lower quartile, because a prompt's arrival disturbs the steps before it. Too large a value would make the
            # budget too large, and what prompts add too small.
            return sorted(alike)[(len(alike) - 1) // 4]
        return self._bare.cost.step_s(num_generating)

    def _full_s(self, bare_s: float, num_generating: int, num_behind: int) -> float:
        """Seconds of a step without prompts in which ``num_behind`` more sequences generate; never more per sequence than now."""
        if self._bare.cost is None or num_behind <= 0:
            return bare_s
        num_all = num_generating + num_behind
        return max(bare_s, min(self._bare.cost.step_s(num_all), bare_s * num_all / num_generating))

    def _tokens_beside(self, bare_s: float, full_s: float, token_s: float) -> int:
        return max(self._least_tokens, tokens_beside(bare_s, full_s, token_s, self._itl_budget_s))

    @property
    def _token_s(self) -> float | None:
        """Seconds that a prompt token adds to a step. Before a mixed step was seen: its cost in steps of only prompts."""
        if self._added:
            # The upper quartile: too many tokens stall a stream, and too few are made up for.
            return sorted(token_s for _, token_s in self._added)[3 * (len(self._added) - 1) // 4]
        return None if self._alone.cost is None else self._alone.cost.token_s


def budget_beside(full_s: float, itl_budget_s: float | None) -> float:
    """Longest step with prompts. ``itl_budget_s``: the set bound; None: the default rule.

    ``full_s``: seconds of a step without prompts in which all sequences generate, those whose prompts wait included. By the
    sequences that generate now, a busy worker would bound itself to ever fewer: the fewer there are, the shorter are the steps, the
    less is left for the prompts of others.
    """
    return max(_AUTO_FACTOR * full_s, _AUTO_LEAST_S) if itl_budget_s is None else itl_budget_s


def spare_beside(bare_s: float, full_s: float, itl_budget_s: float | None) -> float:
    """The budget's rest for prompts beside a step of ``bare_s``, and at least a quarter of ``bare_s``."""
    return max(budget_beside(full_s, itl_budget_s) - bare_s, _MIN_PROMPT_SHARE * bare_s)


def tokens_beside(bare_s: float, full_s: float, token_s: float, itl_budget_s: float | None) -> int:
    """Prompt tokens that fill the budget beside a step of ``bare_s``, if each adds ``token_s``; at least one."""
    return max(1, int(spare_beside(bare_s, full_s, itl_budget_s) / token_s))
