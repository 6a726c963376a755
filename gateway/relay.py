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
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from kvrelay.common.sampling import FinishReason
from kvrelay.gateway.admission import Admission
from kvrelay.gateway.errors import (
    AttemptsFailedError,
    InvalidRequestError,
    OverloadedError,
)
from kvrelay.gateway.failover import blamed_roles
from kvrelay.gateway.load import Key
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.placement import Pair, Placement, views
from kvrelay.gateway.progress import GenerationRequest, OutputDelta, Progress
from kvrelay.gateway.settings import RelaySettings
from kvrelay.gateway.worker import AttemptEvent, DeadlinePassed, GaveUp, Inbox, Worker, WorkerLost
from kvrelay.gateway.workers import WorkerPool, decode_target
from kvrelay.wire.messages import (
    Cancel,
    Cancelled,
    Failed,
    FailureCode,
    HandedOver,
    Role,
    Submit,
    TokenDelta,
)

logger = logging.getLogger(__name__)

_AVOID_S = 2.0  # how long a request avoids what failed it, unless that comes up anew: also if it is the only worker
_DEFAULT_RETRY_S = 0.5
_RETRY_AFTER_S = 1.0
_SHORTAGES = (FailureCode.NO_ROOM, FailureCode.QUEUE_FULL, FailureCode.DRAINING)  # waiting helps; nothing is broken
_EXPECTED = (*_SHORTAGES, FailureCode.NOT_CACHED)


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
        self._placement = Placement(pool, settings)
        self.admission = Admission(settings.max_queued, settings.room_timeout_s, pool.changed, metrics)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[OutputDelta]:
        """The output of ``request``, its last delta with a finish reason. Raises ApiError if it cannot be had.

        Close the iterator (``aclosing``) to cancel.
        """
        try:
            progress = await self._admitted(request)
        except BaseException:
            self._settle(request, None)
            raise
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
            self._settle(request, None)
            now_s = time.monotonic()
            if progress.output:  # also if a stop string, or its client, ended it: so much it has cost
                num_prompt_tokens, num_output_tokens = len(request.prompt_token_ids), len(progress.output)
                self.admission.pace.on_finished(num_prompt_tokens, num_output_tokens, now_s - placed_s, now_s)

    async def _admitted(self, request: GenerationRequest) -> Progress:
        """The request with its place on workers. Raises ApiError if it gets none."""
        limit_s = self._settings.request_timeout_s
        timeout_s = limit_s if request.timeout_s is None else min(request.timeout_s, limit_s)
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        progress = Progress(request, timeout_s, deadline_s, self._placement.prefix_of(request))
        if request.share is not None and request.follows:
            try:
                async with asyncio.timeout(timeout_s):
                    await request.share.settled()
            except TimeoutError as error:
                raise progress.timed_out() from error
            timeout_left_s = progress.deadline_s - asyncio.get_running_loop().time()
        else:
            timeout_left_s = timeout_s
        work = self.admission.pace.work_of(len(request.prompt_token_ids), request.sampling.max_tokens)
        progress.place = await self.admission.place(
            lambda: self._placement.place(progress, work),
            work,
            timeout_left_s,
            lambda: self._placement.no_room(request.max_len),
            request.priority,
        )
        return progress

    def _on_first_token(
        self, progress: Progress, key: Key, involved: Sequence[Worker], *, is_handed_over: bool
    ) -> None:
        """A worker computed the prompt, or the decode worker's own stream begins."""
        self._pool.on_first_token(key, involved)
        for view in views(involved[:1], 0):
            progress.prefix.on_cached(progress.output, view)
        if is_handed_over or len(involved) == 1:
            self._on_verified(progress, involved[-1])

    def _on_verified(self, progress: Progress, decode: Worker) -> None:
        """The K/V of prompt and output lie on a decode worker."""
        self._settle(progress.request, decode.address)
        for view in views([decode], 0):
            progress.prefix.on_cached(progress.output, view)

    def _settle(self, request: GenerationRequest, decode_address: str | None) -> None:
        """Tell the prompt's other choices where its K/V lie, or that they must not wait for that any more."""
        if request.share is not None and not request.follows:
            request.share.settle(decode_address)

    def _on_failure(self, progress: Progress, failure: _AttemptFailedError) -> None:
        self._metrics.attempts.labels(failure.code.value).inc()
        extra = {"request_id": progress.request.request_id, "attempt": progress.attempt}
        # Refused for want of room, many requests ask again twice a second: the counter tells that better than a log.
        level = logging.DEBUG if failure.code in _EXPECTED else logging.WARNING
        logger.log(level, "an attempt failed (%s): %s", failure.code.value, failure, extra=extra)
        match failure.code:
            case FailureCode.INVALID:
                raise InvalidRequestError(str(failure)) from failure
            case FailureCode.DEADLINE:
                raise progress.timed_out() from failure
            case FailureCode.NOT_CACHED:
                for view in views((w for w in self._pool.workers if w.address in failure.blamed), 0):
                    progress.prefix.on_miss(view)
                return  # the worker is as good as any; the next attempt goes by a prefill worker
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

    async def _find_workers(self, progress: Progress) -> Pair:
        """A pair of workers, waiting for one if need be. Raises OverloadedError when that takes too long.

        Waits add up over attempts that are refused one after the other.
        """
        loop = asyncio.get_running_loop()
        while True:
            if loop.time() >= progress.deadline_s:
                raise progress.timed_out()
            give_up_s = progress.deadline_s
            if progress.waits_since_s is not None:
                give_up_s = min(give_up_s, progress.waits_since_s + self._settings.room_timeout_s)
            remaining_s = give_up_s - loop.time()
            if remaining_s <= 0:
                text = self._placement.no_room(progress.request.max_len)
                raise OverloadedError(f"{text}; try again later", retry_after_s=_RETRY_AFTER_S)
            route = self._placement.route(progress)
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

    # -- one attempt -----------------------------------------------------------------------------------------------

    async def _attempt(self, progress: Progress, prefill: Worker | None, decode: Worker) -> AsyncGenerator[OutputDelta]:
        request = progress.request
        key = (request.request_id, progress.attempt)
        first = decode if prefill is None else prefill
        involved = [decode] if prefill is None else [prefill, decode]
        token_ids = request.prompt_token_ids + progress.output
        inbox = self._pool.open_attempt(key, involved, len(token_ids) + 1, progress.prefix.cached)
        timer = asyncio.get_running_loop().call_at(progress.deadline_s, inbox.put_nowait, DeadlinePassed())
        is_over = False
        try:
            submit = Submit(
                request_id=request.request_id,
                attempt=progress.attempt,
                token_ids=token_ids,
                num_prompt_tokens=len(request.prompt_token_ids),
                sampling=progress.sampling,
                decode=None if prefill is None else decode_target(decode),
                timeout_s=progress.deadline_s - asyncio.get_running_loop().time(),
                retention=request.retention,
                max_uncached_tokens=None
                if prefill is not None
                else self._placement.max_uncached_tokens(request, len(token_ids)),
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
            for view in views([decode], 0):  # the K/V of the last token is not computed
                progress.prefix.on_end(progress.output[:-1], view)
            self._pool.close_attempt(key, involved, len(request.prompt_token_ids) + len(progress.output))
            if not is_over:
                for worker in involved:
                    worker.client.send(Cancel(request_id=key[0], attempt=key[1]))

    async def _take_tokens(
        self, progress: Progress, key: Key, inbox: Inbox, involved: Sequence[Worker]
    ) -> AsyncGenerator[OutputDelta]:
        is_handed_over = False
        last: OutputDelta | None = (
            None  # held back until the prompt's log probabilities are here, which come another way
        )
        while True:
            event = await inbox.get()
            match event:
                case TokenDelta():
                    if event.timings is not None:
                        is_handed_over |= event.timings.transfer_s is not None  # only a decode worker that verified it
                        self._on_first_token(progress, key, involved, is_handed_over=is_handed_over)
                    delta = self._accept(progress, event)
                    if event.finish_reason is not None:
                        last = delta
                    elif delta is not None:
                        yield delta
                    if last is not None and not progress.lacks_prompt_logprobs:
                        yield last
                        return
                case HandedOver():
                    is_handed_over = True
                    self._on_verified(progress, involved[-1])
                case DeadlinePassed():
                    raise progress.timed_out()
                case WorkerLost() | GaveUp() if last is not None:
                    raise AttemptsFailedError(
                        "the prompt's log probabilities were lost with a worker; ask again",
                        retry_after_s=_RETRY_AFTER_S,
                    )
                case WorkerLost(role=Role.PREFILL) if is_handed_over:
                    pass  # the decode worker owns the request; the prefill worker's death does not concern it
                case _:
                    raise _failure(event, involved)

    def _accept(self, progress: Progress, item: TokenDelta) -> OutputDelta | None:
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
        if item.num_cached_tokens is not None:
            # What an earlier attempt computed is cached for a later one; for this request it was computed all the same.
            known = progress.num_cached_tokens
            progress.num_cached_tokens = item.num_cached_tokens if known is None else min(known, item.num_cached_tokens)
        num_cached_tokens = None if item.num_cached_tokens is None else progress.num_cached_tokens
        prompt_logprobs = None if progress.has_prompt_logprobs else item.prompt_logprobs
        # Who computed the prompt tells them with the first token, or, being of an older version, never.
        is_from_prefill = item.timings is not None and item.timings.prefill_s is not None
        progress.has_prompt_logprobs |= prompt_logprobs is not None or is_from_prefill
        return OutputDelta(tokens, item.finish_reason, num_cached_tokens, item.timings, prompt_logprobs, item.beams)


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
