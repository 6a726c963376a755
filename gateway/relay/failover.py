"""Which workers the next attempt avoids after a failed one. Pure state; the caller passes the time.

If one worker is to blame for a failure, the request avoids it for a while, unless the worker restarts. If either of a pair may be
to blame, the pair is not used again, and both workers are avoided as long as there are others. (A prefill worker passes on what the
decode worker said of the hand-off.) So while there is a healthy worker, a broken one costs a request at most one attempt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from kvrelay.gateway.routing.breaker import Part
from kvrelay.wire.messages import FailureCode, Role

# A prefill worker reports these failures of itself, or of a decode worker that refused its offer or broke its hand-off.
_OF_EITHER = frozenset(
    {
        FailureCode.QUEUE_FULL,
        FailureCode.NO_ADAPTER,
        FailureCode.DRAINING,
        FailureCode.PEER_LOST,
        FailureCode.INTEGRITY,
        FailureCode.LEASE_EXPIRED,
        FailureCode.LAYOUT_MISMATCH,
    }
)


def blamed_roles(code: FailureCode, reporter: Role) -> frozenset[Role]:
    """The roles that may have caused a failure that ``reporter`` reports; both if it cannot be known."""
    if reporter is Role.DECODE:
        return frozenset({Role.DECODE})
    if code in _OF_EITHER:
        return frozenset({Role.PREFILL, Role.DECODE})
    return frozenset({Role.DECODE if code is FailureCode.NO_ROOM else Role.PREFILL})


@dataclass(frozen=True, slots=True)
class _Pause:
    since_s: float
    until_s: float


@dataclass(slots=True)
class Avoidance:
    """The workers and pairs that one request avoids, and until when. All times are seconds on one monotonic clock."""

    pauses: dict[Part, _Pause] = field(default_factory=dict)

    @property
    def is_any(self) -> bool:
        """Whether a worker has been blamed."""
        return bool(self.pauses)

    def blame(self, part: Part, now_s: float, until_s: float) -> None:
        """Avoid a worker, or a pair (prefill worker first), from ``now_s`` until ``until_s``. Does nothing if ``part`` is empty."""
        assert len(part) <= 2, f"{part} are more than a pair"
        if part:
            self.pauses[part] = _Pause(now_s, until_s)

    def forgive(self, address: str, up_since_s: float) -> None:
        """Forget what was blamed on a worker before it came up again at ``up_since_s``."""
        self.pauses = {
            part: pause for part, pause in self.pauses.items() if address not in part or pause.since_s > up_since_s
        }

    def next_change_s(self, now_s: float) -> float | None:
        """The next time after ``now_s`` when fewer workers are avoided; None if none is avoided."""
        return min((pause.until_s for pause in self.pauses.values() if pause.until_s > now_s), default=None)

    def choices(
        self, prefills: Collection[str], decodes: Collection[str], now_s: float, shut: Collection[Part] = ()
    ) -> Iterator[tuple[set[str], set[str]]]:
        """Addresses to pick a pair from, the best choice first. Without ``prefills`` only decode workers are picked.

        ``shut``: workers and pairs that no request may use now.
        """
        avoided = {part for part, pause in self.pauses.items() if pause.until_s > now_s}.union(shut)
        paused = {part[0] for part in avoided if len(part) == 1}
        pairs = {part for part in avoided if len(part) == 2}
        suspects = {address for pair in pairs for address in pair}
        left, right = set(prefills) - paused, set(decodes) - paused
        if not prefills:
            yield set(), right - suspects
            yield set(), right  # only the hand-off was suspected, and local prefill has none
            return
        for some, others in ((left - suspects, right - suspects), (left - suspects, right), (left, right - suspects)):
            if some and others:
                yield some, others
        for prefill in sorted(left if pairs else ()):
            if fitting := {decode for decode in right if (prefill, decode) not in pairs}:
                yield {prefill}, fitting
