"""Bodies of requests that will be sent, made a little before they are needed.

Making one takes as long as several chunks take to come, so it must neither make its request late nor hold up the loop when many
are due together. They are kept in memory until they are sent, which bounds how far ahead they are made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from kvrelay.launcher.bench.bodies import BodyWriter
from kvrelay.launcher.bench.workload import PlannedRequest

AHEAD_S = 5.0  # before a request is due
_MAX_AHEAD_BYTES = 256 * 2**20

Ready = tuple[PlannedRequest, bytes]


class BodiesAhead:
    """Makes bodies in the order of their requests, in ``run``; hands them out in that order."""

    def __init__(
        self,
        writer: BodyWriter,
        requests: Iterable[PlannedRequest],
        clock: Callable[[], float],
        *,
        max_num: int | None = None,
    ) -> None:
        """At most ``max_num`` are kept; without it, those of the next ``AHEAD_S`` seconds on ``clock``."""
        self._writer = writer
        self._requests = requests
        self._clock = clock
        self._max_num = max_num
        self._ready: asyncio.Queue[Ready | None] = asyncio.Queue()
        self._num_bytes = 0  # of those that are kept
        self._taken = asyncio.Event()

    async def run(self) -> None:
        """Make them all, with pauses while enough are there."""
        for request in self._requests:
            if request.due_s is not None:
                # A timer may ring a little early.
                while (wait_s := request.due_s - AHEAD_S - self._clock()) > 0:  # noqa: ASYNC110 - waits for a time
                    await asyncio.sleep(wait_s)
            body = await self._writer.make(request)
            while self._is_full:
                self._taken.clear()
                await self._taken.wait()
            self._num_bytes += len(body)
            self._ready.put_nowait((request, body))
        self._ready.put_nowait(None)

    async def next(self) -> Ready | None:
        """The next request with its body; None after the last (to one caller: several must not wait for a load that ends)."""
        ready = await self._ready.get()
        if ready is not None:
            self._num_bytes -= len(ready[1])
            self._taken.set()
        return ready

    @property
    def _is_full(self) -> bool:
        num = self._ready.qsize()
        return num > 0 and (num == self._max_num or self._num_bytes >= _MAX_AHEAD_BYTES)
