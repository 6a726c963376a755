"""How fast work gets done, learnt from what was done: the estimates behind admission. Pure state; the caller brings the time.

The unit of work is a token of prompt or output. What a request will cost is its prompt and the output that one like it had on
average, if it allows that much. Estimates are forgotten when nothing confirms them for a while: after trouble, requests are tried
again rather than refused by what was measured in the trouble.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_MEMORY_S = 10.0  # what lies further back counts less and less
_STALE_S = 10.0
_MEMORY_REQUESTS = 50
_FIRST_GUESS_TOKENS = 128  # of output, before any request has ended


@dataclass(slots=True)
class _Ratio:
    """Of two sums that are forgotten alike."""

    amount: float = 0.0
    per: float = 0.0

    def add(self, amount: float, per: float, kept: float) -> None:
        self.amount = self.amount * kept + amount
        self.per = self.per * kept + per

    @property
    def value(self) -> float | None:
        return self.amount / self.per if self.per > 0 else None


class Pace:
    """Of one gateway."""

    def __init__(self) -> None:
        self._output = _Ratio()  # tokens by request
        self._service = _Ratio()  # seconds by token of work
        self._service_s = -math.inf  # when it was last confirmed
        self._line = _Ratio()  # tokens of work by second in which somebody waited
        self._line_s = -math.inf

    def work_of(self, num_prompt_tokens: int, max_tokens: int) -> float:
        """The tokens that a request will cost, as far as one can know."""
        typical = self._output.value
        return num_prompt_tokens + min(max_tokens, _FIRST_GUESS_TOKENS if typical is None else typical)

    def on_admitted(self, work: float, waited_s: float, now_s: float) -> None:
        """Work got its place, ``waited_s`` after somebody had begun to wait or was admitted before it."""
        self._line.add(work, waited_s, math.exp(-waited_s / _MEMORY_S))
        self._line_s = now_s

    def on_finished(self, num_prompt_tokens: int, num_output_tokens: int, service_s: float, now_s: float) -> None:
        """A request has ended well, ``service_s`` after it got its place."""
        kept = 1.0 - 1.0 / _MEMORY_REQUESTS
        self._output.add(num_output_tokens, 1, kept)
        self._service.add(service_s, num_prompt_tokens + num_output_tokens, kept)
        self._service_s = now_s

    def wait_s(self, work_ahead: float, now_s: float) -> float:
        """How long it takes until ``work_ahead`` has got its places; 0 if that is not known."""
        rate = self._line.value
        return work_ahead / rate if rate and now_s - self._line_s < _STALE_S else 0.0

    def service_s(self, work: float, now_s: float) -> float:
        """How long a request of ``work`` takes from its place to its end; 0 if that is not known."""
        by_token = self._service.value
        return work * by_token if by_token is not None and now_s - self._service_s < _STALE_S else 0.0
