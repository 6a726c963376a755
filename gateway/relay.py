"""The life of a request in the gateway: route, submit, take tokens, and try again so that the client does not notice.

An attempt is one try on one pair of workers. When it fails, the next one sends the prompt *and the output so far*, with the same
seed; the noise of sampling depends on positions only, so the text goes on as if nothing had happened. Tokens carry their output
position: what came before is dropped, a gap fails the attempt. Every request ends in exactly one of: a finish reason, or one
ApiError. A request that is given up (the consumer closes the iterator) is cancelled on its workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from kvrelay.common.sampling import FinishReason, SampledToken, SamplingParams
from kvrelay.gateway.admission import Admission
from kvrelay.gateway.errors import (
    ApiError,
    AttemptsFailedError,
    InvalidRequestError,
    RequestTimeoutError,
    UnavailableError,
)
from kvrelay.gateway.failover import Avoidance, blamed_roles
from kvrelay.gateway.load import Key
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.routing import POLICIES, WorkerView
from kvrelay.gateway.settings import RelaySettings
from kvrelay.gateway.timings import RequestTimings
from kvrelay.gateway.worker import AttemptEvent, DeadlinePassed, GaveUp, Inbox, Worker, WorkerLost
from kvrelay.gateway.workers import WorkerPool, decode_target
from kvrelay.wire.messages import Cancel, Cancelled, Failed, FailureCode, HandedOver, Role, Submit, Timings, TokenDelta

logger = logging.getLogger(__name__)

_AVOID_S = 2.0  # how long a request avoids what failed it, unless that comes up anew: also if it is the only worker
_DEFAULT_RETRY_S = 0.5
_RETRY_AFTER_S = 1.0
_SHORTAGES = (FailureCode.NO_ROOM, FailureCode.QUEUE_FULL, FailureCode.DRAINING)  # waiting helps; nothing is broken


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A validated request."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    timings: RequestTimings = field(default_factory=RequestTimings)  # filled while it runs
    timeout_s: float | None = None  # the client's own; no longer than that of the settings counts

    @property
    def max_len(self) -> int:
        """Tokens of prompt and output, if all of it is generated."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens


class OutputDelta(msgspec.Struct, frozen=True, gc=False):  # one per token: half a dataclass's cost, nothing to collect
    """New tokens for the client. ``num_cached_tokens`` and ``timings`` come with the tokens that first know them."""

    tokens: list[SampledToken]
    finish_reason: FinishReason | None
    num_cached_tokens: int | None
    timings: Timings | None


@dataclass(slots=True)
class _Progress:
    """What a request has achieved over all its attempts."""

    request: GenerationRequest
    timeout_s: float  # of all of it
    deadline_s: float
    place: tuple[Worker | None, Worker] | None = None  # for the next attempt, if it has one already
    output: list[int] = field(default_factory=list)
    attempt: int = 0
    num_failures: int = 0
    avoidance: Avoidance = field(default_factory=Avoidance)
    waits_since_s: float | None = None  # when room was first missing; None once an attempt gets further than that

    @property
    def is_complete(self) -> bool:
        return len(self.output) >= self.request.sampling.max_tokens


class _AttemptFailedError(Exception):
    """An attempt is over without a finish reason; another may follow."""

    def __init__(
        self, code: FailureCode, detail: str, blamed: Sequence[str] = (), retry_after_s: float | None = None
    ) -> None:
        super().__init__(detail)
        self.code = code
        self.blamed = blamed  # address of the worker, or addresses of the pair, that should not be asked again at once
        self.retry_after_s = retry_after_s


