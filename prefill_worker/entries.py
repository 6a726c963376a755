"""One attempt as the prefill worker's service sees it: its phase, and who may still touch its blocks."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from kvrelay.common.sampling import SampledToken
from kvrelay.engine.step.sequence import Sequence
from kvrelay.wire.messages import Cancelled, Failed, HandedOver, Submit, Timings, Tokens

Outcome = HandedOver | Tokens | Failed | Cancelled


class Phase(enum.Enum):
    """Where an entry stands."""

    COMPILING = "compiling"  # its guide is not there yet
    QUEUED = "queued"
    COMPUTING = "computing"
    HANDING_OVER = "handing_over"  # computed; the transfer goes on
    CLOSING = "closing"  # the outcome is decided; blocks are still in use


_TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.COMPILING: frozenset({Phase.QUEUED, Phase.CLOSING}),
    Phase.QUEUED: frozenset({Phase.COMPUTING, Phase.CLOSING}),
    Phase.COMPUTING: frozenset({Phase.HANDING_OVER, Phase.CLOSING}),
    Phase.HANDING_OVER: frozenset({Phase.CLOSING}),
    Phase.CLOSING: frozenset(),
}


@dataclass(slots=True, eq=False)
class Entry:
    """One attempt on this worker."""

    submit: Submit
    gateway_id: str
    sequence: Sequence
    block_hashes: list[bytes]  # of all blocks of the submitted tokens, the last one maybe partial
    deadline_s: float  # when nobody waits for it any more
    started_s: float | None = None
    phase: Phase = Phase.COMPILING
    outcome: Outcome | None = None
    closed_s: float | None = None  # when the outcome was decided
    model_holds: bool = False  # the model thread may still touch the blocks
    transfer_holds: bool = False  # sends in flight may still read the blocks
    num_ready_blocks: int = 0
    commit: tuple[SampledToken, Timings] | None = None  # computed, for a link that is not up yet

    @property
    def num_earlier_tokens(self) -> int:
        """Output of earlier attempts; the sequence may have a token more, which the model thread appends."""
        return len(self.submit.token_ids) - self.submit.num_prompt_tokens

    def is_stuck(self, now_s: float, timeout_s: float) -> bool:
        """Whether its outcome was decided longer than ``timeout_s`` ago, and sends still hold its blocks."""
        return self.transfer_holds and self.closed_s is not None and now_s - self.closed_s > timeout_s

    def advance(self, phase: Phase) -> None:
        """Move on. Raises ValueError if the table has no such transition."""
        if phase not in _TRANSITIONS[self.phase]:
            raise ValueError(f"request {self.sequence.key}: no transition {self.phase.name} -> {phase.name}")
        self.phase = phase

    def debug(self) -> dict[str, Any]:
        """For /debug/kv."""
        return {"phase": self.phase.value, "model_holds": self.model_holds, "transfer_holds": self.transfer_holds}
