"""One request in the gateway: what its client asks for, and the output so far of each of its sequences.

It also keeps where its time went, for metrics and for clients that ask with ``x-kvrelay-timings: 1``. The gateway's own times
are differences on its monotonic clock; workers measure their parts on their own clocks. The rest is the network and the
gateway's work.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvrelay.common.adapter_files import AdapterRef
from kvrelay.common.fair_queue import Flow
from kvrelay.common.retention import Retention
from kvrelay.common.sampling import SamplingOptions, SamplingParams
from kvrelay.gateway.errors import ApiError, RequestTimeoutError
from kvrelay.gateway.relay.failover import Avoidance
from kvrelay.gateway.routing.prefixes import RequestPrefix
from kvrelay.gateway.routing.ways import Reason
from kvrelay.gateway.workers.worker import Worker
from kvrelay.wire.messages import Timings

TIMINGS_HEADER = "x-kvrelay-timings"

_MAX_NOTES = 16  # of attempts


@dataclass(slots=True)
class AttemptNote:
    """One attempt: where it went, when, and how it ended. Times are on the gateway's monotonic clock."""

    workers: tuple[str, ...]  # addresses; the first is sent to
    reason: str  # why there
    begun_s: float
    num_output_tokens: int  # that the client had before
    number: int  # from 1 on
    ended_s: float | None = None
    outcome: str = ""  # as the metrics call it, once it is over
    heard: list[tuple[float, Timings]] = field(default_factory=list)  # what its workers measured, and when that came


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

    def on_parts(self, timings: Timings, now_s: float) -> dict[str, float]:
        """What a worker of the last attempt reports; returned are the parts that are new."""
        self.notes[-1].heard.append((now_s, timings))
        new = {name: value for name, value in parts_of(timings).items() if name not in self.parts}
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


def parts_of(timings: Timings) -> dict[str, float]:
    """What of queue, prefill, transfer and first_step a worker measured, in seconds."""
    measured = {
        "queue": timings.queue_s,
        "prefill": timings.prefill_s,
        "transfer": timings.transfer_s,
        "first_step": timings.first_step_s,
    }
    return {name: value for name, value in measured.items() if value is not None}


class PromptShare:
    """The choices of one prompt (``n``, ``best_of``) compute it once: the first one goes ahead, the others follow its K/V.

    As soon as its K/V lie verified on a decode worker, the others are sent there: they find all full blocks of the prompt in that
    worker's prefix cache, and compute what is left. Every choice is a request with attempts of its own; where the first one's
    worker has no room for them, or is lost, they are routed as anybody. Lives on the gateway's asyncio loop.
    """

    def __init__(self) -> None:
        self._is_settled = asyncio.Event()
        self.decode_address: str | None = None  # where the prompt's K/V lie, as far as known

    def settle(self, decode_address: str | None) -> None:
        """The first choice's K/V lie on that worker; or, with None, it is over. The first word counts."""
        if not self._is_settled.is_set():
            self.decode_address = decode_address
            self._is_settled.set()

    async def settled(self) -> None:
        """Returns when it is known where the K/V lie, or that nobody will know."""
        await self._is_settled.wait()