class Relay:
    """Runs requests over a worker pool."""

    def __init__(self, pool: WorkerPool, settings: RelaySettings, metrics: GatewayMetrics) -> None:
        self._pool = pool
        self._settings = settings
        self._metrics = metrics
        self._policy = POLICIES[settings.policy]
        self._sequence_number = 0
        self.admission = Admission(settings.max_queued, settings.room_timeout_s, pool.changed, metrics)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[OutputDelta]:
        """The output of ``request``, its last delta with a finish reason. Raises ApiError if it cannot be had.

        Close the iterator (``aclosing``) to cancel.
        """
        progress = await self._admitted(request)
        placed_s = time.monotonic()
        try:
            while True:
                prefill, decode = progress.place or await self._find_workers(progress)
                progress.place = None
                progress.attempt += 1
                try:
                    async with aclosing(self._attempt(progress, prefill, decode)) as deltas:
                        async for delta in deltas:
                            if delta.finish_reason is not None:
                                # Before the yield: whoever has the last delta need not come back for more.
                                self._metrics.attempts.labels("finished").inc()
                            yield delta
                    return
                except _AttemptFailedError as failure:
                    if not progress.is_complete:
                        self._on_failure(progress, failure)
                        continue
                    # Nothing is missing but the word that it is over.
                    self._metrics.attempts.labels("finished").inc()
                is_stopped = progress.output[-1] in request.sampling.stop_token_ids
                yield OutputDelta([], FinishReason.STOP if is_stopped else FinishReason.LENGTH, None, None)
                return
        finally:
            now_s = time.monotonic()
            if progress.output:  # also if a stop string, or its client, ended it: so much it has cost
                num_prompt_tokens, num_output_tokens = len(request.prompt_token_ids), len(progress.output)
                self.admission.pace.on_finished(num_prompt_tokens, num_output_tokens, now_s - placed_s, now_s)

    async def _admitted(self, request: GenerationRequest) -> _Progress:
        """The request with its place on workers. Raises ApiError if it gets none."""
        limit_s = self._settings.request_timeout_s
        timeout_s = limit_s if request.timeout_s is None else min(request.timeout_s, limit_s)
        progress = _Progress(request, timeout_s, asyncio.get_running_loop().time() + timeout_s)
        work = self.admission.pace.work_of(len(request.prompt_token_ids), request.sampling.max_tokens)
        progress.place = await self.admission.place(
            lambda: self._place(progress, work), work, timeout_s, lambda: self._no_room(request.max_len)
        )
        return progress

    def _on_failure(self, progress: _Progress, failure: _AttemptFailedError) -> None:
        self._metrics.attempts.labels(failure.code.value).inc()
        extra = {"request_id": progress.request.request_id, "attempt": progress.attempt}
        # Refused for want of room, many requests ask again twice a second: the counter tells that better than a log.
        level = logging.DEBUG if failure.code in _SHORTAGES else logging.WARNING
        logger.log(level, "an attempt failed (%s): %s", failure.code.value, failure, extra=extra)
        match failure.code:
            case FailureCode.INVALID:
                raise InvalidRequestError(str(failure)) from failure
            case FailureCode.DEADLINE:
                raise _timed_out(progress) from failure
            case _:
                pass  # another attempt may succeed, also after a cancellation: it was not ours
        pause_s = _AVOID_S if failure.retry_after_s is None else failure.retry_after_s
        now_s = time.monotonic()
        progress.avoidance.blame(failure.blamed, now_s, now_s + pause_s)
        if failure.code not in _SHORTAGES:
            progress.num_failures += 1
            progress.waits_since_s = None
        elif progress.waits_since_s is None:
            progress.waits_since_s = asyncio.get_running_loop().time()
        if progress.num_failures >= self._settings.max_attempts:
            raise AttemptsFailedError(
                f"{progress.num_failures} attempts failed, the last one: {failure.code.value}; try again",
                retry_after_s=_RETRY_AFTER_S,
            ) from failure

    # -- routing ---------------------------------------------------------------------------------------------------

    async def _find_workers(self, progress: _Progress) -> tuple[Worker | None, Worker]:
        """A pair of workers, waiting for one if need be. Raises UnavailableError when that takes too long.

        Waits add up over attempts that are refused one after the other.
        """
        loop = asyncio.get_running_loop()
        while True:
            if loop.time() >= progress.deadline_s:
                raise _timed_out(progress)
            give_up_s = progress.deadline_s
            if progress.waits_since_s is not None:
                give_up_s = min(give_up_s, progress.waits_since_s + self._settings.room_timeout_s)
            remaining_s = give_up_s - loop.time()
            if remaining_s <= 0:
                text = self._no_room(progress.request.max_len)
                raise UnavailableError(f"{text}; try again later", retry_after_s=_RETRY_AFTER_S)
            route = self._route(progress)
            if route is not None:
                return route
            if progress.waits_since_s is None:
                progress.waits_since_s = loop.time()
                continue
            self._pool.changed.clear()
            wait_s = min(remaining_s, _DEFAULT_RETRY_S)
            now_s = time.monotonic()
            if (change_s := progress.avoidance.next_change_s(now_s)) is not None:
                wait_s = min(wait_s, change_s - now_s)
            # Not wait_for: up to Python 3.11 it swallows a cancellation that comes with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._pool.changed.wait()

    def _no_room(self, max_len: int) -> str:
        reasons = self._pool.absent() + [reason.split(" (")[0] for reason in self._pool.not_ready()]
        for role, workers in (("prefill", self._pool.prefills), ("decode", self._pool.decodes)):
            if not reasons and workers and not any(worker.holds(max_len) for worker in workers.values()):
                reasons.append(f"no {role} worker that is up holds the {max_len} tokens of prompt and output any more")
        return "; ".join(reasons) or "no worker has room"

    def _place(self, progress: _Progress, work: float) -> tuple[Worker | None, Worker] | None:
        """A pair of workers that would compute the request before long; None while there is none.

        ``work``: the tokens that it will hold, as far as one can know.
        """
        return self._route(progress, backlog_s=self._settings.prefill_backlog_s, num_tokens_to_hold=math.ceil(work))

    def _route(
        self, progress: _Progress, *, backlog_s: float = math.inf, num_tokens_to_hold: int = 0
    ) -> tuple[Worker | None, Worker] | None:
        """A pair of workers; with a bound on what waits there, or blocks to be free, only such as keep it."""
        now_s = time.monotonic()
        num_tokens = len(progress.request.prompt_token_ids) + len(progress.output)
        is_local = self._pool.is_local_only or num_tokens <= self._settings.local_prefill_max_tokens
        prefills = [] if is_local else _views(self._pool.prefills.values(), progress.request.max_len)
        decodes = _views(self._pool.decodes.values(), progress.request.max_len)
        if not math.isinf(backlog_s):
            prefills = [view for view in prefills if view.takes_prompt(backlog_s)]
            decodes = [view for view in decodes if view.takes_sequence(num_tokens_to_hold)]
        if not is_local and not prefills:
            return None
        for worker in self._pool.workers:
            progress.avoidance.forgive(worker.address, worker.up_since_s)
        self._sequence_number += 1
        addresses = [[view.address for view in views] for views in (prefills, decodes)]
        for allowed_prefills, allowed_decodes in progress.avoidance.choices(addresses[0], addresses[1], now_s):
            route = self._policy(
                [view for view in prefills if view.address in allowed_prefills],
                [view for view in decodes if view.address in allowed_decodes],
                num_tokens + 1,
                self._sequence_number,
            )
            if route is not None:
                prefill = None if route.prefill is None else self._pool.prefills[route.prefill]
                return prefill, self._pool.decodes[route.decode]
        return None

    # -- one attempt -----------------------------------------------------------------------------------------------

    async def _attempt(
        self, progress: _Progress, prefill: Worker | None, decode: Worker
    ) -> AsyncGenerator[OutputDelta]:
        request = progress.request
        key = (request.request_id, progress.attempt)
        first = decode if prefill is None else prefill
        involved = [decode] if prefill is None else [prefill, decode]
        token_ids = request.prompt_token_ids + progress.output
        inbox = self._pool.open_attempt(key, involved, len(token_ids) + 1)
        timer = asyncio.get_running_loop().call_at(progress.deadline_s, inbox.put_nowait, DeadlinePassed())
        is_over = False
        try:
            submit = Submit(
                request_id=request.request_id,
                attempt=progress.attempt,
                token_ids=token_ids,
                num_prompt_tokens=len(request.prompt_token_ids),
                sampling=request.sampling,
                decode=None if prefill is None else decode_target(decode),
                timeout_s=progress.deadline_s - asyncio.get_running_loop().time(),
            )
            if (accept_s := request.timings.on_submit()) is not None:
                self._metrics.part_s.labels("accept").observe(accept_s)
            if not first.client.send(submit):
                raise _AttemptFailedError(FailureCode.PEER_LOST, "the worker's link just went down", (first.address,))
            async with aclosing(self._take_tokens(progress, key, inbox, involved)) as deltas:
                async for delta in deltas:
                    is_over = delta.finish_reason is not None
                    yield delta
        finally:
            timer.cancel()
            self._pool.close_attempt(key, involved, len(request.prompt_token_ids) + len(progress.output))
            if not is_over:
                for worker in involved:
                    worker.client.send(Cancel(request_id=key[0], attempt=key[1]))

    async def _take_tokens(
        self, progress: _Progress, key: Key, inbox: Inbox, involved: Sequence[Worker]
    ) -> AsyncGenerator[OutputDelta]:
        is_handed_over = False
        while True:
            event = await inbox.get()
            match event:
                case TokenDelta():
                    if event.timings is not None:
                        self._pool.on_first_token(key, involved)
                        is_handed_over |= event.timings.transfer_s is not None  # only a decode worker that verified it
                    delta = self._accept(progress, event)
                    if delta is not None:
                        yield delta
                    if event.finish_reason is not None:
                        return
                case HandedOver():
                    is_handed_over = True
                case DeadlinePassed():
                    raise _timed_out(progress)
                case WorkerLost(role=Role.PREFILL) if is_handed_over:
                    pass  # the decode worker owns the request; the prefill worker's death does not concern it
                case _:
                    raise _failure(event, involved)

    def _accept(self, progress: _Progress, item: TokenDelta) -> OutputDelta | None:
        """The part of ``item`` that is new; None if nothing is."""
        num_known = len(progress.output)
        if item.index > num_known:
            raise _AttemptFailedError(
                FailureCode.INTERNAL, f"tokens from position {item.index} on came after {num_known} tokens"
            )
        tokens = item.tokens[num_known - item.index :]
        progress.output.extend(token.token_id for token in tokens)
        if tokens:
            progress.waits_since_s = None
        if not tokens and item.finish_reason is None and item.timings is None:
            return None
        return OutputDelta(tokens, item.finish_reason, item.num_cached_tokens, item.timings)


def _timed_out(progress: _Progress) -> ApiError:
    return RequestTimeoutError(
        f"the request took longer than {progress.timeout_s:g} s; ask for fewer tokens, or give it more time"
    )


def _views(workers: Iterable[Worker], num_tokens: int) -> list[WorkerView]:
    """The usable workers that hold a request of ``num_tokens``."""
    return [view for worker in workers if worker.holds(num_tokens) and (view := worker.view())]


def _failure(event: AttemptEvent, involved: Sequence[Worker]) -> _AttemptFailedError:
    match event:
        case GaveUp(role=role, answer=Failed(code=code, detail=detail, retry_after_s=retry_after_s)):
            blamed = blamed_roles(code, role)
            return _AttemptFailedError(code, detail, [w.address for w in involved if w.role in blamed], retry_after_s)
        case GaveUp(answer=Cancelled()):
            return _AttemptFailedError(FailureCode.PEER_LOST, "the worker gave the request up")
        case WorkerLost(address=address, reason=reason):
            return _AttemptFailedError(FailureCode.PEER_LOST, f"{address}: {reason}")  # not asked before it is up again
        case _:
            raise AssertionError(f"unexpected {event}")
