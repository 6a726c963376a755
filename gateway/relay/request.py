"""One request in the gateway: what its client asks for, and the output of each of its sequences so far.

It also records where its time went, for metrics and for clients that ask with ``x-kvrelay-timings: 1``. The gateway's own times are
differences on its monotonic clock. Workers measure their parts on their own clocks. The rest is the network and the gateway's work.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvrelay.common.adapter_files import AdapterRef
from kvrelay.common.fair_queue import Flow
from kvrelay.common.images import PromptImage
from kvrelay.common.retention import Retention
from kvrelay.common.sampling import SamplingOptions, SamplingParams
from kvrelay.gateway.errors import ApiError, RequestTimeoutError
from kvrelay.gateway.relay.failover import Avoidance
from kvrelay.gateway.routing.prefixes import RequestPrefix
from kvrelay.gateway.routing.ways import Reason
from kvrelay.gateway.workers.worker import Worker
from kvrelay.wire.messages import Timings

TIMINGS_HEADER = "x-kvrelay-timings"

_MAX_NOTES = 16  # attempts that are kept


@dataclass(slots=True)
class AttemptNote:
    """One attempt: its workers, its times, and how it ended. Times are on the gateway's monotonic clock."""

    workers: tuple[str, ...]  # addresses; the attempt is sent to the first
    reason: str  # why these workers
    begun_s: float
    num_output_tokens: int  # output tokens before this attempt
    number: int  # from 1 on
    ended_s: float | None = None
    outcome: str = ""  # the label in the metrics, once it is over
    # What its workers measured, with the time of arrival.
    heard: list[tuple[float, Timings]] = field(default_factory=list)


