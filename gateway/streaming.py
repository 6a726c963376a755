"""Generations to HTTP: one JSON body or server-sent events, and the end of both when the client leaves.

The status line waits for the first tokens, so that what fails before them is a proper HTTP error. What fails later is one error
event in the stream, never a silent cut.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import CancelledError
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from kvrelay.gateway.errors import ApiError, ShuttingDownError
from kvrelay.gateway.generation import Generation, Generator, TextDelta, Usage
from kvrelay.gateway.metrics import GatewayMetrics

logger = logging.getLogger(__name__)

Indexed = tuple[int, TextDelta]

_DONE = b"data: [DONE]\n\n"

# Within JSON they may stand as they are, and no event ends with one; but some clients split lines wherever Unicode sees an end.
_LINE_ENDS = tuple((end.encode(), f"\\u{ord(end):04x}".encode()) for end in ("\x85", "\u2028", "\u2029"))


class Format(Protocol):
    """How one route writes its answers. Choices are numbered by ``index``."""

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before the first text."""

    def chunk(self, index: int, delta: TextDelta) -> dict[str, Any]:
        """One chunk of a stream."""

    def usage_chunk(self, usage: dict[str, object]) -> dict[str, Any]:
        """The chunk that carries usage only."""

    def whole(self, choices: Sequence[Sequence[TextDelta]], usage: dict[str, object]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""


class ClientLeftError(Exception):
    """The client disconnected; there is nobody to answer."""


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request, ready to run."""

    route: str
    generations: list[Generation]
    format: Format
    is_stream: bool
    includes_usage: bool
    includes_timings: bool = False  # beside the usage, for the first choice

    def extras(self) -> dict[str, object]:
        """What only kvrelay's clients ask for, once the answer is complete."""
        return {"kvrelay": self.generations[0].timings.body()} if self.includes_timings else {}


class Responder:
    """Runs jobs and answers them."""

    def __init__(self, generator: Generator, metrics: GatewayMetrics) -> None:
        self._generator = generator
        self._metrics = metrics

    async def respond(self, request: Request, job: Job) -> Response:
        """The response; everything that fails before its status line is raised, as ApiError or ClientLeftError."""
        usages = [Usage(len(generation.prompt_token_ids)) for generation in job.generations]
        deltas = self._deltas(job.generations, usages)
        try:
            async with EndAtDisconnect(request.receive):
                first = await anext(deltas)
                if not job.is_stream:
                    return await self._whole(job, first, deltas, usages)
            return EventStream(self._events(job, first, deltas, usages), deltas, self._on_disconnect)
        except BaseException:
            await deltas.aclose()
            raise

    def _deltas(self, generations: Sequence[Generation], usages: Sequence[Usage]) -> AsyncGenerator[Indexed]:
        runs = [self._generator.run(generation, usage) for generation, usage in zip(generations, usages, strict=True)]
        return merged(runs)

    async def _whole(
        self, job: Job, first: Indexed, rest: AsyncGenerator[Indexed], usages: Sequence[Usage]
    ) -> Response:
        choices: list[list[TextDelta]] = [[] for _ in job.generations]
        choices[first[0]].append(first[1])
        async with aclosing(rest):
            async for index, delta in rest:
                choices[index].append(delta)
        return JSONResponse({**job.format.whole(choices, total(usages)), **job.extras()})

    async def _events(
        self, job: Job, first: Indexed, rest: AsyncGenerator[Indexed], usages: Sequence[Usage]
    ) -> AsyncGenerator[bytes]:
        async with aclosing(rest):
            for opening in job.format.opening():
                yield _event(opening)
            try:
                yield _event(job.format.chunk(*first))
                async for item in rest:
                    yield _event(job.format.chunk(*item))
                if job.includes_usage:
                    yield _event({**job.format.usage_chunk(total(usages)), **job.extras()})
            except ApiError as error:
                self._metrics.requests.labels(job.route, "failed_mid_stream").inc()
                yield _event(error.body())
            except Exception:
                logger.exception("a stream failed", extra={"request_id": job.generations[0].request_id})
                self._metrics.requests.labels(job.route, "failed_mid_stream").inc()
                yield _event(ApiError("the server failed while it was answering; try again").body())
        yield _DONE

    def _on_disconnect(self) -> None:
        self._metrics.disconnects.inc()


class EventStream(Response):
    """Server-sent events from a generator, which is closed when the client leaves.

    ``source`` is closed too: a generator that was never started does not close what it would have read.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes], source: AsyncGenerator[Any], on_disconnect: Callable[[], None]
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._source = source
        self._on_disconnect = on_disconnect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, or stop at a disconnect."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with EndAtDisconnect(receive):
                await self._send_all(send)
        except ClientLeftError:
            self._on_disconnect()
        except CancelledError:
            # Only a gateway that has to end, and has waited for as long as it may, cancels a request.
            last_words = _event(ShuttingDownError().body()) + _DONE
            await send({"type": "http.response.body", "body": last_words, "more_body": False})
        finally:
            await self._events.aclose()
            await self._source.aclose()

    async def _send_all(self, send: Send) -> None:
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


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


class EndAtDisconnect:
    """What is inside is cancelled when the client leaves; then ClientLeftError comes out."""

    def __init__(self, receive: Callable[[], Awaitable[Message]]) -> None:
        self._receive = receive
        self._has_left = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._num_cancellations = task.cancelling()
        self._watcher = asyncio.create_task(self._watch())

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._watcher.cancel()
        if self._has_left and self._task.uncancel() <= self._num_cancellations and isinstance(error, CancelledError):
            raise ClientLeftError from error

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._has_left = True
        self._task.cancel()


def total(usages: Sequence[Usage]) -> dict[str, object]:
    """The usage of all choices together."""
    return Usage(
        num_prompt_tokens=sum(usage.num_prompt_tokens for usage in usages),
        num_output_tokens=sum(usage.num_output_tokens for usage in usages),
        num_cached_tokens=sum(usage.num_cached_tokens for usage in usages),
    ).body()


def _event(body: dict[str, Any]) -> bytes:
    data = msgspec.json.encode(body)
    if not data.isascii():
        for character, escape in _LINE_ENDS:
            data = data.replace(character, escape)
    return b"data: " + data + b"\n\n"
