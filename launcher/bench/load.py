"""Sends a planned load and keeps a record of each request.

The open loop sends at the due times and never waits for an answer. Each place of the closed loop sends its next request when its
answer has ended. After the last request the runner waits for all answers; ``stop`` gives them up. If one request after the other
fails for a reason that more requests do not change, the runner stops by itself.

Slow work on this event loop makes chunks appear late. So bodies are made one at a time, and other tasks run in between.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable

from kvrelay.launcher.bench.bodies import BodyWriter
from kvrelay.launcher.bench.client import Answer, StreamingClient
from kvrelay.launcher.bench.records import RequestRecord
from kvrelay.launcher.bench.workload import ClosedLoop, PlannedRequest, Workload

_TICK_S = 0.02  # interval at which the loop's lateness is measured
_NUM_IN_VAIN = 20  # requests in a row
_IN_VAIN_S = 2.0  # from the first of them to the last, so that a server may restart
_PASSING = ("http 408", "http 425", "http 429")  # refusals that say nothing about the request


class Vain:
    """Finds out that more requests measure nothing: each is refused as wrong (status 4xx), or nobody takes connections."""

    def __init__(self) -> None:
        self._num = 0  # in a row
        self._since_s = 0.0
        self._first: list[int] = []  # the numbers of those that were sent first

    def reason(self, record: RequestRecord, number: int, oldest: int | None) -> str | None:
        """Why to stop after this request, the next one that ended. None: go on.

        ``number``: of this request, in the order of sending. ``oldest``: of the first one that is still under way, if there is one:
        a server that refuses later ones may be answering it.
        """
        error = record.error or ""
        is_refused = error.startswith("http 4") and error not in _PASSING
        if not is_refused and error != "connection":
            self._num = 0
            self._first.clear()
            return None
        self._since_s = record.finished_s if not self._num else self._since_s
        self._num += 1
        insort(self._first, number)
        del self._first[_NUM_IN_VAIN:]
        if self._num < _NUM_IN_VAIN or record.finished_s - self._since_s < _IN_VAIN_S:
            return None
        if oldest is not None and oldest < self._first[-1]:
            return None
        return f"the last {self._num} requests failed, at the end with {error}: {record.error_text}"


class LoadRunner:
    """Runs one workload, once."""

    def __init__(
        self,
        client: StreamingClient,
        writer: BodyWriter,
        workload: Workload,
        *,
        clock: Callable[[], float],
        exact_output: bool,
    ) -> None:
        """``clock`` gives seconds since the start of the run. ``exact_output``: an answer of another length fails."""
        self.num_sent = 0
        self.records: list[RequestRecord] = []  # of ended requests; ``index`` is the number within the stream
        self.late: list[tuple[float, float]] = []  # when a timer fired, and how late it was, in s
        self.is_stopped = False  # whether ``stop`` was called
        self.in_vain: str | None = None  # why the runner stopped by itself
        self._vain = Vain()
        self._under_way: dict[int, None] = {}  # the numbers of requests that were sent, in order
        self._client = client
        self._writer = writer
        self._workload = workload
        self._clock = clock
        self._exact_output = exact_output
        self._work: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Send everything and wait for the answers."""
        self._work = asyncio.create_task(self._send_all())
        if self.is_stopped:
            self._work.cancel()
        try:
            await self._work
        except asyncio.CancelledError:
            if not self.is_stopped:
                raise

    def stop(self) -> None:
        """Send nothing more and give up pending requests. ``run`` then returns soon."""
        self.is_stopped = True
        if self._work is not None:
            self._work.cancel()

    async def _send_all(self) -> None:
        async with asyncio.TaskGroup() as helpers:
            watch = helpers.create_task(self._watch_loop())
            async with asyncio.TaskGroup() as sending:
                if (closed := self._workload.closed) is not None:
                    for _ in range(closed.concurrency):
                        sending.create_task(self._place(closed))
                for request in self._workload.timed:
                    assert request.due_s is not None, "only a closed loop has no due times"
                    body = self._writer.make(request)
                    await self._until(request.due_s)
                    sending.create_task(self._ask(request, body, request.due_s))
                    await asyncio.sleep(0)  # sends this request, and notes chunks, before the next body is made
            watch.cancel()

    async def _place(self, closed: ClosedLoop) -> None:
        """One place of the closed loop. A request is due when the place is free, the first one at the start of the run."""
        await self._until(0.0)
        free_s = 0.0
        while (request := closed.next_request(self._clock())) is not None:
            answer = await self._ask(request, self._writer.make(request), free_s)
            free_s = answer.ended_s

    async def _until(self, due_s: float) -> None:
        # Timers may fire a little early.
        while (wait_s := due_s - self._clock()) > 0:  # noqa: ASYNC110 - waits for a time, not a state
            await asyncio.sleep(wait_s)

    async def _ask(self, request: PlannedRequest, body: bytes, due_s: float) -> Answer:
        number = self.num_sent
        self.num_sent += 1
        self._under_way[number] = None
        expected = request.output_tokens if self._exact_output else None
        answer = await self._client.ask(body, exact_tokens=expected)
        del self._under_way[number]
        record = _record(request, answer, due_s)
        self.records.append(record)
        oldest = next(iter(self._under_way), None)
        if not self.is_stopped and (reason := self._vain.reason(record, number, oldest)) is not None:
            self.in_vain = reason
            self.stop()
        return answer

    async def _watch_loop(self) -> None:
        """Measure the loop's lateness, because a late loop notes chunks late. Runs until cancelled."""
        while True:
            before_s = self._clock()
            await asyncio.sleep(_TICK_S)
            now_s = self._clock()
            self.late.append((now_s, max(0.0, now_s - before_s - _TICK_S)))


def _record(request: PlannedRequest, answer: Answer, due_s: float) -> RequestRecord:
    num_prompt, num_output = answer.prompt_tokens, answer.output_tokens
    return RequestRecord(
        index=request.number,
        stream=request.stream,
        is_warmup=request.is_warmup,
        due_s=due_s,
        sent_s=answer.sent_s,
        finished_s=answer.finished_s,
        prompt_tokens=request.prompt_tokens if num_prompt is None else num_prompt,
        planned_output_tokens=request.output_tokens,
        output_tokens=len(answer.chunk_s) if num_output is None else num_output,
        has_usage=num_output is not None or answer.error is not None,
        chunk_s=answer.chunk_s,
        error=answer.error,
        error_text=answer.error_text,
        parts=answer.parts,
    )
