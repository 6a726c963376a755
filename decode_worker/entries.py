"""One attempt as the decode worker's service sees it: its phase, and what the gateway has been told."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.decode_worker.model_worker import Add, NewToken
from kvrelay.engine.step.sequence import GuideState
from kvrelay.wire.messages import Beam, Cancelled, Failed, Timings, TokenDelta

Key = tuple[str, int]


class Phase(enum.Enum):
    """Where an entry stands."""

    LEASED = "leased"
    COMPILING = "compiling"  # only its guide is not there; its blocks, if it has any, are the sequence's
    RUNNING = "running"  # with the model thread: waiting or in the batch
    CLOSING = "closing"  # the outcome is decided; blocks are still in use


_TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.LEASED: frozenset({Phase.COMPILING, Phase.CLOSING}),
    Phase.COMPILING: frozenset({Phase.RUNNING, Phase.CLOSING}),
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
    sampling: SamplingParams
    deadline_s: float  # when nobody waits for it any more
    unsent: list[SampledToken] = field(default_factory=list)  # the committed first token, until the next one is there
    lease_id: int | None = None
    started_s: float | None = None
    verified_s: float | None = None
    transfer_s: float | None = None
    num_cached_tokens: int | None = None
    guide: GuideState | None = None  # compiled, behind the output of earlier attempts
    waiting: Add | None = None  # its sequence, for a guide that is not there yet
    outcome: Failed | Cancelled | None = None
    has_sent: bool = False

    @property
    def is_waiting(self) -> bool:
        """Whether it takes no place in the batch yet: its blocks are on their way, or it waits for room."""
        return self.phase in {Phase.LEASED, Phase.COMPILING} or (self.phase is Phase.RUNNING and self.started_s is None)

    def advance(self, phase: Phase) -> None:
        """Move on. Raises ValueError if the table has no such transition."""
        if phase not in _TRANSITIONS[self.phase]:
            raise ValueError(f"request {self.key}: no transition {self.phase.name} -> {phase.name}")
        self.phase = phase

    def delta(self, new: NewToken, now_s: float) -> TokenDelta:
        """What to tell the gateway of a step, with what only the first message of an attempt says; it counts as told."""
        tokens = self.unsent if new.token is None else [*self.unsent, new.token]
        self.unsent = []
        timings: Timings | None = None
        num_cached_tokens: int | None = None
        prompt_logprobs: list[SampledToken] | None = None
        if not self.has_sent:
            self.has_sent = True
            prompt_logprobs = new.prompt_logprobs
            num_cached_tokens = new.num_cached_tokens if self.lease_id is None else self.num_cached_tokens
            started_s = now_s if self.started_s is None else self.started_s
            if self.verified_s is None:
                timings = Timings(queue_s=started_s - self.arrival_s, prefill_s=now_s - started_s)
            else:
                timings = Timings(transfer_s=self.transfer_s, first_step_s=now_s - self.verified_s)
        delta = TokenDelta(
            request_id=self.key[0],
            attempt=self.key[1],
            index=self.next_index,
            tokens=tokens,
            finish_reason=new.finish_reason,
            num_cached_tokens=num_cached_tokens,
            timings=timings,
            prompt_logprobs=prompt_logprobs,
            beams=[Beam(tokens=list(one.tokens), finish_reason=one.finish_reason, score=one.score) for one in new.beams]
            or None,
        )
        self.next_index += len(tokens)
        return delta
