"""Who gets a place on the workers, and when: one line of waiting requests, bounded three ways.

First come, first served, among those of one priority; a request of a better one (a smaller number) passes the others.

A request that finds a place does not wait. One that does not stands in line, unless the line is full, or the work ahead of it would
take longer than it may wait, or than leaves it time to be answered (:mod:`kvrelay.gateway.pace` estimates both): then it is refused
at once, with a hint when to come again, and costs nobody anything. When its turn comes and too little of its time is left, it is
refused as well: nobody computes what nobody waits for. Attempts after the first do not stand in line: their clients are being
answered.

Lives on the gateway's asyncio loop.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from kvrelay.common.clock import Clock
from kvrelay.gateway.errors import OverloadedError, RequestTimeoutError
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.pace import Pace

T = TypeVar("T")

_MARGIN = 1.15  # that estimates are short by: whoever is refused at once has lost nothing, who is late has cost others
_LOOK_S = 0.5  # how often the first in line looks for a place, should nobody tell
_MAX_RETRY_S = 60.0


@dataclass(slots=True, eq=False)
class _Waiting:
    work: float
    priority: int
    is_first: asyncio.Event = field(default_factory=asyncio.Event)  # cleared when somebody of a better priority comes


class Admission:
    """The line of one gateway."""

    def __init__(
        self, max_queued: int, room_timeout_s: float, changed: asyncio.Event, metrics: GatewayMetrics, clock: Clock
    ) -> None:
        """``changed`` is set by others when there may be a place; the first in line clears it."""
        self.pace = Pace()
        self._max_queued = max_queued
        self._room_timeout_s = room_timeout_s
        self._changed = changed
        self._metrics = metrics
        self._clock = clock
        self._line: list[_Waiting] = []
        self._work = 0.0  # of the line
        self._advanced_s = 0.0  # when somebody last got a place, or began to wait in an empty line
        metrics.queued.set_function(lambda: self.num_queued)

    @property
    def num_queued(self) -> int:
        """Requests that wait for a place."""
        return len(self._line)

    def check_not_full(self) -> None:
        """Raises OverloadedError if a request could only be refused, before any work goes into it."""
        if len(self._line) >= self._max_queued:
            raise self._refusal(
                "queue_full", f"{len(self._line)} requests wait already, which is the limit", self._work
            )

    async def place(
        self, find: Callable[[], T | None], work: float, timeout_s: float, why: Callable[[], str], priority: int = 0
    ) -> T:
        """What ``find`` gives, at once or when its turn has come; ``work`` in tokens, ``timeout_s`` of the whole request.

        Of those that wait the ones with the smallest ``priority`` come first.

        Raises OverloadedError, with what ``why`` says if there was no place for too long, and RequestTimeoutError.
        """
        if not self._line and (found := find()) is not None:
            return found
        self.check_not_full()
        begun_s = self._clock()
        me = _Waiting(work, priority)
        index = bisect.bisect_right(self._line, priority, key=lambda waiting: waiting.priority)
        ahead = self._work if index == len(self._line) else sum(waiting.work for waiting in self._line[:index])
        self._check_in_time(ahead, work, timeout_s, begun_s)
        if not self._line:
            self._advanced_s = begun_s
        elif index == 0:
            self._line[0].is_first.clear()
        if index == 0:
            me.is_first.set()
        self._line.insert(index, me)
        self._work += work
        try:
            found = await self._turn(me, find, timeout_s, why)
            now_s = self._clock()
            self.pace.on_admitted(work, now_s - self._advanced_s, now_s)
            self._advanced_s = now_s
            self._metrics.queued_s.observe(now_s - begun_s)
            return found
        finally:
            self._line.remove(me)
            self._work = max(0.0, self._work - work) if self._line else 0.0
            if self._line:
                self._line[0].is_first.set()

    async def _turn(self, me: _Waiting, find: Callable[[], T | None], timeout_s: float, why: Callable[[], str]) -> T:
        begun_s = self._clock()
        until_s = begun_s + min(timeout_s, self._room_timeout_s)
        while (now_s := self._clock()) < until_s:
            if not me.is_first.is_set():
                # Not wait_for: up to Python 3.11 it swallows a cancellation that comes with the event.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(until_s - now_s):
                        await me.is_first.wait()
                continue
            if (found := find()) is not None:
                left_s = timeout_s - (now_s - begun_s)
                if (needed_s := _MARGIN * self.pace.service_s(me.work, now_s)) > left_s:
                    detail = f"{left_s:.1f} s are left of the request's time, and an answer takes {needed_s:.1f} s"
                    raise self._refusal("too_late", detail, self._work)
                return found
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(_LOOK_S, until_s - now_s)):
                    await self._changed.wait()
        if timeout_s <= self._room_timeout_s:
            self._metrics.refused.labels("timeout").inc()
            raise RequestTimeoutError(f"no worker had a place within the request's {timeout_s:g} s; give it more time")
        raise self._refusal("no_place", why(), self._work)

    def _check_in_time(self, ahead: float, work: float, timeout_s: float, now_s: float) -> None:
        wait_s = self.pace.wait_s(ahead + work, now_s)
        if wait_s > self._room_timeout_s:
            detail = f"some {wait_s:.0f} s of work wait ahead; the limit is {self._room_timeout_s:g} s"
            raise self._refusal("would_wait", detail, self._work)
        needed_s = _MARGIN * (wait_s + self.pace.service_s(work, now_s))
        if needed_s > timeout_s:
            detail = f"waiting and answering take some {needed_s:.1f} s, the request has {timeout_s:g} s"
            raise self._refusal("would_be_late", detail, self._work)

    def _refusal(self, reason: str, detail: str, work_ahead: float) -> OverloadedError:
        self._metrics.refused.labels(reason).inc()
        wait_s = self.pace.wait_s(work_ahead, self._clock())
        return OverloadedError(f"{detail}; try again later", retry_after_s=min(max(1.0, wait_s), _MAX_RETRY_S))