class GenerationSpec(SamplingOptions, frozen=True, kw_only=True):
    """What a client asks for, whichever API it speaks. All sequences of a body share it.

    Ranges of single fields are checked by whoever parsed them; what depends on the model or on other fields is not yet.
    """

    max_tokens: int | None = None  # None: as many as fit
    max_tokens_param: str = "max_tokens"  # what the client calls it
    shortens: bool = False  # where fewer fit, that is what is meant
    seed: int | None = None  # None: the gateway draws one
    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # beside the model's own end tokens
    ignore_eos: bool = False
    includes_stop: bool = False  # what ends the text is part of it
    keeps_special: bool = False  # special tokens are part of the text
    kept_tokens: tuple[str, ...] = ()  # special tokens that are, even so: what marks a tool call, for instance
    bad_words: tuple[str, ...] = ()
    num_choices: int = 1  # returned …
    best_of: int = 1  # … of so many
    num_logprobs: int | None = None
    guide_param: str | None = None  # the client's field that the guide was made from, where that is one
    has_watermark: bool = False
    priority: int = 0  # that the client asks for
    retention: Retention | None = None  # how long the KV should stay cached
    cache_salt: str = ""  # only requests with the same one share cached KV
    truncate: int | None = None  # only so many of the prompt's last tokens are used

    @property
    def num_sequences(self) -> int:
        """How many are generated of each prompt."""
        return 1 if self.beam_search is not None else max(self.best_of, self.num_choices)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an attempt goes, and why there."""

    prefill: Worker | None  # None: the decode worker computes the prompt itself
    decode: Worker
    reason: Reason
    num_to_compute: int  # of the prompt, by whoever computes it, as far as one knows
    max_uncached_tokens: int | None = None  # as in Submit

    @property
    def workers(self) -> list[Worker]:
        """Who takes part, the one that the attempt is sent to first."""
        return [self.decode] if self.prefill is None else [self.prefill, self.decode]

    @property
    def way(self) -> str:
        """As metrics call it."""
        return "local" if self.prefill is None else "hand_off"


class GenerationRequest(msgspec.Struct, eq=False):
    """One sequence to generate, validated; and what it has achieved over all its attempts, which the relay fills in."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    timings: RequestTimings  # filled while it runs
    spec: GenerationSpec = GenerationSpec()
    timeout_s: float = math.inf  # of all of it; the relay bounds it
    share: PromptShare | None = None  # with the other choices of the prompt
    flow: Flow = Flow()
    trace_id: str = ""  # of the trace that it is recorded in; empty: in none
    adapter: AdapterRef | None = None  # what computes it; None: the model as it is
    # While it runs:
    deadline_s: float = math.inf
    prefix: RequestPrefix = msgspec.field(
        default_factory=lambda: RequestPrefix(None, ())
    )  # whose caches have how much of it
    place: Place | None = None  # for the next attempt, if it has one already
    output: list[int] = msgspec.field(default_factory=list)
    attempt: int = 0
    num_failures: int = 0
    has_moved: bool = False  # from a decode worker that had no room for it any more; once is enough
    was_asked_back: bool = False  # from a prefill worker where it waited; once is enough
    avoidance: Avoidance = msgspec.field(default_factory=Avoidance)
    has_prompt_logprobs: bool = False
    num_cached_tokens: int | None = None  # of the prompt, that nobody computed for this request
    waits_since_s: float | None = None  # when room was first missing; None once an attempt gets further than that

    @property
    def log_context(self) -> dict[str, Any]:
        """What a log line about it carries."""
        return {"request_id": self.request_id, "attempt": self.attempt, "trace_id": self.trace_id}

    @property
    def is_first(self) -> bool:
        """Whether this is the choice that the prompt is computed, and counted, for."""
        return self.sampling.choice == 0

    @property
    def is_silent(self) -> bool:
        """Whether no output is wanted: the one token that is generated is left out."""
        return self.spec.max_tokens == 0

    @property
    def follows(self) -> bool:
        """Whether the prompt is computed for another choice of it, already."""
        return self.share is not None and self.sampling.choice > 0

    @property
    def max_len(self) -> int:
        """Tokens of prompt and output, if all of it is generated."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens

    def settle(self, decode_address: str | None) -> None:
        """Tell the prompt's other choices where its K/V lie, or, with None, that they must not wait for that any more."""
        if self.share is not None and not self.follows:
            self.share.settle(decode_address)

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing left to generate."""
        return len(self.output) >= self.sampling.max_tokens

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether the prompt's log probabilities are asked for and not here yet."""
        return self.sampling.num_prompt_logprobs is not None and not self.has_prompt_logprobs

    @property
    def next_sampling(self) -> SamplingParams:
        """Of the next attempt: what the client has already is not computed again."""
        return self.sampling.after_prefill() if self.has_prompt_logprobs else self.sampling

    @property
    def num_tokens(self) -> int:
        """Of prompt and output so far."""
        return len(self.prompt_token_ids) + len(self.output)

    def timed_out(self) -> ApiError:
        """The error for a client whose request's time is up."""
        return RequestTimeoutError(
            f"the request took longer than {self.timeout_s:g} s; ask for fewer tokens, or give it more time"
        )
