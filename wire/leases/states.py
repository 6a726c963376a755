"""The hand-off's state machine, the same on both sides.

    OFFERED ──▶ GRANTED ──▶ SHIPPING ──▶ COMMITTED ──▶ VERIFIED
       │           │            │             │
       └───────────┴────────────┴─────────────┴──▶ ABORTING ──▶ ABORTED

The receiver reaches COMMITTED when the commit message arrives, with or without the last blocks. The sender reaches it when it has
sent the commit. ABORTING means that the hand-off is over, but the receiver still writes into the blocks, or the sender still
reads from them. The blocks must not be reused before ABORTED.
"""

from __future__ import annotations

import enum


class HandoffState(enum.Enum):
    """Where a hand-off stands."""

    OFFERED = "offered"
    GRANTED = "granted"
    SHIPPING = "shipping"
    COMMITTED = "committed"
    VERIFIED = "verified"
    ABORTING = "aborting"
    ABORTED = "aborted"

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be accepted for the hand-off."""
        return self in (HandoffState.VERIFIED, HandoffState.ABORTING, HandoffState.ABORTED)


_ABORT = frozenset({HandoffState.ABORTING})

TRANSITIONS: dict[HandoffState, frozenset[HandoffState]] = {
    HandoffState.OFFERED: frozenset({HandoffState.GRANTED}) | _ABORT,
    HandoffState.GRANTED: frozenset({HandoffState.SHIPPING, HandoffState.COMMITTED}) | _ABORT,
    HandoffState.SHIPPING: frozenset({HandoffState.COMMITTED}) | _ABORT,
    HandoffState.COMMITTED: frozenset({HandoffState.VERIFIED}) | _ABORT,
    HandoffState.VERIFIED: frozenset(),
    HandoffState.ABORTING: frozenset({HandoffState.ABORTED}),
    HandoffState.ABORTED: frozenset(),
}


def advance(state: HandoffState, new_state: HandoffState, what: str) -> HandoffState:
    """``new_state`` if the table allows it from ``state``; else raises ValueError naming ``what`` and both."""
    if new_state not in TRANSITIONS[state]:
        raise ValueError(f"{what}: no transition {state.name} -> {new_state.name}")
    return new_state
