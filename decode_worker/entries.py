"""One attempt as the decode worker's service sees it: its lease, and what the gateway has been told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvrelay.common.sampling import SampledToken
from kvrelay.wire.messages import Beam, Timings, TokenDelta
from kvrelay.worker.entries import Entry
from kvrelay.worker.scheduler import Progress


@dataclass(slots=True, eq=False, kw_only=True)
class DecodeEntry(Entry):
    """One attempt on a decode worker."""

    next_index: int  # output position of the next token to send
    unsent: list[SampledToken] = field(default_factory=list)  # the committed first token, until the next one is there
    first: SampledToken | None = None  # of a beam search that was handed over: the committed one, with its candidates
    lease_id: int | None = None
    verified_s: float | None = None
    transfer_s: float | None = None
    num_cached_tokens: int | None = None
    has_sent: bool = False

    def debug(self) -> dict[str, Any]:
        """For /debug/kv."""
        return {"phase": self.phase.value, "lease_id": self.lease_id, "sent": self.next_index}

    def delta(self, new: Progress, now_s: float) -> TokenDelta:
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
                timings = Timings(queue_s=started_s - self.sequence.arrival_s, prefill_s=now_s - started_s)
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
