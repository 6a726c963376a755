"""One attempt of a request in a worker's service: its phase, and which threads may still use its blocks."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from kvrelay.common.adapter_files import AdapterRef
from kvrelay.engine.step.sequence import Sequence
from kvrelay.wire.messages import Cancelled, Failed, HandedOver, PromptChunk, Timings, Tokens, Withdrawn
from kvrelay.worker.scheduling.suspects import Key

Outcome = HandedOver | Tokens | Withdrawn | Failed | Cancelled


class Phase(enum.Enum):
    """Where an entry stands."""

    LEASED = "leased"  # decode only: its blocks are on their way here
    COMPILING = "compiling"  # waits for its guide; an entry without a guide leaves this phase at once
    QUEUED = "queued"  # with the model thread, and in no step yet
    WITHDRAWING = "withdrawing"  # its gateway wants it back; the model thread decides whether it has begun
    RUNNING = "running"  # it has been in a step; it may wait again if it was preempted
    HANDING_OVER = "handing_over"  # prefill only: computed; the transfer goes on
    CLOSING = "closing"  # the outcome is decided; blocks are still in use


_TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.LEASED: frozenset({Phase.COMPILING, Phase.CLOSING}),
    Phase.COMPILING: frozenset({Phase.QUEUED, Phase.CLOSING}),
    Phase.QUEUED: frozenset({Phase.WITHDRAWING, Phase.RUNNING, Phase.CLOSING}),
    Phase.WITHDRAWING: frozenset({Phase.RUNNING, Phase.CLOSING}),
    Phase.RUNNING: frozenset({Phase.HANDING_OVER, Phase.CLOSING}),
    Phase.HANDING_OVER: frozenset({Phase.CLOSING}),
    Phase.CLOSING: frozenset(),
}
BEGINNING = frozenset({Phase.QUEUED, Phase.WITHDRAWING})  # phases in front of the first step
WAITING = frozenset({Phase.LEASED, Phase.COMPILING, Phase.QUEUED, Phase.WITHDRAWING})  # without a place in the batch


@dataclass(slots=True, eq=False, kw_only=True)
class Entry:
    """One attempt on a worker. A role adds what its hand-off needs to know."""

    sequence: Sequence  # the model thread's, from QUEUED on
    gateway_id: str
    deadline_s: float  # when the client's time is up
    adapter: AdapterRef | None = None  # what computes it
    phase: Phase = Phase.COMPILING
    started_s: float | None = None  # when it was first in a step
    outcome: Outcome | None = None  # that its gateway is told; None: it knows already, or hears it from another
    closed_s: float | None = None  # when the outcome was decided
    model_holds: bool = False  # the model thread may still touch the blocks
    hand_off_holds: bool = False  # sends in flight may still read the blocks, or a lease owns them

    @property
    def key(self) -> Key:
        """(request_id, attempt): unique on a worker."""
        return self.sequence.key

    @property
    def is_waiting(self) -> bool:
        """Whether it takes no place in the batch yet."""
        return self.phase in WAITING

    @property
    def num_uncomputed_tokens(self) -> int:
        """Of its prompt, as far as this worker computes it; the model thread goes on meanwhile. 0 once it generates."""
        if not self.model_holds and self.phase is not Phase.COMPILING:
            return 0
        num_tokens = self.sequence.num_uncomputed_tokens
        return num_tokens if num_tokens > 1 else 0

    def advance(self, phase: Phase) -> None:
        """Move on. Raises ValueError if the table has no such transition."""
        if phase not in _TRANSITIONS[self.phase]:
            raise ValueError(f"request {self.key}: no transition {self.phase.name} -> {phase.name}")
        self.phase = phase

    @property
    def log_context(self) -> dict[str, Any]:
        """What a log line about it carries."""
        trace = self.sequence.trace
        return {"request_id": self.key[0], "attempt": self.key[1], "trace_id": "" if trace is None else trace.trace_id}

    def prefill_timings(self, now_s: float) -> Timings:
        """Its prompt has been computed, by this worker."""
        sequence, started_s = self.sequence, now_s if self.started_s is None else self.started_s
        chunks = [] if sequence.trace is None else sequence.trace.chunks
        return Timings(
            queue_s=started_s - sequence.arrival_s,
            prefill_s=now_s - started_s,
            chunks=[PromptChunk(one.begun_s - started_s, one.ended_s - one.begun_s, one.num_tokens) for one in chunks],
        )

    def debug(self) -> dict[str, Any]:
        """For /debug/kv."""
        return {
            "phase": self.phase.value,
            "model_holds": self.model_holds,
            "hand_off_holds": self.hand_off_holds,
        }
