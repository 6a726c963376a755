"""Where one request's time went, up to its second token; for metrics, and for clients that ask with ``x-kvrelay-timings: 1``.

The gateway's own times are differences on its monotonic clock; the parts that workers report were measured on theirs. What lies
between them (network, and the gateway's own work) is the rest that is missing to the whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.wire.messages import Timings

HEADER = "x-kvrelay-timings"

_MAX_NOTES = 16  # of attempts


@dataclass(slots=True)
class AttemptNote:
    """One attempt: where it went, when, and how it ended. Times are on the gateway's monotonic clock."""

    workers: tuple[str, ...]  # addresses; the first is sent to
    reason: str  # why there
    begun_s: float
    num_output_tokens: int  # that the client had before
    ended_s: float | None = None
    outcome: str = ""  # as the metrics call it, once it is over


@dataclass(slots=True)
class RequestTimings:
    """Filled while a request runs. Parts are those of the attempt that first reported them."""

    received_s: float  # when the request's head had been read
    prepared_s: float | None = None  # checked, rendered and tokenized
    placed_s: float | None = None  # it has its place on workers
    submitted_s: float | None = None  # first attempt
    first_token_s: float | None = None
    last_token_s: float | None = None  # of the tokens so far
    second_token_s: float | None = None
    num_attempts: int = 0
    parts: dict[str, float] = field(default_factory=dict)  # queue, prefill, transfer, first_step
    notes: list[AttemptNote] = field(default_factory=list)  # of the first attempts and the last ones

    def on_attempt(self, note: AttemptNote) -> AttemptNote:
        """An attempt begins; ``note`` is returned, and completed by whoever sees its end."""
        if len(self.notes) == _MAX_NOTES:
            del self.notes[_MAX_NOTES // 2]
        self.notes.append(note)
        return note

    def on_submit(self, now_s: float) -> float | None:
        """An attempt goes to a worker; returned is how long that took since the request came, if it is the first."""
        self.num_attempts += 1
        if self.submitted_s is not None:
            return None
        self.submitted_s = now_s
        return now_s - self.received_s

    def on_parts(self, timings: Timings) -> dict[str, float]:
        """What a worker reports; returned are the parts that are new."""
        reported = {
            "queue": timings.queue_s,
            "prefill": timings.prefill_s,
            "transfer": timings.transfer_s,
            "first_step": timings.first_step_s,
        }
        new = {name: value for name, value in reported.items() if value is not None and name not in self.parts}
        self.parts |= new
        return new

    def on_tokens(self, now_s: float) -> float | None:
        """Tokens are on their way to the client; returned is how long after those before, None if they are the first."""
        before_s, self.last_token_s = self.last_token_s, now_s
        if before_s is None:
            self.first_token_s = now_s
            return None
        if self.second_token_s is None:
            self.second_token_s = now_s
        return now_s - before_s

    def body(self) -> dict[str, object]:
        """Seconds, as they are sent to clients; null is what did not happen."""
        return {
            "attempts": self.num_attempts,
            "accept_s": self._since_received(self.submitted_s),
            "queue_s": self.parts.get("queue"),
            "prefill_s": self.parts.get("prefill"),
            "transfer_s": self.parts.get("transfer"),
            "first_step_s": self.parts.get("first_step"),
            "ttft_s": self._since_received(self.first_token_s),
            "second_token_s": self._since_received(self.second_token_s),
        }

    def _since_received(self, moment_s: float | None) -> float | None:
        return None if moment_s is None else moment_s - self.received_s
