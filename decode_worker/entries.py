"""One attempt as the decode worker's service sees it: its phase, and what the gateway has been told."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvrelay.common.sampling import SampledToken
from kvrelay.wire.messages import Cancelled, Failed

Key = tuple[str, int]


class Phase(enum.Enum):
    """Where an entry stands."""

    LEASED = "leased"
    RUNNING = "running"  # with the model thread: waiting or in the batch
    CLOSING = "closing"  # the outcome is decided; blocks are still in use


_TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.LEASED: frozenset({Phase.RUNNING, Phase.CLOSING}),
    Phase.RUNNING: frozenset({Phase.CLOSING}),
    Phase.CLOSING: frozenset(),
}


@dataclass(slots=True, eq=False)
class Entry:
    """One attempt on this worker."""

    key: Key
    gateway_id: str
    phase: Phase
    next_index: int  # output position of the next token to send
    arrival_s: float
    num_prompt_tokens: int
    deadline_s: float  # when nobody waits for it any more
    unsent: list[SampledToken] = field(default_factory=list)  # the committed first token, until the next one is there
    lease_id: int | None = None
    started_s: float | None = None
    verified_s: float | None = None
    transfer_s: float | None = None
    num_cached_tokens: int | None = None
    outcome: Failed | Cancelled | None = None
    has_sent: bool = False

    def advance(self, phase: Phase) -> None:
        """Move on. Raises ValueError if the table has no such transition."""
        if phase not in _TRANSITIONS[self.phase]:
            raise ValueError(f"request {self.key}: no transition {self.phase.name} -> {phase.name}")
        self.phase = phase
