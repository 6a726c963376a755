"""One attempt of a request in a worker's service: its phase, and which threads may still use its blocks."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from kvrelay.common.adapter_files import AdapterRef
from kvrelay.engine.step.sequence import Sequence
from kvrelay.wire.messages import Cancelled, Failed, FailureCode, HandedOver, PromptChunk, Timings, Tokens, Withdrawn
from kvrelay.worker.images import Reading
from kvrelay.worker.scheduling.suspects import Key

Outcome = HandedOver | Tokens | Withdrawn | Failed | Cancelled


class Phase(enum.Enum):
    """Where an entry stands."""

    LEASED = "leased"  # decode only: the entry's blocks are on their way here
    COMPILING = "compiling"  # waits for its guide, adapter and images; an entry without them leaves this phase at once
    QUEUED = "queued"  # handed to the model thread, but in no step yet
    WITHDRAWING = "withdrawing"  # the gateway asks for it back; the model thread decides whether it has begun
    RUNNING = "running"  # has been in a step; may wait again after a preemption
    HANDING_OVER = "handing_over"  # prefill only: computed; the transfer is not over
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
BEGINNING = frozenset({Phase.QUEUED, Phase.WITHDRAWING})  # phases before the first step
WAITING = frozenset({Phase.LEASED, Phase.COMPILING, Phase.QUEUED, Phase.WITHDRAWING})  # no place in the batch


@dataclass(slots=True, eq=False, kw_only=True)
class Entry:
    """One attempt on a worker. Each role adds the state of its hand-off."""

    sequence: Sequence  # from QUEUED on only the model thread changes it
    gateway_id: str
    deadline_s: float  # when the client's time is up
    adapter: AdapterRef | None = None  # LoRA adapter; None: the base model
    phase: Phase = Phase.COMPILING
    started_s: float | None = None  # when its first step began
    reading: Reading | None = None  # its images, until they are computed
    outcome: Outcome | None = None  # message for its gateway; None: the gateway knows, or another worker tells it
    closed_s: float | None = None  # when the outcome was decided
    model_holds: bool = False  # the model thread may still touch the blocks
    hand_off_holds: bool = False  # sends in flight may still read the blocks, or a lease owns them

    @property
    def key(self) -> Key:
        """(request_id, attempt): unique on a worker."""
        return self.sequence.key

    @property
    def is_waiting(self) -> bool:
        """Whether the entry takes no place in the batch yet."""
        return self.phase in WAITING

    @property
    def num_uncomputed_tokens(self) -> int:
        """Prompt tokens that this worker must still compute; 0 once it generates. The model thread changes it meanwhile."""
        if not self.model_holds and self.phase is not Phase.COMPILING:
            return 0
        num_tokens = self.sequence.num_uncomputed_tokens
        return num_tokens if num_tokens > 1 else 0

    @property
    def is_prepared(self) -> bool:
        """Whether its images, its adapter and its guide are there."""
        sequence = self.sequence
        if self.reading is not None and sequence.images is None:
            return False
        if self.adapter is not None and not sequence.adapter:
            return False
        return sequence.sampling.guide is None or sequence.guide is not None

    def advance(self, phase: Phase) -> None:
        """Enter ``phase``. Raises ValueError if the table has no such transition."""
        if phase not in _TRANSITIONS[self.phase]:
            raise ValueError(f"request {self.key}: no transition {self.phase.name} -> {phase.name}")
        self.phase = phase

    @property
    def log_context(self) -> dict[str, Any]:
        """Extra fields for log lines about the entry."""
        trace = self.sequence.trace
        return {"request_id": self.key[0], "attempt": self.key[1], "trace_id": "" if trace is None else trace.trace_id}

    def prefill_timings(self, now_s: float) -> Timings:
        """The timings of a prompt that this worker has just finished computing, at ``now_s``."""
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


def failed(key: Key, code: FailureCode, detail: str, retry_after_s: float | None = None) -> Failed:
    """The outcome of an attempt that ended with an error."""
    return Failed(request_id=key[0], attempt=key[1], code=code, detail=detail, retry_after_s=retry_after_s)


def cancelled(key: Key) -> Cancelled:
    """The outcome of an attempt that nobody waits for any more."""
    return Cancelled(request_id=key[0], attempt=key[1])
