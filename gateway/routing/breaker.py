"""Circuit breakers: a worker or a pair of workers that keeps failing gets only one request (a probe) at a time. Pure state.

A worker that fails all requests fast looks empty, and routing would send it all of them. So a gateway's requests share their
failures. After failures of three different requests a breaker opens. After a pause one request may try. If it fails, the next pause
is twice as long; if it succeeds, the breaker closes. For a prefill worker and for a pair, success means that K/V are handed over.
For a decode worker it means its first few tokens. So a probe need not wait for the end of a long answer.

Times are seconds on one monotonic clock; the caller passes them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

Part = tuple[str, ...]
"""What may be at fault: the address of a worker, or the addresses of a prefill and a decode worker."""

_NUM_FAILED = 3  # different requests
_MEMORY_S = 60.0  # how long a failure counts if no other follows
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


class BreakerState(enum.StrEnum):
    """CLOSED → OPEN → PROBING → CLOSED, or OPEN again."""

    CLOSED = "closed"  # every request may use it
    OPEN = "open"  # no request may use it; after the pause, the next one may as a probe
    PROBING = "probing"  # one request tries; no other may


@dataclass(slots=True)
class _Breaker:
    state: BreakerState = BreakerState.CLOSED
    failed_s: dict[Hashable, float] = field(default_factory=dict)  # when requests last failed there, by cause
    pause_s: float = _FIRST_PAUSE_S
    until_s: float = 0.0  # when a probe may follow
    probe: Trial | None = None

    def is_shut(self, now_s: float) -> bool:
        """Whether no request may be sent there."""
        return self.state is BreakerState.PROBING or (self.state is BreakerState.OPEN and now_s < self.until_s)

    def open(self, now_s: float) -> None:
        self.state, self.probe, self.until_s = BreakerState.OPEN, None, now_s + self.pause_s


class CircuitBreakers:
    """The breakers of one gateway's workers."""

    def __init__(self, on_change: Callable[[Part, bool], None]) -> None:
        """``on_change`` is called when a breaker opens (True; not after a failed probe) or closes (False)."""
        self._on_change = on_change
        self._breakers: dict[Part, _Breaker] = {}

    @property
    def is_any(self) -> bool:
        """Whether a request has failed lately."""
        return bool(self._breakers)

    def begin(self, cause: Hashable, part: Part, now_s: float) -> Trial:
        """Begin an attempt; ``on_end`` must follow. ``part``: all its workers.

        ``cause``: equal for all that one client asked for.
        """
        parts: list[Part] = [part] if len(part) == 1 else [(part[0],), (part[1],), part]
        trial = Trial(self, cause, parts, now_s)
        for one in parts:
            breaker = self._breakers.get(one)
            if breaker is not None and breaker.state is BreakerState.OPEN:
                breaker.state, breaker.probe = BreakerState.PROBING, trial
        return trial

    def shut(self, now_s: float) -> set[Part]:
        """The workers and pairs that may not be used."""
        return {part for part, breaker in self._breakers.items() if breaker.is_shut(now_s)}

    def states(self) -> dict[Part, BreakerState]:
        """The state of every worker and pair with recent failures."""
        return {part: breaker.state for part, breaker in self._breakers.items()}

    def keep(self, up_since_s: Mapping[str, float]) -> None:
        """Forget workers that are gone, and failures from before a worker came up again."""
        for part, breaker in list(self._breakers.items()):
            last_s = max(breaker.failed_s.values())
            if not all(address in up_since_s and up_since_s[address] < last_s for address in part):
                self._close(part)

    def on_failure(self, trial: Trial, part: Part, now_s: float) -> None:
        """The attempt failed, and ``part`` is to blame."""
        breaker = self._breakers.setdefault(part, _Breaker())
        if breaker.state is not BreakerState.CLOSED:
            if breaker.probe is trial:
                breaker.failed_s[trial.cause] = now_s
                breaker.pause_s = min(2 * breaker.pause_s, _LONGEST_PAUSE_S)
                breaker.open(now_s)
            return
        breaker.failed_s = {cause: at_s for cause, at_s in breaker.failed_s.items() if at_s > now_s - _MEMORY_S}
        breaker.failed_s[trial.cause] = now_s
        if len(breaker.failed_s) >= _NUM_FAILED:
            breaker.open(now_s)
            self._on_change(part, True)

    def on_success(self, trial: Trial, part: Part) -> None:
        """The attempt succeeds on ``part``. Failures there from before the attempt began no longer count."""
        breaker = self._breakers.get(part)
        if breaker is None:
            return
        if breaker.state is not BreakerState.CLOSED:
            if breaker.probe is trial:
                self._close(part)
            return
        breaker.failed_s = {cause: at_s for cause, at_s in breaker.failed_s.items() if at_s > trial.begun_s}
        if not breaker.failed_s:
            del self._breakers[part]

    def on_end(self, trial: Trial) -> None:
        """The attempt is over. If it was a probe without a result, the next probe may follow at once."""
        for part in trial.parts:
            breaker = self._breakers.get(part)
            if breaker is not None and breaker.probe is trial:
                breaker.state, breaker.probe = BreakerState.OPEN, None

    def _close(self, part: Part) -> None:
        if self._breakers.pop(part).state is not BreakerState.CLOSED:
            self._on_change(part, False)


class Trial:
    """One attempt, as the breakers see it. Made by :meth:`CircuitBreakers.begin`."""

    def __init__(self, breakers: CircuitBreakers, cause: Hashable, parts: list[Part], begun_s: float) -> None:
        self.cause = cause
        self.begun_s = begun_s
        self._breakers = breakers
        self.parts = parts

    def hand_over_succeeded(self) -> None:
        """The decode worker has received the prefill worker's K/V."""
        for part in (self.parts[0], self.parts[-1]) if len(self.parts) > 1 else ():
            self._breakers.on_success(self, part)

    def decode_succeeded(self) -> None:
        """The decode worker generates."""
        self._breakers.on_success(self, self.parts[min(1, len(self.parts) - 1)])
