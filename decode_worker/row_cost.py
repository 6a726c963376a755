"""The cost of one more row in a step, learned from the latest steps without prompts. Pure state.

The cost is kept as a ratio to the fixed cost of a step, not in seconds, because a slower machine or longer contexts change both.
Only steps of clearly different sizes separate the two.
"""

from __future__ import annotations

import statistics
from collections import deque
from itertools import combinations

_NUM_STEPS = 16
_FIRST_RATIO = 0.04  # a 135M model on a CPU; on a GPU the ratio is smaller, and soon measured
_MAX_RATIO = 0.25
_WEIGHT = 0.1  # weight of a new measurement, small because some steps are disturbed


class RowCost:
    """The row cost of one worker's steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=_NUM_STEPS)
        self._ratio = _FIRST_RATIO

    def observe(self, num_rows: int, step_s: float) -> None:
        """Record a step of ``num_rows`` rows. A step of zero time is ignored."""
        if step_s <= 0:
            return
        self._steps.append((num_rows, step_s))
        most = max(one for one, _ in self._steps)
        slopes = [
            (one_s - other_s) / (one - other)
            for (one, one_s), (other, other_s) in combinations(self._steps, 2)
            if one != other and 4 * abs(one - other) >= most
        ]
        if len(slopes) < _NUM_STEPS:
            return
        row_s = max(0.0, statistics.median(slopes))  # Theil 1950, Sen 1968
        fixed_s = statistics.median(step_s - row_s * num_rows for num_rows, step_s in self._steps)
        ratio = row_s / fixed_s if fixed_s > 0 else _MAX_RATIO
        self._ratio += _WEIGHT * (min(ratio, _MAX_RATIO) - self._ratio)

    def step_s(self, num_rows: int) -> float | None:
        """Predicted seconds of a step of ``num_rows`` rows; None before the first step."""
        if not self._steps:
            return None
        fixed_s = statistics.median(step_s / (1 + num_rows * self._ratio) for num_rows, step_s in self._steps)
        return fixed_s * (1 + num_rows * self._ratio)

    def copy(self) -> RowCost:
        """An independent copy."""
        copied = RowCost()
        copied._steps.extend(self._steps)
        copied._ratio = self._ratio
        return copied

    def share(self, num_rows: int) -> float:
        """The rows' share of the time of a step of ``num_rows`` rows, 0 to 1."""
        return num_rows * self._ratio / (1 + num_rows * self._ratio)
