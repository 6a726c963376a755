"""How fast a worker computes prompts, from its latest steps. Pure state."""

from __future__ import annotations

_MEMORY_S = 5.0  # of computing; what lies further back counts less and less


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
    def tokens_per_s(self) -> float | None:
        """None before the first step."""
        return self._num_tokens / self._busy_s if self._busy_s > 0 else None
