"""The gateway's state as events for consoles: made once a second for all consoles together, and only while one is open.

A ``roster`` event goes to a new console, and to all when it changes. A ``state`` event follows every second. Lives on the gateway's
asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from kvrelay.common.clock import Clock
from kvrelay.gateway.desk.figures import Figures, Tally
from kvrelay.gateway.desk.records import Records
from kvrelay.gateway.desk.snapshot import WINDOW_S, roster, state
from kvrelay.gateway.errors import ClientBehindError
from kvrelay.gateway.http.sse import EventStream, sse
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.model import Models

EVERY_S = 1.0
MAX_BYTES_PER_S = 10_000  # to each console; a longer state is sent less often


class Feed:
    """The feed of one gateway."""

    def __init__(
        self, models: Models, metrics: GatewayMetrics, records: Records, clock: Clock, is_ending: Callable[[], bool]
    ) -> None:
        """``is_ending``: whether the gateway is waiting for its last requests. A console is not one of them."""
        self._models = models
        self._metrics = metrics
        self._records = records
        self._clock = clock
        self._is_ending = is_ending
        # The future is done when the follower has to leave.
        self._followers: dict[EventStream, asyncio.Future[None]] = {}
        self._ticker: asyncio.Task[None] | None = None  # while a console is open
        self._tallies: deque[Tally] = deque()
        self._roster = self._state = b""  # the last events

    async def follow(self, stream: EventStream) -> bytes:
        """Write events until the gateway ends or the client falls behind. Cancelled when the client leaves."""
        end = asyncio.get_running_loop().create_future()
        if self._ticker is None or self._ticker.done():
            self._roster = b""
            self._tallies.clear()
            self._ticker = asyncio.create_task(self._run())
        else:
            stream.write(self._roster + self._state)
        self._followers[stream] = end
        try:
            # A ticker that fails is logged like any task. It ends all streams, and the consoles connect again.
            await asyncio.wait([end, self._ticker], return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._followers[stream]
            if not self._followers:
                self._ticker.cancel()
        return b""

    async def _run(self) -> None:
        while not self._is_ending():
            events = self._look()
            for stream, end in self._followers.items():
                try:
                    stream.write(events)
                except ClientBehindError:
                    if not end.done():
                        end.set_result(None)
            await asyncio.sleep(max(EVERY_S, len(events) / MAX_BYTES_PER_S))

    def _look(self) -> bytes:
        """The next events, made of the gateway's current state."""
        now_s = self._clock()
        self._tallies.append(Tally.of(self._metrics, now_s))
        while self._tallies[0].at_s < now_s - WINDOW_S - EVERY_S / 2:
            self._tallies.popleft()
        figures = Figures.between(self._tallies[0], self._tallies[-1])
        before, self._roster = self._roster, sse(roster(self._models), "roster")
        self._state = sse(state(self._models, self._records, figures, now_s), "state")
        return self._state if self._roster == before else self._roster + self._state
