"""The handle of a submitted request: wait for it, iterate over it, or abort it, from any thread and any asyncio loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Future

from kvrelay.executor.outputs import RequestOutput
from kvrelay.executor.progress import Cursor, Progress


class GenerationResult:
    """The handle of a submitted request. Names and behaviour are those of TensorRT-LLM's class.

    Iterating with ``for output in result`` or ``async for`` gives the outputs so far; fields that end in ``_diff`` have what is
    new. The last output is finished. Each iterator starts from the beginning. Without streaming there is only the last output.
    Leaving a loop does not end the request; :meth:`abort` does.
    """

    def __init__(self, progress: Progress, abort: Callable[[], None]) -> None:
        """Made by :meth:`kvrelay.executor.LLM.submit`."""
        self._progress = progress
        self._abort = abort

    @property
    def request_id(self) -> str:
        """The request's own id, or the one made for it."""
        return self._progress.request_id

    @property
    def finished(self) -> bool:
        """Whether it is over: complete, failed or aborted."""
        return self._progress.over.done()

    def aborted(self) -> bool:
        """Whether it was aborted before it was complete."""
        return self._progress.is_cancelled

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Block until the request is over.

        Raises TimeoutError after ``timeout`` seconds (the request continues), or the ApiError that it failed with.
        """
        try:
            self._progress.over.result(timeout)
        except TimeoutError:
            raise TimeoutError(f"request {self.request_id} is not complete after {timeout:g} s; it goes on") from None
        return self._progress.snapshot({})[0]

    def __await__(self) -> Generator[None, None, RequestOutput]:
        """Like :meth:`result`. Cancelling the wait does not end the request."""
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
        """Abort the request: its resources are freed, and :meth:`result` returns the outputs so far, with ``finish_reason``
        "cancelled".

        Returns at once. Does nothing to a request that is over or aborted.
        """
        self._abort()

    def add_done_callback(self, callback: Callable[[GenerationResult], None]) -> None:
        """Call ``callback`` with this result when the request is over, on the executor's thread (so it must be quick).

        If it is over: at once.
        """
        self._progress.over.add_done_callback(lambda _: callback(self))

    def _next(self, cursor: Cursor) -> tuple[RequestOutput, Future[None]]:
        output, news = self._progress.snapshot(cursor)
        if output.finished:
            self._progress.over.result()
        return output, news


async def _done(future: Future[None]) -> None:
    """Wait for ``future`` on the running loop. Cancelling the wait does not cancel it."""
    loop, woken = asyncio.get_running_loop(), asyncio.Event()

    def wake(_: Future[None]) -> None:
        with contextlib.suppress(RuntimeError):  # that loop is closed, so no coroutine waits on it
            loop.call_soon_threadsafe(woken.set)

    future.add_done_callback(wake)
    await woken.wait()
