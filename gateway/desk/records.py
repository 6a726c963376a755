"""The running and the latest requests: when each step happened, on which workers, and how it ended. Never holds a text or a token.

A running request is read when an operator asks. The latest finished ones are kept. Lives on the gateway's asyncio loop.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from kvrelay.common.clock import Clock
from kvrelay.gateway.http.request import ApiRequest
from kvrelay.gateway.relay.request import AttemptNote, GenerationRequest, RequestTimings, parts_of

NUM_KEPT = 1000
_NUM_FAILED = 20
_MAX_SEQUENCES = 8  # sequences of one request that are described in detail


@dataclass(frozen=True, slots=True)
class SequenceRecord:
    """One sequence of a request so far."""

    timings: RequestTimings  # filled while the sequence runs
    num_prompt_tokens: int
    num_cached_tokens: int | None
    num_output_tokens: int
    num_failures: int

    @classmethod
    def of(cls, sequence: GenerationRequest) -> SequenceRecord:
        """Keeps only the lengths of the prompt and the output."""
        return cls(
            sequence.timings,
            len(sequence.prompt_token_ids),
            sequence.num_cached_tokens,
            sequence.num_output_tokens,
            sequence.num_failures,
        )


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One HTTP request. Times are on the gateway's monotonic clock."""

    request_id: str
    route: str | None  # None: it is running
    received_s: float
    ended_s: float | None  # None: it is running
    status: int  # of the answer; 0: no answer has begun
    error: str | None  # the code of the error in the answer
    cut: str | None  # why its answer ended in the middle
    num_sequences: int
    sequences: Sequence[SequenceRecord]  # the first sequences

    @classmethod
    def of(cls, request: ApiRequest, route: str | None = None, ended_s: float | None = None) -> RequestRecord:
        """The current state of a request."""
        return cls(
            request.request_id,
            route,
            request.received_s,
            ended_s,
            request.status,
            None if request.error is None else request.error.code,
            request.cut,
            len(request.sequences),
            [SequenceRecord.of(one) for one in request.sequences[:_MAX_SEQUENCES]],
        )

    @property
    def has_failed(self) -> bool:
        """Whether an operator may want to know why: an error that is not the client's, or a failed attempt."""
        return self.status >= 500 or self.cut is not None or any(one.num_failures for one in self.sequences)


class Records:
    """The request records of one gateway. Implements :class:`kvrelay.gateway.http.edge.Observer`."""

    def __init__(self, clock: Clock, wall_clock: Callable[[], float]) -> None:
        """``clock``: the clock of requests. ``wall_clock``: seconds since 1970."""
        self._clock = clock
        self._wall_clock = wall_clock
        self._running: dict[int, ApiRequest] = {}  # by the object's id: a client may use one request id twice
        self._ended: deque[RequestRecord] = deque(maxlen=NUM_KEPT)
        self._failed: deque[RequestRecord] = deque(maxlen=_NUM_FAILED)

    def begin(self, request: ApiRequest) -> None:
        """Keep a request that was let in."""
        self._running[id(request)] = request

    def end(self, request: ApiRequest, route: str) -> None:
        """Keep a request that asked workers for something, or whose body could not be read."""
        was_let_in = self._running.pop(id(request), None) is not None
        if not was_let_in or not (request.sequences or (request.method == "POST" and request.error is not None)):
            return
        record = RequestRecord.of(request, route, self._clock())
        self._ended.append(record)
        if record.has_failed:
            self._failed.append(record)

    @property
    def running(self) -> list[ApiRequest]:
        """The requests that have asked workers for something."""
        return [request for request in self._running.values() if request.sequences]

    @property
    def ended(self) -> Iterator[RequestRecord]:
        """The finished requests, newest first."""
        return reversed(self._ended)

    @property
    def kept_since_s(self) -> float:
        """All requests that ended after this moment are kept."""
        oldest_s = self._ended[0].ended_s if len(self._ended) == NUM_KEPT else None
        return -math.inf if oldest_s is None else oldest_s

    @property
    def failed(self) -> Iterator[RequestRecord]:
        """The failed requests, newest first. They are kept longer than other finished ones."""
        return reversed(self._failed)

    def find(self, request_id: str) -> list[dict[str, Any]]:
        """All requests with that id, newest first; perhaps none."""
        found = (RequestRecord.of(one) for one in self.running if one.request_id == request_id)
        return [self.told(one) for one in chain(found, self.ended) if one.request_id == request_id]

    def newest(self, limit: int) -> list[dict[str, Any]]:
        """The running requests, then the latest finished ones: at most ``limit`` of both together."""
        running = (RequestRecord.of(one) for one in reversed(self.running))
        return [self.told(one) for one in islice(chain(running, self.ended), limit)]

    def told(self, record: RequestRecord) -> dict[str, Any]:
        """A record as JSON for people and programs. Times are seconds since the request's head had been read.

        Null: it has not happened.
        """
        zero_s = record.received_s

        def since(moment_s: float | None) -> float | None:
            return None if moment_s is None else round(moment_s - zero_s, 6)

        def attempt(note: AttemptNote) -> dict[str, Any]:
            return {
                "number": note.number,
                "workers": note.workers,
                "reason": note.reason,
                "begun_s": since(note.begun_s),
                "ended_s": since(note.ended_s),
                "num_output_tokens_before": note.num_output_tokens,
                "outcome": note.outcome,
                "parts_s": {name: value for _, timings in note.heard for name, value in parts_of(timings).items()},
            }

        def sequence(one: SequenceRecord) -> dict[str, Any]:
            timings = one.timings
            steps = ("prepared_s", "placed_s", "submitted_s", "first_token_s", "last_token_s")
            return {
                "num_prompt_tokens": one.num_prompt_tokens,
                "num_cached_tokens": one.num_cached_tokens,
                "num_output_tokens": one.num_output_tokens,
                **{name: since(getattr(timings, name)) for name in steps},
                "parts_s": timings.parts,  # queue, prefill, transfer, first_step, measured by workers
                "num_attempts": timings.num_attempts,
                "num_failures": one.num_failures,
                "attempts": [attempt(note) for note in timings.notes],  # the first and the last attempts
            }

        return {
            "request_id": record.request_id,
            "route": record.route,
            "received_at": round(self.wall_s(zero_s), 3),  # seconds since 1970
            "ended_s": since(record.ended_s),
            "status": record.status,
            "error": record.error,
            "cut": record.cut,
            "num_sequences": record.num_sequences,
            "sequences": [sequence(one) for one in record.sequences],
        }

    def wall_s(self, moment_s: float) -> float:
        """A time of the clock, in seconds since 1970."""
        return self._wall_clock() - (self._clock() - moment_s)
