"""A submitted request, as its owner holds it: wait for it, iterate over it, take it back; from any thread and any asyncio loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterator

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
        return self._progress.is_over

    def aborted(self) -> bool:
        """Whether it was taken back before it was complete."""
        return self._progress.error is None and self._progress.is_cancelled

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Block until it is over.

        Raises TimeoutError after ``timeout`` seconds (the request goes on), or the ApiError that it failed with.
        """
        if not self._progress.wait_over(timeout):
            raise TimeoutError(f"request {self.request_id} is not complete after {timeout:g} s; it goes on")
        return self._whole()

    def __await__(self) -> Generator[None, None, RequestOutput]:
        """As :meth:`result`. Who gives up waiting leaves the request running."""
        return self._awaited().__await__()

    def __iter__(self) -> Iterator[RequestOutput]:
        cursor: Cursor = {}
        version = 0
        while True:
            self._progress.wait_news(version)
            output, version = self._next(cursor)
            yield output
            if output.finished:
                return

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        cursor: Cursor = {}
        version = 0
        while True:
            await self._progress.news(version)
            output, version = self._next(cursor)
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
        self._progress.when_over(lambda: callback(self))

    async def _awaited(self) -> RequestOutput:
        while not self._progress.is_over:
            await self._progress.news(self._progress.version)
        return self._whole()

    def _next(self, cursor: Cursor) -> tuple[RequestOutput, int]:
        output, version = self._progress.snapshot(cursor)
        if output.finished and self._progress.error is not None:
            raise self._progress.error
        return output, version

    def _whole(self) -> RequestOutput:
        if self._progress.error is not None:
            raise self._progress.error
        return self._progress.snapshot({})[0]
