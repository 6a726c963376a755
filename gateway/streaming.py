"""Generations to HTTP: one JSON body or server-sent events, and the end of both when the client leaves.

The status line waits for the first tokens, so that what fails before them is a proper HTTP error. What fails later is one error
event in the stream, never a silent cut.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvrelay.gateway.errors import ApiError
from kvrelay.gateway.generation import Generation, Generator, TextDelta, Usage
from kvrelay.gateway.jobs import Job, total
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.sse import EndAtDisconnect, EventStream

logger = logging.getLogger(__name__)

Indexed = tuple[int, TextDelta]


class Responder:
    """Runs jobs and answers them."""

    def __init__(self, generator: Generator, metrics: GatewayMetrics) -> None:
        self._generator = generator
        self._metrics = metrics

    async def respond(self, request: Request, job: Job) -> Response:
        """The response; everything that fails before its status line is raised, as ApiError or ClientLeftError."""
        usages = job.usages()
        deltas = self._deltas(job.generations, usages)
        try:
            async with EndAtDisconnect(request.receive):
                first = await anext(deltas)
                if not job.is_stream:
                    return await self._whole(job, first, deltas, usages)
            return EventStream(self._events(job, first, deltas, usages), deltas, job.format.failed, self._on_disconnect)
        except BaseException:
            await deltas.aclose()
            raise

    def _deltas(self, generations: Sequence[Generation], usages: Sequence[Usage]) -> AsyncGenerator[Indexed]:
        runs = [self._generator.run(generation, usage) for generation, usage in zip(generations, usages, strict=True)]
        return merged(runs)

    async def _whole(
        self, job: Job, first: Indexed, rest: AsyncGenerator[Indexed], usages: Sequence[Usage]
    ) -> Response:
        deltas: list[list[TextDelta]] = [[] for _ in job.generations]
        deltas[first[0]].append(first[1])
        async with aclosing(rest):
            async for index, delta in rest:
                deltas[index].append(delta)
        body = job.format.whole(job.choices(deltas), total(usages))
        return JSONResponse({**body, **job.extras()} if isinstance(body, dict) else body)

    async def _events(
        self, job: Job, first: Indexed, rest: AsyncGenerator[Indexed], usages: Sequence[Usage]
    ) -> AsyncGenerator[bytes]:
        answer = job.format
        async with aclosing(rest):
            try:
                yield answer.opening() + answer.chunk(*first)
                async for item in rest:
                    yield answer.chunk(*item)
                yield answer.closing(total(usages), job.extras())
            except ApiError as error:
                self._metrics.requests.labels(job.route, "failed_mid_stream").inc()
                yield answer.failed(error)
            except Exception:
                logger.exception("a stream failed", extra={"request_id": job.generations[0].request_id})
                self._metrics.requests.labels(job.route, "failed_mid_stream").inc()
                yield answer.failed(ApiError("the server failed while it was answering; try again"))

    def _on_disconnect(self) -> None:
        self._metrics.disconnects.inc()


async def merged(generators: Sequence[AsyncGenerator[TextDelta]]) -> AsyncGenerator[Indexed]:
    """The deltas of all generators as they come, numbered. Closing it closes all of them; the first error ends all."""
    if len(generators) == 1:
        async with aclosing(generators[0]) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    queue: asyncio.Queue[Indexed | BaseException | None] = asyncio.Queue()

    async def pump(index: int, generator: AsyncGenerator[TextDelta]) -> None:
        try:
            async with aclosing(generator) as deltas:
                async for delta in deltas:
                    queue.put_nowait((index, delta))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(index, generator)) for index, generator in enumerate(generators)]
    try:
        num_running = len(tasks)
        while num_running:
            item = await queue.get()
            if item is None:
                num_running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
