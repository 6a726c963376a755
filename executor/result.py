"""A submitted request, as its owner holds it: wait for it, iterate over it, take it back; from any thread and any asyncio loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Future

from kvrelay.executor.outputs import RequestOutput
from kvrelay.executor.progress import Cursor, Progress


class GenerationResult:
    """Names and behaviour are those of TensorRT-LLM's class.

    Iterating, ``for output in result`` or ``async for``, gives the outputs so far, with what is new in the fields that end in
    ``_diff``; the last one is finished. Each iterator begins at the beginning. Of a request that does not stream there is just that
    last one. Leaving a loop does not end the request; :meth:`abort` does.
    """

    def __init__(self, progress: Progress, abort: Callable[[], None]) -> None:
        """Made by :meth:`kvrelay.executor.LLM.submit`."""
        self._progress = progress
        self._abort = abort

    @property
    def request_id(self) -> str:
        """The request's own, or the one that was made for it."""
        return self._progress.request_id

    @property
    def finished(self) -> bool:
        """Whether it is over: complete, failed or aborted."""
        return self._progress.over.done()

    def aborted(self) -> bool:
        """Whether it was taken back before it was complete."""
        return self._progress.is_cancelled

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Block until it is over.

        Raises TimeoutError after ``timeout`` seconds (the request goes on), or the ApiError that it failed with.
        """
        try:
            self._progress.over.result(timeout)
        except TimeoutError:
            raise TimeoutError(f"request {self.request_id} is not complete after {timeout:g} s; it goes on") from None
        return self._progress.snapshot({})[0]

    def __await__(self) -> Generator[None, None, RequestOutput]:
        """As :meth:`result`. Who gives up waiting leaves the request running."""
        yield from _done(self._progress.over).__await__()
        return self.result()

    def __iter__(self) -> Iterator[RequestOutput]:
        cursor: Cursor = {}
        news = self._progress.first_news
        while True:
            news.result()
            output, news = self._next(cursor)
            yield output
            if output.finished:
                return

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        cursor: Cursor = {}
        news = self._progress.first_news
        while True:
            await _done(news)
            output, news = self._next(cursor)
            yield output
            if output.finished:
                return

    def abort(self) -> None:
        """Take the request back: what it holds is freed, and :meth:`result` gives what has come, ``finish_reason`` "cancelled".

        Returns at once. Does nothing to a request that is over, or was aborted.
        """
        self._abort()

    def add_done_callback(self, callback: Callable[[GenerationResult], None]) -> None:
        """Call ``callback`` with this result when it is over, on the executor's thread (it must be quick); at once if it is."""
        self._progress.over.add_done_callback(lambda _: callback(self))

    def _next(self, cursor: Cursor) -> tuple[RequestOutput, Future[None]]:
        output, news = self._progress.snapshot(cursor)
        if output.finished:
            self._progress.over.result()
        return output, news


async def _done(future: Future[None]) -> None:
    """Wait for it on the running loop, whichever that is. Who gives up leaves it alone."""
    loop, woken = asyncio.get_running_loop(), asyncio.Event()

    def wake(_: Future[None]) -> None:
        with contextlib.suppress(RuntimeError):  # that loop is closed: nobody waits there any more
            loop.call_soon_threadsafe(woken.set)

    future.add_done_callback(wake)
    await woken.wait()
