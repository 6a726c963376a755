"""What became of requests: when each step was, on which workers, and how it ended. Never a text, and never a token.

Those that run are asked themselves; of those that are over the last ones are kept. Lives on the gateway's asyncio loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import msgspec

from kvrelay.common.clock import Clock
from kvrelay.gateway.http.request import ApiRequest
from kvrelay.gateway.relay.request import GenerationRequest
from kvrelay.gateway.relay.timings import RequestTimings

NUM_KEPT = 1000
_NUM_FAILED = 20
_MAX_SEQUENCES = 8  # of one request, of which more is told than that they were there


@dataclass(frozen=True, slots=True)
class SequenceRecord:
    """One sequence of a request, as far as it has come."""

    timings: RequestTimings  # still filled, while it runs
    num_prompt_tokens: int
    num_cached_tokens: int | None
    num_output_tokens: int
    num_failures: int

    @classmethod
    def of(cls, sequence: GenerationRequest) -> SequenceRecord:
        """Keeps nothing of the prompt and the output but their lengths."""
        return cls(
            sequence.timings,
            len(sequence.prompt_token_ids),
            sequence.num_cached_tokens,
            len(sequence.output),
            sequence.num_failures,
        )


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One HTTP request. Times are on the gateway's monotonic clock."""

    request_id: str
    route: str | None  # None: it runs
    received_s: float
    ended_s: float | None  # None: it runs
    status: int  # of the answer; 0: none has begun
    error: str | None  # the code of the error that it was answered with
    cut: str | None  # why its answer ended in the middle
    num_sequences: int
    sequences: Sequence[SequenceRecord]  # of these, the first ones

    @classmethod
    def of(cls, request: ApiRequest, route: str | None = None, ended_s: float | None = None) -> RequestRecord:
        """As it stands."""
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
        """Whether an operator may want to know why: an error that is not the client's, or an attempt that went wrong."""
        return self.status >= 500 or self.cut is not None or any(one.num_failures for one in self.sequences)


class Records:
    """Of one gateway. Implements :class:`kvrelay.gateway.http.edge.Observer`."""

    def __init__(self, clock: Clock, wall_clock: Callable[[], float]) -> None:
        """``clock``: that of requests. ``wall_clock``: seconds since 1970."""
        self._clock = clock
        self._wall_clock = wall_clock
        self._running: dict[int, ApiRequest] = {}  # by what is unique: a client may choose the same id twice
        self._ended: deque[RequestRecord] = deque(maxlen=NUM_KEPT)
        self._failed: deque[RequestRecord] = deque(maxlen=_NUM_FAILED)

    def begin(self, request: ApiRequest) -> None:
        """It is let in."""
        self._running[id(request)] = request

    def end(self, request: ApiRequest, route: str) -> None:
        """Requests that asked workers for something are kept, and those that could not be read well enough to do so."""
        was_let_in = self._running.pop(id(request), None) is not None
        if not was_let_in or not (request.sequences or (request.method == "POST" and request.error is not None)):
            return
        record = RequestRecord.of(request, route, self._clock())
        self._ended.append(record)
        if record.has_failed:
            self._failed.append(record)

    @property
    def running(self) -> list[ApiRequest]:
        """Those that have asked workers for something."""
        return [request for request in self._running.values() if request.sequences]

    @property
    def ended(self) -> Iterator[RequestRecord]:
        """The newest first."""
        return reversed(self._ended)

    @property
    def failed(self) -> Iterator[RequestRecord]:
        """Those of them that an operator may want to know of, the newest first; some are older than all that is kept."""
        return reversed(self._failed)

    def find(self, request_id: str) -> list[Waterfall]:
        """All requests that came with that id, the newest first; maybe none."""
        found = (RequestRecord.of(one) for one in self.running if one.request_id == request_id)
        return [self.told(one) for one in chain(found, self.ended) if one.request_id == request_id]

    def newest(self, limit: int) -> list[Waterfall]:
        """Those that run, then those that ended last: ``limit`` of both."""
        running = (RequestRecord.of(one) for one in reversed(self.running))
        return [self.told(one) for one in islice(chain(running, self.ended), limit)]

    def told(self, record: RequestRecord) -> Waterfall:
        """The record, for people and programs."""
        zero_s = record.received_s

        def since(moment_s: float | None) -> float | None:
            return None if moment_s is None else round(moment_s - zero_s, 6)

        sequences = [
            SequenceTold(
                num_prompt_tokens=one.num_prompt_tokens,
                num_cached_tokens=one.num_cached_tokens,
                num_output_tokens=one.num_output_tokens,
                prepared_s=since(one.timings.prepared_s),
                placed_s=since(one.timings.placed_s),
                submitted_s=since(one.timings.submitted_s),
                first_token_s=since(one.timings.first_token_s),
                last_token_s=since(one.timings.last_token_s),
                parts_s=one.timings.parts,
                num_attempts=one.timings.num_attempts,
                num_failures=one.num_failures,
                attempts=[
                    AttemptTold(
                        workers=note.workers,
                        reason=note.reason,
                        num_output_tokens=note.num_output_tokens,
                        begun_s=since(note.begun_s) or 0.0,
                        ended_s=since(note.ended_s),
                        outcome=note.outcome,
                    )
                    for note in one.timings.notes
                ],
            )
            for one in record.sequences
        ]
        return Waterfall(
            request_id=record.request_id,
            route=record.route,
            received_at=round(self._wall_clock() - (self._clock() - zero_s), 3),
            ended_s=since(record.ended_s),
            status=record.status,
            error=record.error,
            cut=record.cut,
            num_sequences=record.num_sequences,
            sequences=sequences,
        )


class AttemptTold(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt. Times are seconds since the request's head had been read."""

    workers: tuple[str, ...]  # addresses; with two, the first computes the prompt and hands its KV over
    reason: str  # why there
    num_output_tokens: int  # that the client had before
    begun_s: float
    ended_s: float | None
    outcome: str  # as in kvrelay_attempts_total; empty while it runs


class SequenceTold(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence. Times are seconds since the request's head had been read; null is what has not happened."""

    num_prompt_tokens: int
    num_cached_tokens: int | None
    num_output_tokens: int
    prepared_s: float | None  # checked, rendered and tokenized
    placed_s: float | None  # it has its place on workers
    submitted_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    parts_s: dict[str, float]  # queue, prefill, transfer, first_step, as workers measured them
    num_attempts: int
    num_failures: int
    attempts: list[AttemptTold]  # the first ones and the last ones


class Waterfall(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a request."""

    request_id: str
    route: str | None
    received_at: float  # seconds since 1970
    ended_s: float | None  # since then; null while it runs
    status: int  # of the answer; 0 if none has begun
    error: str | None  # the code of the error that it was answered with
    cut: str | None  # why its answer ended in the middle
    num_sequences: int
    sequences: list[SequenceTold]
