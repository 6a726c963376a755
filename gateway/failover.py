"""Which workers a failed attempt speaks against, and whom the next attempt avoids. Pure state; the caller brings the time.

A failure that one worker is to blame for pauses that worker for the request. Where it may have been either of a pair (a prefill
worker passes on what the decode worker said of the hand-off), the pair is not used again, and both are
avoided as long as there is somebody else: a broken worker never costs a request more than one attempt while there is a healthy one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from kvrelay.wire.messages import FailureCode, Role

# A prefill worker says these of itself, or of the decode worker that refused its offer or broke its hand-off.
_OF_EITHER = frozenset(
    {
        FailureCode.QUEUE_FULL,
        FailureCode.DRAINING,
        FailureCode.PEER_LOST,
        FailureCode.INTEGRITY,
        FailureCode.LEASE_EXPIRED,
        FailureCode.LAYOUT_MISMATCH,
    }
)


def blamed_roles(code: FailureCode, reporter: Role) -> frozenset[Role]:
    """Whose doing a failure is, when ``reporter`` says so; both roles if that cannot be known."""
    if reporter is Role.DECODE:
        return frozenset({Role.DECODE})
    if code in _OF_EITHER:
        return frozenset({Role.PREFILL, Role.DECODE})
    return frozenset({Role.DECODE if code is FailureCode.NO_ROOM else Role.PREFILL})


@dataclass(slots=True)
class Avoidance:
    """Whom one request avoids, until when. All times are seconds on one monotonic clock."""

    workers: dict[str, float] = field(default_factory=dict)  # by address
    pairs: dict[tuple[str, str], float] = field(default_factory=dict)  # by addresses of prefill and decode worker

    def blame(self, addresses: Collection[str], until_s: float) -> None:
        """Avoid a worker, or a pair (prefill worker first), until ``until_s``."""
        match tuple(addresses):
            case (address,):
                self.workers[address] = until_s
            case (prefill, decode):
                self.pairs[prefill, decode] = until_s
            case ():
                pass
            case _:
                raise AssertionError(f"{addresses} are more than a pair")

    def next_change_s(self, now_s: float) -> float | None:
        """When there will be more to choose from than at ``now_s``; None if nobody is avoided."""
        return min(
            (until_s for until_s in (*self.workers.values(), *self.pairs.values()) if until_s > now_s), default=None
        )

    def choices(
        self, prefills: Collection[str], decodes: Collection[str], now_s: float
    ) -> Iterator[tuple[set[str], set[str]]]:
        """Addresses to pick a pair from, the best choice first. Without ``prefills`` only decode workers are picked."""
        paused = {address for address, until_s in self.workers.items() if until_s > now_s}
        suspects = {address for pair, until_s in self.pairs.items() if until_s > now_s for address in pair}
        left, right = set(prefills) - paused, set(decodes) - paused
        if not prefills:
            yield set(), right - suspects
            yield set(), right  # the suspicion was about a hand-off; there is none
            return
        for some, others in ((left - suspects, right - suspects), (left - suspects, right), (left, right - suspects)):
            if some and others:
                yield some, others
