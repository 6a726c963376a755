"""The life of a request in the gateway: route, submit, take tokens, and try again so that the client does not notice.

An attempt is one try on one pair of workers. When it fails, the next one sends the prompt *and the output so far*, with the same
seed; the noise of sampling depends on positions only, so the text goes on as if nothing had happened. Tokens carry their output
position: what came before is dropped, a gap fails the attempt. Every request ends in exactly one of: a finish reason, or one
ApiError. A request that is given up (the consumer closes the iterator) is cancelled on its workers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from kvrelay.common.sampling import FinishReason, SampledToken, SamplingParams
from kvrelay.gateway.errors import (
    ApiError,
    AttemptsFailedError,
    InvalidRequestError,
    RequestTimeoutError,
    UnavailableError,
)
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.routing import POLICIES
from kvrelay.gateway.settings import RelaySettings
from kvrelay.gateway.workers import AttemptEvent, DeadlinePassed, Inbox, Worker, WorkerLost, WorkerPool, decode_target
from kvrelay.wire.messages import Cancel, Cancelled, Failed, FailureCode, HandedOver, Role, Submit, Timings, TokenDelta

logger = logging.getLogger(__name__)

_EXCLUDE_S = 2.0  # how long a worker that failed an attempt is not asked again, if there is another
_DEFAULT_RETRY_S = 0.5
_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A validated request."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """New tokens for the client. ``num_cached_tokens`` and ``timings`` come with the tokens that first know them."""

    tokens: list[SampledToken]
    finish_reason: FinishReason | None
    num_cached_tokens: int | None
    timings: Timings | None


@dataclass(slots=True)
class _Progress:
    """What a request has achieved over all its attempts."""

    request: GenerationRequest
    deadline_s: float
    output: list[int] = field(default_factory=list)
    attempt: int = 0
    num_failures: int = 0
    last_failure: str = ""
    excluded: dict[str, float] = field(default_factory=dict)  # address -> until when

    @property
    def is_complete(self) -> bool:
        return len(self.output) >= self.request.sampling.max_tokens


class _AttemptFailedError(Exception):
    """An attempt is over without a finish reason; another may follow."""

    def __init__(self, code: FailureCode, detail: str, blamed: str | None, retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.code = code
        self.blamed = blamed  # address of the worker that should not be asked again at once
        self.retry_after_s = retry_after_s


class Relay:
    """Runs requests over a worker pool."""

    def __init__(self, pool: WorkerPool, settings: RelaySettings, metrics: GatewayMetrics) -> None:
        self._pool = pool
        self._settings = settings
        self._metrics = metrics
        self._policy = POLICIES[settings.policy]
        self._sequence_number = 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[OutputDelta]:
        """The output of ``request``, its last delta with a finish reason. Raises ApiError if it cannot be had.

        Close the iterator (``aclosing``) to cancel.
        """
        progress = _Progress(request, asyncio.get_running_loop().time() + self._settings.request_timeout_s)
        while True:
            prefill, decode = await self._find_workers(progress)
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
                self._on_failure(progress, failure)
            if progress.is_complete:
                # The worker died between the last token and saying so.
                yield OutputDelta([], FinishReason.LENGTH, None, None)
                return

    def _on_failure(self, progress: _Progress, failure: _AttemptFailedError) -> None:
        self._metrics.attempts.labels(failure.code.value).inc()
        extra = {"request_id": progress.request.request_id, "attempt": progress.attempt}
        logger.warning("an attempt failed (%s): %s", failure.code.value, failure, extra=extra)
        if not failure.code.is_retryable:
            raise InvalidRequestError(str(failure)) from failure
        if failure.blamed is not None:
            pause_s = _EXCLUDE_S if failure.retry_after_s is None else failure.retry_after_s
            progress.excluded[failure.blamed] = time.monotonic() + pause_s
        progress.last_failure = str(failure)
        if failure.code not in (FailureCode.NO_ROOM, FailureCode.QUEUE_FULL, FailureCode.DRAINING):
            progress.num_failures += 1
        if progress.num_failures >= self._settings.max_attempts:
            raise AttemptsFailedError(
                f"{progress.num_failures} attempts failed, the last one: {failure.code.value}; try again",
                retry_after_s=_RETRY_AFTER_S,
            ) from failure

    # -- routing ---------------------------------------------------------------------------------------------------

    async def _find_workers(self, progress: _Progress) -> tuple[Worker | None, Worker]:
        """A pair of workers, waiting for one if need be. Raises UnavailableError when that takes too long."""
        loop = asyncio.get_running_loop()
        give_up_s = min(loop.time() + self._settings.room_timeout_s, progress.deadline_s)
        while True:
            route = self._route(progress)
            if route is not None:
                return route
            remaining_s = give_up_s - loop.time()
            if loop.time() >= progress.deadline_s:
                raise self._timed_out()
            if remaining_s <= 0:
                raise self._unavailable()
            self._pool.changed.clear()
            wait_s = min(remaining_s, _DEFAULT_RETRY_S)
            try:
                await asyncio.wait_for(self._pool.changed.wait(), wait_s)
            except TimeoutError:
                continue

    def _unavailable(self) -> ApiError:
        reasons = [reason.split(" (")[0] for reason in self._pool.not_ready()]
        text = "; ".join(reasons) or "no worker has room"
        return UnavailableError(f"{text}; try again later", retry_after_s=_RETRY_AFTER_S)

    def _timed_out(self) -> ApiError:
        limit_s = self._settings.request_timeout_s
        return RequestTimeoutError(f"the request took longer than {limit_s:g} s; ask for fewer tokens")

    def _route(self, progress: _Progress) -> tuple[Worker | None, Worker] | None:
        now_s = time.monotonic()
        num_tokens = len(progress.request.prompt_token_ids) + len(progress.output)
        is_local = not self._pool.prefills or num_tokens <= self._settings.local_prefill_max_tokens

        def usable(workers: dict[str, Worker]) -> list[Worker]:
            return [worker for worker in workers.values() if progress.excluded.get(worker.address, 0.0) <= now_s]

        prefills = [] if is_local else [view for worker in usable(self._pool.prefills) if (view := worker.view())]
        decodes = [view for worker in usable(self._pool.decodes) if (view := worker.view())]
        if not is_local and not prefills:
            return None
        self._sequence_number += 1
        route = self._policy(prefills, decodes, num_tokens + 1, self._sequence_number)
        if route is None:
            return None
        prefill = None if route.prefill is None else self._pool.prefills[route.prefill]
        return prefill, self._pool.decodes[route.decode]

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
            )
            if not first.client.send(submit):
                raise _AttemptFailedError(FailureCode.PEER_LOST, "the worker's link just went down", first.address)
            async with aclosing(self._take_tokens(progress, inbox, decode)) as deltas:
                async for delta in deltas:
                    is_over = delta.finish_reason is not None
                    yield delta
        finally:
            timer.cancel()
            self._pool.close_attempt(key, involved)
            if not is_over:
                for worker in involved:
                    worker.client.send(Cancel(request_id=key[0], attempt=key[1]))

    async def _take_tokens(self, progress: _Progress, inbox: Inbox, decode: Worker) -> AsyncGenerator[OutputDelta]:
        is_handed_over = False
        while True:
            event = await inbox.get()
            match event:
                case TokenDelta():
                    if event.timings is not None and event.timings.transfer_s is not None:
                        is_handed_over = True  # the decode worker speaks: it has verified the KV
                    delta = self._accept(progress, event)
                    if delta is not None:
                        yield delta
                    if event.finish_reason is not None:
                        return
                case HandedOver():
                    is_handed_over = True
                case DeadlinePassed():
                    raise self._timed_out()
                case WorkerLost(role=Role.PREFILL) if is_handed_over:
                    pass  # the decode worker owns the request; the prefill worker's death does not concern it
                case _:
                    raise _failure(event, decode.address)

    def _accept(self, progress: _Progress, item: TokenDelta) -> OutputDelta | None:
        """The part of ``item`` that is new; None if nothing is."""
        num_known = len(progress.output)
        if item.index > num_known:
            raise _AttemptFailedError(
                FailureCode.INTERNAL, f"tokens from position {item.index} on came after {num_known} tokens", None
            )
        tokens = item.tokens[num_known - item.index :]
        progress.output.extend(token.token_id for token in tokens)
        if not tokens and item.finish_reason is None and item.timings is None:
            return None
        return OutputDelta(tokens, item.finish_reason, item.num_cached_tokens, item.timings)


def _failure(event: AttemptEvent, decode_address: str) -> _AttemptFailedError:
    match event:
        case Failed(code=code, detail=detail, retry_after_s=retry_after_s):
            # What a prefill worker reports about the hand-off is mostly the decode worker's doing.
            return _AttemptFailedError(code, detail, decode_address, retry_after_s)
        case WorkerLost(address=address, reason=reason):
            return _AttemptFailedError(FailureCode.PEER_LOST, reason, address)
        case Cancelled():
            return _AttemptFailedError(FailureCode.PEER_LOST, "the worker gave the request up", None)
        case _:
            raise AssertionError(f"unexpected {event}")
