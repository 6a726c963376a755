"""Sends a planned load and keeps what came of each request.

The open loop sends at the due times whatever the server does, and never waits for an answer; the closed loop sends when an answer
has ended. After the last request the answers that are still under way are waited for; ``stop`` gives them up.

Whatever takes long on this loop makes chunks look later than they were: bodies are made ahead, and requests that are due together
are sent with turns for everything else in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvrelay.launcher.bench.ahead import BodiesAhead
from kvrelay.launcher.bench.bodies import BodyWriter
from kvrelay.launcher.bench.client import Answer, StreamingClient
from kvrelay.launcher.bench.records import RequestRecord
from kvrelay.launcher.bench.workload import ClosedLoop, PlannedRequest, Workload

_TICK_S = 0.02  # between two looks at how late the loop is


@dataclass(slots=True)
class Counts:
    """What has happened so far; for progress bars."""

    sent: int = 0
    answered: int = 0
    failed: int = 0
    chunks: int = 0


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
        """``clock`` gives seconds since the start of the run. ``exact_output``: an answer of another length has failed."""
        self.counts = Counts()
        self.late: list[tuple[float, float]] = []  # when the loop came to a timer, and how much later than it was to, s
        self._client = client
        self._writer = writer
        self._workload = workload
        self._clock = clock
        self._exact_output = exact_output
        self._records: list[RequestRecord] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._sending: asyncio.Future[Any] | None = None
        self._is_stopped = False
        self._failure: BaseException | None = None  # ours: what a server does wrong is in a record

    @property
    def is_stopped(self) -> bool:
        """Whether ``stop`` cut the run short."""
        return self._is_stopped

    async def run(self) -> list[RequestRecord]:
        """Send everything and wait for the answers; records of those that ended. Their index is to be given by the caller."""
        timed = BodiesAhead(self._writer, self._workload.timed, self._clock)
        work = [self._watch_loop(), timed.run()]
        senders = [self._send_timed(timed)]
        closed = self._workload.closed
        if closed is not None:
            bodies = BodiesAhead(self._writer, closed.upcoming(), self._clock, max_num=closed.concurrency)
            work.append(bodies.run())
            senders += [self._place(closed, bodies) for _ in range(closed.concurrency)]
        helpers = [asyncio.create_task(one) for one in work]
        for helper in helpers:  # nobody awaits them: what goes wrong there must end the run
            helper.add_done_callback(self._on_task_done)
        sending = asyncio.gather(*senders)
        self._sending = sending
        try:
            if not self._is_stopped:
                await sending
                while self._tasks:
                    await asyncio.wait(self._tasks)
        except asyncio.CancelledError:
            if not self._is_stopped:
                raise
        finally:
            await _cancelled(*helpers, sending, *self._tasks)
        if self._failure is not None:
            raise self._failure
        return self._records

    def stop(self) -> None:
        """Send nothing more and give up what is under way; ``run`` then returns soon."""
        self._is_stopped = True
        for task in self._tasks:
            task.cancel()
        if self._sending is not None:
            self._sending.cancel()

    async def _send_timed(self, bodies: BodiesAhead) -> None:
        while (ready := await bodies.next()) is not None:
            request, body = ready
            assert request.due_s is not None, "only a closed loop has no due times"
            # A timer may ring a little early.
            while (wait_s := request.due_s - self._clock()) > 0:  # noqa: ASYNC110 - waits for a time, not a state
                await asyncio.sleep(wait_s)
            task = asyncio.create_task(self._ask(request, body, request.due_s))
            self._tasks.add(task)
            task.add_done_callback(self._on_task_done)
            await asyncio.sleep(0)  # of many that are due together each is sent, and chunks are noted, before the next

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self.stop()

    async def _place(self, closed: ClosedLoop, bodies: BodiesAhead) -> None:
        """One of the places of the closed loop. A request is due when the place is free; the first when the run begins."""
        while (wait_s := -self._clock()) > 0:  # noqa: ASYNC110 - the run has not begun
            await asyncio.sleep(wait_s)
        free_s = 0.0
        while (ready := await bodies.next()) is not None:
            planned, body = ready
            request = closed.next_request(self._clock())
            if request is None:
                return
            assert request.number == planned.number, f"body of {planned.number} for {request.number}"
            answer = await self._ask(request, body, free_s)
            free_s = answer.ended_s

    async def _ask(self, request: PlannedRequest, body: bytes, due_s: float) -> Answer:
        self.counts.sent += 1
        expected = request.output_tokens if self._exact_output else None
        answer = await self._client.ask(body, exact_tokens=expected, on_chunk=self._count_chunk)
        self.counts.answered += 1
        self.counts.failed += answer.error is not None
        self._records.append(_record(request, answer, due_s))
        return answer

    async def _watch_loop(self) -> None:
        """A loop that is late notes chunks later than they came. Until cancelled."""
        while True:
            before_s = self._clock()
            await asyncio.sleep(_TICK_S)
            now_s = self._clock()
            self.late.append((now_s, max(0.0, now_s - before_s - _TICK_S)))

    def _count_chunk(self) -> None:
        self.counts.chunks += 1


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


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
