"""The life of a request in the gateway: route, submit, take tokens, and try again so that the client does not notice.

An attempt is one try on one pair of workers. When it fails, the next attempt sends the prompt *and the output so far*, with the
same seed. The noise of sampling depends only on positions, so the text goes on as if nothing had happened. Tokens carry their
output position: tokens that came before are dropped, and a gap fails the attempt. Every request ends with exactly one finish reason
or one ApiError. If a request's task is cancelled, its workers are told to cancel it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from functools import partial

from kvrelay.common.clock import Clock
from kvrelay.common.sampling import FinishReason
from kvrelay.gateway.errors import (
    AttemptsFailedError,
    InvalidRequestError,
    OverloadedError,
    UnusableGuideError,
)
from kvrelay.gateway.metrics import ModelMetrics
from kvrelay.gateway.relay.attempt import Attempt, AttemptFailedError, AttemptMovedError, Take
from kvrelay.gateway.relay.image_texts import ImageDesk, ReaderAwayError, unreadable
from kvrelay.gateway.relay.placement import Placement, views
from kvrelay.gateway.relay.request import AttemptNote, GenerationRequest, Place
from kvrelay.gateway.routing.admission import Admission
from kvrelay.gateway.routing.asked import Asked
from kvrelay.gateway.routing.breaker import CircuitBreakers, Part
from kvrelay.gateway.routing.estimates import Estimates
from kvrelay.gateway.settings import RelaySettings
from kvrelay.gateway.workers.pool import WorkerPool
from kvrelay.wire.messages import ABOUT_GUIDE, ABOUT_IMAGES, DecodeTarget, FailureCode, Submit, TokenDelta

logger = logging.getLogger(__name__)

_AVOID_S = 2.0  # how long a request avoids a worker that failed it, also the only one, unless it restarts
_DEFAULT_RETRY_S = 0.5
_RETRY_AFTER_S = 1.0
# Failures that are shortages: waiting helps, and nothing is broken.
_SHORTAGES = (FailureCode.NO_ROOM, FailureCode.NO_ADAPTER, FailureCode.QUEUE_FULL, FailureCode.DRAINING)
_EXPECTED = (*_SHORTAGES, FailureCode.NOT_CACHED, FailureCode.INVALID)


class Relay:
    """Runs requests over a worker pool."""

    def __init__(self, pool: WorkerPool, settings: RelaySettings, metrics: ModelMetrics, clock: Clock) -> None:
        self.pool = pool
        self.settings = settings
        self.metrics = metrics
        self.clock = clock
        self.prompt_ways: Counter[tuple[str, str]] = Counter()  # number of attempts by way and reason
        self.breakers = CircuitBreakers(self._on_breaker)
        self._placement = Placement(pool, settings, self.breakers, clock)
        pool.on_stock_taken = self._on_stock_taken
        self.admission = Admission(
            settings.max_queued,
            settings.room_timeout_s,
            pool.changed,
            metrics,
            Estimates(self._placement.supply),
            clock,
        )
        self.images = ImageDesk(pool, settings, self.admission)

    async def run(self, request: GenerationRequest, take: Take) -> None:
        """Give ``take`` the output of ``request``, up to a finish reason, or as much as ``take`` wants. Cancel to give it up.

        Raises ApiError if the output cannot be had, and what ``take`` raises.
        """
        num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
        asked = Asked(num_prompt, max_tokens, flow=request.flow, waited_s=request.waited_s, spent_s=request.spent_s)
        if request.images:
            asked.check = self._check_readers
        try:
            await self._admit(request, asked)
        except BaseException:
            request.settle(None)
            raise
        if request.is_first:
            self.metrics.tokens.on_prompt(len(request.prompt_token_ids))
        try:
            while not await self._is_over(request, take):
                pass
        finally:
            request.settle(None)
            # A beam search's tokens come together: it does not tell when a request has its first one.
            first_token_s = None if request.num_beam_tokens else request.timings.first_token_s
            self.admission.on_end(asked, request.num_output_tokens, first_token_s)

    async def _admit(self, request: GenerationRequest, asked: Asked) -> None:
        """Start the request's deadline and wait for its place on workers. Raises ApiError if it gets none."""
        request.timeout_s = min(request.timeout_s, self.settings.request_timeout_s)
        left_s = request.timeout_s - request.waited_s - request.spent_s
        request.deadline_s = self._time() + left_s
        request.prefix = self._placement.prefix_of(request)
        if request.share is not None and request.follows:
            try:
                async with asyncio.timeout_at(request.deadline_s):
                    await request.share.settled()
            except TimeoutError as error:
                raise request.timed_out() from error
            left_s = request.deadline_s - self._time()
            asked.is_follower = request.share.decode_address is not None
        if self.admission.num_queued:  # then it joins the line without a search for a place
            asked.num_to_compute = self._placement.look(request)
        while request.place is None:
            begun_s = self._time()
            try:
                request.place = await self.admission.place(
                    lambda: self._place(request, asked),
                    asked,
                    left_s,
                    lambda: self._placement.no_room(request),
                )
            except ReaderAwayError:
                asked.waited_s += self._time() - begun_s
                num_bytes = sum(len(image.data) for image in request.images) if request.is_first else 0
                await self.images.come_up(asked, request.deadline_s - self._time(), num_bytes, self.pool.model)
                left_s = request.deadline_s - self._time()
        request.timings.placed_s = self.clock()

    def _check_readers(self) -> None:
        """Raises ReaderAwayError if no worker reads images now, so that a request with images leaves the line to others."""
        self.images.check(self.pool.model)
        if self.images.is_away:
            raise ReaderAwayError

    def _place(self, request: GenerationRequest, asked: Asked) -> Place | None:
        """Workers that would begin soon."""
        num_to_hold, is_ahead = self.admission.num_to_hold(asked), self.admission.is_ahead(asked)
        found = self._placement.place(request, num_to_hold, is_ahead=is_ahead)
        asked.num_to_compute = self._placement.num_to_compute(request)
        self._ask_for_more(found)
        return found

    def _on_failure(self, request: GenerationRequest, failure: AttemptFailedError) -> None:
        # Requests that were refused for lack of room ask again twice a second. A counter shows that better than a log.
        level = logging.DEBUG if failure.code in _EXPECTED else logging.WARNING
        logger.log(level, "an attempt failed (%s): %s", failure.code.value, failure, extra=request.log_context)
        match failure.code:
            case FailureCode.INVALID if failure.about == ABOUT_GUIDE:
                raise UnusableGuideError(request.spec.guide_param, str(failure)) from failure
            case FailureCode.INVALID if failure.about == ABOUT_IMAGES:
                raise unreadable(str(failure), request.spec.image_params) from failure
            case FailureCode.INVALID:
                raise InvalidRequestError(str(failure)) from failure
            case FailureCode.DEADLINE:
                raise request.timed_out() from failure
            case FailureCode.NOT_CACHED:
                for view in views((w for w in self.pool.workers if w.address in failure.blamed), 0):
                    request.prefix.on_miss(view)
                return  # the worker is fine: the ways are compared again, with nothing cached
            case _:
                pass  # another attempt may succeed, also after a cancellation that was not ours
        pause_s = _AVOID_S if failure.retry_after_s is None else failure.retry_after_s
        now_s = self.clock()
        request.avoidance.blame(tuple(failure.blamed), now_s, now_s + pause_s)
        if failure.code not in _SHORTAGES:
            request.num_failures += 1
            request.waits_since_s = None
        elif request.waits_since_s is None:
            request.waits_since_s = asyncio.get_running_loop().time()
        if request.num_failures >= self.settings.max_attempts:
            raise AttemptsFailedError(
                f"{request.num_failures} attempts failed, the last one: {failure.code.value}; try again",
                retry_after_s=_RETRY_AFTER_S,
            ) from failure

    def _on_stock_taken(self) -> None:
        self._keep_breakers()
        self.admission.call()

    @staticmethod
    def _time() -> float:
        """Now, on the loop's clock, which deadlines are on."""
        return asyncio.get_running_loop().time()

    def _keep_breakers(self) -> None:
        """Forget the failures of workers that are gone or have come up again."""
        self.breakers.keep({worker.address: worker.up_since_s for worker in self.pool.workers})

    def _on_breaker(self, part: Part, is_open: bool) -> None:
        self.metrics.breakers_open.labels("worker" if len(part) == 1 else "pair").inc(1 if is_open else -1)
        known = {worker.address: str(worker) for worker in self.pool.workers}
        name = " with ".join(known.get(address, address) for address in part)
        if is_open:
            logger.warning("%s failed several requests one after another: only probes are sent there", name)
        else:
            logger.info("%s is asked as usual again", name)

    # -- routing ---------------------------------------------------------------------------------------------------

    async def _find_workers(self, request: GenerationRequest) -> Place:
        """Workers for the next attempt, waiting for them if necessary. Raises OverloadedError when that takes too long.

        The waits of successive attempts that are refused add up.
        """
        loop = asyncio.get_running_loop()
        while True:
            if loop.time() >= request.deadline_s:
                raise request.timed_out()
            give_up_s = request.deadline_s
            if request.waits_since_s is not None:
                give_up_s = min(give_up_s, request.waits_since_s + self.settings.room_timeout_s)
            remaining_s = give_up_s - loop.time()
            if remaining_s <= 0:
                text = self._placement.no_room(request)
                raise OverloadedError(f"{text}; try again later", retry_after_s=_RETRY_AFTER_S)
            place = self._placement.route(request)
            self._ask_for_more(place)
            if place is not None:
                return place
            if request.images:
                self.images.check(self.pool.model)
            if request.waits_since_s is None:
                request.waits_since_s = loop.time()
                continue
            self.pool.changed.clear()
            wait_s = min(remaining_s, _DEFAULT_RETRY_S)
            now_s = self.clock()
            if (change_s := request.avoidance.next_change_s(now_s)) is not None:
                wait_s = min(wait_s, change_s - now_s)
            # Not wait_for: up to Python 3.11 it swallows a cancellation that comes with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self.pool.changed.wait()

    def _ask_for_more(self, place: Place | None) -> None:
        """Have broken links tried again, because a request found no place, or no prefill worker."""
        if place is None:
            self.pool.hurry(self.pool.workers)
        elif self.pool.is_local_only:
            self.pool.hurry(self.pool.prefills.values())

    async def _is_over(self, request: GenerationRequest, take: Take) -> bool:
        """Make one more attempt. Returns whether the request is over."""
        place = request.place or await self._find_workers(request)
        request.place = None
        request.attempt += 1
        self.prompt_ways[place.way, place.reason.value] += 1
        self.metrics.prompt_ways.labels(place.way, place.reason.value).inc()
        part = tuple(worker.address for worker in place.workers)
        begun_s = self.clock()
        note = request.timings.on_attempt(
            AttemptNote(part, place.reason.value, begun_s, len(request.output), request.attempt)
        )
        trial = self.breakers.begin(request.share or request.request_id, part, begun_s)
        attempt = Attempt(self.pool, request, place, take, self.metrics, trial)
        outcome = "given_up"  # by its client, or because its time is up
        try:
            elsewhere = partial(self._placement.elsewhere, request, place.decode)
            sooner = partial(self._placement.sooner, request)
            await attempt.run(self._submit(request, place), self.clock(), elsewhere, sooner)
            outcome = "finished" if attempt.is_finished else "stopped"
            if request.num_failures:
                failed = "1 failed attempt" if request.num_failures == 1 else f"{request.num_failures} failed attempts"
                logger.info("the request went on after %s; its client got all of it", failed, extra=request.log_context)
        except AttemptMovedError as moved:
            outcome = str(moved)
            return False
        except AttemptFailedError as failure:
            outcome = failure.code.value
            if failure.blamed and failure.code.is_fault:
                self.breakers.on_failure(trial, tuple(failure.blamed), self.clock())
                self._keep_breakers()  # the worker may have left before its failure was known
            if not request.is_complete:
                self._on_failure(request, failure)
                return False
            # All tokens have arrived; only the finish reason is missing.
            is_stopped = request.output[-1] in request.sampling.stop_token_ids
            end = FinishReason.STOP if is_stopped else FinishReason.LENGTH
            index = len(request.output)
            take(
                TokenDelta(
                    request_id=request.request_id, attempt=request.attempt, index=index, tokens=[], finish_reason=end
                )
            )
            outcome = "finished"
        finally:
            self.breakers.on_end(trial)
            note.ended_s, note.outcome = self.clock(), outcome
            self.metrics.attempts.labels(outcome).inc()
        return True

    def _submit(self, request: GenerationRequest, place: Place) -> Submit:
        return Submit(
            request_id=request.request_id,
            attempt=request.attempt,
            token_ids=request.prompt_token_ids + request.output,
            num_prompt_tokens=len(request.prompt_token_ids),
            sampling=request.next_sampling,
            decode=None if place.prefill is None else DecodeTarget(address=place.decode.address),
            timeout_s=request.deadline_s - asyncio.get_running_loop().time(),
            retention=request.spec.retention,
            cache_salt=request.spec.cache_salt,
            adapter=request.adapter,
            flow=request.flow,
            max_uncached_tokens=place.max_uncached_tokens,
            trace_id=request.trace_id,
            images=list(request.images),
        )
