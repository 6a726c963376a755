"""Gives requests their places on the workers: one line of waiting requests, bounded in three ways.

The line is in fair order (:mod:`kvrelay.common.fair_queue`): API keys share by tokens, and smaller priorities pass others. If the
line is full, a request that would not be the last takes the place of the last one.

A request that finds a place does not wait; otherwise it joins the line. It is refused at once, with a hint when to come again, if
the line is full, if its wait would be too long, or if it could not be answered in time. The wait is forecast from the workers'
reports and from running requests; the length of the answer from similar requests (:mod:`kvrelay.gateway.routing.estimates`). No
request is refused on an estimate before a similar one has ended. A request whose turn comes too late is refused as well. Attempts
after the first do not join the line, because their clients are already being answered. For the same reason a further choice of a
prompt joins a full line once the first choice has its K/V, and is not pushed out of it.

Some requests wait *beside* the line: they need a worker of some kind, and none of that kind is up. They hold nobody up. As many may
wait there as in the line, and as long.

Lives on the gateway's asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvrelay.common.clock import Clock
from kvrelay.common.fair_queue import FairQueue, Flow
from kvrelay.gateway.errors import ApiError, OverloadedError, RequestTimeoutError
from kvrelay.gateway.metrics import ModelMetrics
from kvrelay.gateway.routing.asked import Asked, last_newcomer, too_heavy
from kvrelay.gateway.routing.estimates import Estimates

T = TypeVar("T")

_MARGIN = 1.15  # safety factor on estimates: an early refusal costs nothing, a late request costs others time
_LOOK_S = 0.5  # how often the first in line looks for a place without being woken
_MAX_RETRY_S = 60.0


class Admission:
    """The line of one gateway."""

    def __init__(
        self,
        max_queued: int,
        room_timeout_s: float,
        changed: asyncio.Event,
        metrics: ModelMetrics,
        estimates: Estimates,
        clock: Clock,
    ) -> None:
        """``changed``: others set it when there may be a place; the first in line clears it."""
        self._max_queued = max_queued
        self._room_timeout_s = room_timeout_s
        self._changed = changed
        self.num_refused = 0  # requests that got no place, so far
        self._metrics = metrics
        self._estimates = estimates
        self._clock = clock
        self._line: list[Asked] = []
        self._beside: list[Asked] = []
        self._called: Asked | None = None  # the first of the line, which is looking for a place
        self._sorted_s = 0.0  # when the line was last sorted
        self._fair = FairQueue()
        metrics.queued.set_function(lambda: self.num_queued)

    @property
    def num_queued(self) -> int:
        """The number of requests that wait, in the line and beside it."""
        return len(self._line) + len(self._beside)

    @property
    def num_running(self) -> int:
        """The number of requests that have a place."""
        return self._estimates.num_running

    def check_not_full(self, flow: Flow) -> None:
        """Raises OverloadedError if a new request of ``flow`` would be refused, before any work is done for it."""
        if len(self._line) < self._max_queued:
            return
        if (newcomer := last_newcomer(self._line)) is None:
            raise self._full()
        last = newcomer.flow
        if flow.priority > last.priority or (flow.priority, flow.key) == (last.priority, last.key):
            raise self._full()

    def num_to_hold(self, asked: Asked) -> float:
        """The estimated tokens of prompt and output that a request will hold."""
        return self._estimates.num_to_hold(asked)

    def is_ahead(self, asked: Asked) -> bool:
        """Whether the request's key has had as much as any other key that asks. Then it leaves room for the others."""
        return self._fair.is_ahead(asked, self._clock())

    async def place(self, find: Callable[[], T | None], asked: Asked, timeout_s: float, why: Callable[[], str]) -> T:
        """The result of ``find``, at once or when the request's turn comes. ``on_end`` must follow. ``timeout_s``: of the whole
        request.

        Raises OverloadedError, with the reason from ``why`` if there was no place for too long, RequestTimeoutError, and what
        ``asked.check`` raises, also later, at :meth:`call`.
        """
        if asked.check is not None:
            asked.check()
        begun_s = self._clock()
        self._come(asked, timeout_s, begun_s)
        if not self._line and (found := find()) is not None:
            self._begin(asked, begun_s)
            if asked.waited_s:
                self._metrics.queued_s.observe(asked.waited_s)
            return found
        self._join(asked, timeout_s, begun_s)
        try:
            found = await self._turn(asked, find, timeout_s, why)
            now_s = self._clock()
            self._begin(asked, now_s)
            self._metrics.queued_s.observe(asked.waited_s + now_s - begun_s)
            return found
        finally:
            if not asked.is_pushed_out:
                self._line.remove(asked)
                self._sort()

    async def wait_beside(
        self, is_over: Callable[[], bool], asked: Asked, timeout_s: float, why: Callable[[], str], max_bytes: int
    ) -> None:
        """Wait beside the line until ``is_over``, which is asked at each :meth:`call`. Adds the time to ``asked.waited_s``.

        ``max_bytes``: so many bytes may wait in all. Raises as ``place`` does.
        """
        begun_s, before_s = self._clock(), asked.waited_s
        self._come(asked, timeout_s, begun_s)
        beside = self._fair.in_order([*self._beside, asked], begun_s)
        last = self._to_push_out(asked, beside)
        if asked in (heavy := too_heavy(beside, max_bytes)):
            raise self._too_heavy(max_bytes)
        for one in heavy or ([] if last is None else [last]):
            self._push_out(one, beside)
        self._beside = beside
        until_s = begun_s + self._patience_s(asked, timeout_s)
        try:
            while True:
                if asked.is_pushed_out:
                    raise self._full() if len(self._beside) >= self._max_queued else self._too_heavy(max_bytes)
                if is_over():
                    return
                if (left_s := until_s - self._clock()) <= 0:
                    raise self._too_long(asked, timeout_s, why)
                asked.is_called.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await asked.is_called.wait()
        finally:
            asked.is_called.clear()
            if not asked.is_pushed_out:
                self._beside.remove(asked)
            asked.waited_s = before_s + self._clock() - begun_s

    def call(self) -> None:
        """Workers have come or gone. Have requests look whether they may stay in the line, or leave their place beside it."""
        for asked in [*(one for one in self._line if one.check is not None), *self._beside]:
            asked.is_called.set()

    def on_end(self, asked: Asked, num_output_tokens: int, first_token_s: float | None) -> None:
        """A request that had a place is over. ``first_token_s``: time of its first token; None if there was none."""
        self._fair.settle(asked, asked.num_prompt_tokens + num_output_tokens)
        self._estimates.on_end(asked, num_output_tokens, first_token_s, self._clock())

    def _come(self, asked: Asked, timeout_s: float, now_s: float) -> None:
        asked.arrival_s, asked.deadline_s = now_s - asked.waited_s, now_s + timeout_s
        asked.num_tokens = self.num_to_hold(asked)
        self._fair.come(asked)

    def _begin(self, asked: Asked, now_s: float) -> None:
        """The request got its place."""
        self._fair.begin(asked, now_s)
        self._estimates.on_placed(asked, now_s)

    def _join(self, asked: Asked, timeout_s: float, now_s: float) -> None:
        """Join the line, and push the last newcomer out of a full one. Raises OverloadedError if the request may not join."""
        line = self._with(asked, now_s)
        index = line.index(asked)
        is_last = index == len(self._line)
        if not asked.is_follower:
            pushed_out = self._to_push_out(asked, line)
            self._check_in_time(asked, line[:index], timeout_s, now_s)
            if pushed_out is not None:
                self._push_out(pushed_out, line)
        self._estimates.on_joined(asked, is_last=is_last)
        self._line = line
        self._call_first()

    def _to_push_out(self, asked: Asked, line: Sequence[Asked]) -> Asked | None:
        """Whose place in ``line`` the request takes, which is part of it; None if no more wait there than may.

        Raises OverloadedError if the request would be the last one.
        """
        if len(line) <= self._max_queued:
            return None
        last = last_newcomer(line)
        if last is asked:
            raise self._full()
        return last

    @staticmethod
    def _push_out(asked: Asked, line: list[Asked]) -> None:
        line.remove(asked)
        asked.is_pushed_out = True
        asked.is_called.set()

    def _with(self, asked: Asked, now_s: float) -> list[Asked]:
        """The line as it would be with the request."""
        if (
            self._line
            and (last := self._line[-1]).flow == asked.flow
            and last.arrival_s <= asked.arrival_s
            and (not asked.flow.key or last.deadline_s <= asked.deadline_s)
        ):  # as when one key floods the line: the others keep their order
            return [*self._line, asked]
        return self._fair.in_order([*self._line, asked], now_s)

    def _sort(self) -> None:
        """Sort the line again: a request has left, or priorities have aged."""
        self._sorted_s = self._clock()
        if self._line and self._line[0].flow.priority != self._line[-1].flow.priority:
            self._line = self._fair.in_order(self._line, self._sorted_s)
        self._call_first()

    def _call_first(self) -> None:
        """Wake the first of the line. Only that one looks for a place."""
        first = self._line[0] if self._line else None
        if first is self._called:
            return
        if self._called is not None and not self._called.is_pushed_out:
            self._called.is_called.clear()
        self._called = first
        if first is not None:
            first.is_called.set()

    async def _turn(self, asked: Asked, find: Callable[[], T | None], timeout_s: float, why: Callable[[], str]) -> T:
        begun_s = self._clock()
        until_s = begun_s + self._patience_s(asked, timeout_s)
        while (now_s := self._clock()) < until_s:
            if asked.is_pushed_out:
                raise self._full()
            if asked.check is not None:
                asked.check()
            if now_s - self._sorted_s >= _LOOK_S:
                self._sort()
            if asked is not self._called:
                asked.is_called.clear()
                # Not wait_for: up to Python 3.11 it swallows a cancellation that comes with the event.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(until_s - now_s):
                        await asked.is_called.wait()
                continue
            if (found := find()) is not None:
                left_s = timeout_s - (now_s - begun_s)
                if (needed_s := _MARGIN * (self._estimates.service_s(asked, now_s) or 0.0)) > left_s:
                    detail = f"{left_s:.1f} s are left of the request's time, and an answer takes {needed_s:.1f} s"
                    raise self._refusal("too_late", detail)
                return found
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(_LOOK_S, until_s - now_s)):
                    await self._changed.wait()
        raise self._too_long(asked, timeout_s, why)

    def _patience_s(self, asked: Asked, timeout_s: float) -> float:
        """How long the request may wait from now on."""
        return min(timeout_s, self._room_timeout_s - asked.waited_s)

    def _too_long(self, asked: Asked, timeout_s: float, why: Callable[[], str]) -> ApiError:
        """The error for a request that has waited as long as it may."""
        if timeout_s > self._patience_s(asked, timeout_s):
            return self._refusal("no_place", why())
        self._count_refused("timeout")
        whole_s = round(asked.spent_s + asked.waited_s + timeout_s, 3)
        missing = f"{why()}; " if asked in self._beside else ""
        text = f"{missing}no worker had a place within the request's {whole_s:g} s; give it more time"
        return RequestTimeoutError(text)

    def _check_in_time(self, asked: Asked, before: Sequence[Asked], timeout_s: float, now_s: float) -> None:
        service_s = self._estimates.service_s(asked, now_s)
        if service_s is None:
            return
        wait_s = self._estimates.wait_s(asked, before, now_s, is_last=len(before) == len(self._line))
        if wait_s is None:
            return
        limit_s = self._patience_s(asked, math.inf)
        if wait_s > limit_s:
            detail = f"a place would come free in some {wait_s:.0f} s; the limit is {limit_s:g} s"
            raise self._refusal("would_wait", detail, wait_s - limit_s)
        needed_s = _MARGIN * (wait_s + service_s)
        if needed_s > timeout_s:
            detail = f"waiting and answering take some {needed_s:.1f} s, the request has {timeout_s:g} s"
            raise self._refusal("would_be_late", detail, wait_s)

    def _full(self) -> OverloadedError:
        return self._refusal("queue_full", f"{self._max_queued} requests wait already, which is the limit")

    def _too_heavy(self, max_bytes: int) -> OverloadedError:
        num_mib = sum(asked.num_bytes for asked in self._beside) // 2**20
        detail = f"files of {num_mib} MiB wait already beside the line; the limit is {max_bytes // 2**20} MiB"
        return self._refusal("queue_full", detail)

    def _count_refused(self, reason: str) -> None:
        self.num_refused += 1
        self._metrics.refused.labels(reason).inc()

    def _refusal(self, reason: str, detail: str, retry_after_s: float = 0.0) -> OverloadedError:
        self._count_refused(reason)
        return OverloadedError(f"{detail}; try again later", retry_after_s=min(max(1.0, retry_after_s), _MAX_RETRY_S))