@dataclass(slots=True)
class RequestTimings:
    """The times of a running request. Parts are those of the attempt that first reported them."""

    received_s: float  # when the request's head had been read
    prepared_s: float | None = None  # checked, rendered and tokenized
    placed_s: float | None = None  # it got its place on workers
    submitted_s: float | None = None  # first attempt
    first_token_s: float | None = None
    last_token_s: float | None = None  # of the latest tokens
    second_token_s: float | None = None
    num_attempts: int = 0
    parts: dict[str, float] = field(default_factory=dict)  # queue, prefill, transfer, first_step
    notes: list[AttemptNote] = field(default_factory=list)  # the first and the latest attempts

    def on_attempt(self, note: AttemptNote) -> AttemptNote:
        """Record the begin of an attempt. Returns ``note``, which the caller completes at the attempt's end."""
        if len(self.notes) == _MAX_NOTES:
            del self.notes[_MAX_NOTES // 2]
        self.notes.append(note)
        return note

    def on_submit(self, now_s: float) -> float | None:
        """Record that an attempt is sent. Returns the time since the request came if it is the first, else None."""
        self.num_attempts += 1
        if self.submitted_s is not None:
            return None
        self.submitted_s = now_s
        return now_s - self.received_s

    def on_parts(self, timings: Timings, now_s: float) -> dict[str, float]:
        """Record what a worker of the last attempt reports. Returns the parts that are new."""
        self.notes[-1].heard.append((now_s, timings))
        new = {name: value for name, value in parts_of(timings).items() if name not in self.parts}
        self.parts |= new
        return new

    def on_tokens(self, now_s: float) -> float | None:
        """Record that tokens go to the client. Returns the time since the tokens before; None for the first ones."""
        before_s, self.last_token_s = self.last_token_s, now_s
        if before_s is None:
            self.first_token_s = now_s
            return None
        if self.second_token_s is None:
            self.second_token_s = now_s
        return now_s - before_s

    def body(self) -> dict[str, object]:
        """The times in seconds, as clients get them; null for what did not happen."""
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
    """The durations in seconds of queue, prefill, transfer and first_step that a worker measured."""
    measured = {
        "queue": timings.queue_s,
        "prefill": timings.prefill_s,
        "transfer": timings.transfer_s,
        "first_step": timings.first_step_s,
    }
    return {name: value for name, value in measured.items() if value is not None}


class PromptShare:
    """Lets the choices of one prompt (``n``, ``best_of``) compute it once: the others wait for the first choice's K/V.

    As soon as these K/V are verified on a decode worker, the others go there. They find all full blocks of the prompt in that
    worker's prefix cache and compute the rest. Every choice is a request with its own attempts. If the first choice's worker has no
    room for the others, or is lost, they are routed like any request. Lives on the gateway's asyncio loop.
    """

    def __init__(self) -> None:
        self._is_settled = asyncio.Event()
        self.decode_address: str | None = None  # the worker that has the prompt's K/V, if known

    def settle(self, decode_address: str | None) -> None:
        """The first choice's K/V are on that worker; None: the first choice is over. Only the first call counts."""
        if not self._is_settled.is_set():
            self.decode_address = decode_address
            self._is_settled.set()

    async def settled(self) -> None:
        """Returns once it is known where the K/V are, or that there will be none."""
        await self._is_settled.wait()


class GenerationSpec(SamplingOptions, frozen=True, kw_only=True):
    """What a client asks for, in any API. All sequences of a body share it.

    The parser of the body has checked the ranges of single fields. Checks that depend on the model or on several fields follow
    later.
    """

    max_tokens: int | None = None  # None: as many as fit
    max_tokens_param: str = "max_tokens"  # the client's name of the field
    shortens: bool = False  # if fewer fit, generate as many as fit
    seed: int | None = None  # None: the gateway draws one
    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # in addition to the model's end tokens
    ignore_eos: bool = False
    includes_stop: bool = False  # the stop string or token is part of the text
    keeps_special: bool = False  # special tokens are part of the text
    kept_tokens: tuple[str, ...] = ()  # special tokens that always stay in the text, such as marks of a tool call
    continues_text: bool = True  # the output goes on with the prompt's text; False: it is a message of its own
    bad_words: tuple[str, ...] = ()
    num_choices: int = 1  # choices that are returned
    best_of: int = 1  # choices that are generated
    num_logprobs: int | None = None
    guide_param: str | None = None  # the client's field that the guide was made from, if there is one
    image_params: tuple[str, ...] = ()  # the client's fields that the prompt's images came in, in order
    has_watermark: bool = False
    priority: int = 0  # the priority that the client asks for
    retention: Retention | None = None  # how long the KV should stay cached
    cache_salt: str = ""  # only requests with the same one share cached KV
    truncate: int | None = None  # use only this many of the prompt's last tokens

    @property
    def num_sequences(self) -> int:
        """The number of sequences to generate for each prompt."""
        return 1 if self.beam_search is not None else self.best_of


@dataclass(frozen=True, slots=True)
class Place:
    """The workers of an attempt, and why they were chosen."""

    prefill: Worker | None  # None: the decode worker computes the prompt itself
    decode: Worker
    reason: Reason
    num_to_compute: int  # prompt tokens that the computing worker has not cached, as far as known
    max_uncached_tokens: int | None = None  # as in Submit

    @property
    def workers(self) -> list[Worker]:
        """The workers that take part; the attempt is sent to the first."""
        return [self.decode] if self.prefill is None else [self.prefill, self.decode]

    @property
    def way(self) -> str:
        """The way's label in the metrics."""
        return "local" if self.prefill is None else "hand_off"


class GenerationRequest(msgspec.Struct, eq=False):
    """One validated sequence to generate, and its progress over all attempts, which the relay fills in."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    timings: RequestTimings  # filled while the request runs
    spec: GenerationSpec = GenerationSpec()
    timeout_s: float = math.inf  # for the whole request; the relay bounds it
    share: PromptShare | None = None  # shared with the other choices of the prompt
    flow: Flow = Flow()
    trace_id: str = ""  # of the trace that records it; empty: none
    adapter: AdapterRef | None = None  # the adapter to compute it with; None: the plain model
    images: tuple[PromptImage, ...] = ()  # of the prompt, in order; its choices share them
    # What went by of its time before it was a request, for its images:
    waited_s: float = 0.0  # until there was a worker that reads images
    spent_s: float = 0.0  # to fetch them, and to ask a worker about them
    # While it runs:
    deadline_s: float = math.inf
    prefix: RequestPrefix = msgspec.field(
        default_factory=lambda: RequestPrefix(None, ())
    )  # the workers that have a prefix of it cached
    place: Place | None = None  # the place of the next attempt, if it has one already
    output: list[int] = msgspec.field(default_factory=list)  # empty in a beam search
    num_beam_tokens: int = 0  # of the results of a beam search, which come at its end
    attempt: int = 0
    num_failures: int = 0
    has_moved: bool = False  # from a decode worker that ran out of blocks; a request moves at most once
    was_asked_back: bool = False  # from a prefill worker; a request is asked back at most once
    avoidance: Avoidance = msgspec.field(default_factory=Avoidance)
    has_prompt_logprobs: bool = False
    num_cached_tokens: int | None = None  # prompt tokens that no worker computed for this request
    waits_since_s: float | None = None  # when there was first no room; None once an attempt gets further

    @property
    def log_context(self) -> dict[str, Any]:
        """The fields that its log lines carry."""
        return {"request_id": self.request_id, "attempt": self.attempt, "trace_id": self.trace_id}

    @property
    def is_first(self) -> bool:
        """Whether this choice computes the prompt and counts its tokens."""
        return self.sampling.choice == 0

    @property
    def is_silent(self) -> bool:
        """Whether no output is wanted. One token is generated all the same, and left out."""
        return self.spec.max_tokens == 0

    @property
    def follows(self) -> bool:
        """Whether another choice of the prompt computes it."""
        return self.share is not None and self.sampling.choice > 0

    @property
    def max_len(self) -> int:
        """The tokens of prompt and output if all of the output is generated."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens

    def settle(self, decode_address: str | None) -> None:
        """Tell the prompt's other choices where its K/V are. With None, tell them not to wait for that any more."""
        if self.share is not None and not self.follows:
            self.share.settle(decode_address)

    @property
    def is_complete(self) -> bool:
        """Whether all output has been generated."""
        return len(self.output) >= self.sampling.max_tokens

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether the prompt's log probabilities were asked for and have not arrived."""
        return self.sampling.num_prompt_logprobs is not None and not self.has_prompt_logprobs

    @property
    def num_output_tokens(self) -> int:
        """The tokens generated so far, as far as workers have told."""
        return len(self.output) + self.num_beam_tokens

    @property
    def next_sampling(self) -> SamplingParams:
        """The sampling parameters of the next attempt, which does not repeat the client's output so far."""
        return self.sampling.after_prefill() if self.has_prompt_logprobs else self.sampling

    @property
    def num_tokens(self) -> int:
        """The tokens of prompt and output so far."""
        return len(self.prompt_token_ids) + len(self.output)

    def timed_out(self) -> ApiError:
        """The error for a client whose request's time is up."""
        return RequestTimeoutError(
            f"the request took longer than {self.timeout_s:g} s; ask for fewer tokens, or give it more time"
        )
