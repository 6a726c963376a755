"""Runs requests over a backend, on a thread of its own with an asyncio loop; callers are on any other thread or loop.

Its life: ``start`` (the backend gets ready), then ``submit`` from anywhere, then ``shutdown``. Every request that was submitted is
over exactly once: complete, aborted, or with an error. That holds, too, when the backend dies, or the thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol

from kvrelay.executor.daemon_threads import DaemonThreads
from kvrelay.executor.errors import ShutDownError, WorkerDiedError
from kvrelay.executor.progress import Progress
from kvrelay.executor.request import Request
from kvrelay.gateway.errors import ApiError

logger = logging.getLogger(__name__)

_LOOK_S = 0.25  # how often the backend is asked whether it is live: a thread that dies tells nobody
_NUM_THREADS = 4  # for what would block the loop


Stats = dict[str, int]
"""Requests that run and wait, KV blocks that are used and free (cached ones among them), tokens of prompts and output so far."""


class Backend(Protocol):
    """Made on any thread; all methods are called on the executor's asyncio loop."""

    async def start(self) -> None:
        """Get ready for requests. Raises KvrelayError; ``stop`` comes after that, too."""

    async def run(self, request: Request, progress: Progress, *, stream: bool) -> None:
        """Write the request's outputs into ``progress``; it is complete when this returns. Raises ApiError.

        Cancelled, it gives everything back that the request holds.
        """

    async def stats(self) -> Stats:
        """How busy it is. Raises ApiError."""

    def not_live(self) -> list[str]:
        """Why nothing will ever come of any request; empty if something may."""

    async def stop(self) -> None:
        """End everything; no request runs any more."""


@dataclass(frozen=True, slots=True, eq=False)
class Submitted:
    """A request on its way."""

    request: Request
    progress: Progress
    stream: bool


class Executor:
    """``start`` once, ``shutdown`` at least once."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._thread = threading.Thread(target=self._main, name="kvrelay-executor", daemon=True)
        self._loop = asyncio.new_event_loop()
        self._started: Future[None] = Future()
        self._stopping = asyncio.Event()
        self._lock = threading.Lock()
        self._open: set[Submitted] = set()  # not over
        self._is_closed = False
        self._end: ApiError = ShutDownError()  # what open requests end with when the executor does
        self._tasks: dict[Submitted, asyncio.Task[None]] = {}  # on the loop only
        self._pid = os.getpid()

    def start(self) -> None:
        """Returns when requests can be served. Raises what the backend raises; the executor is shut down then."""
        self._thread.start()
        try:
            self._started.result()
        except BaseException:
            self.shutdown()
            raise

    # -- from any thread -------------------------------------------------------------------------------------------

    def submit(self, request: Request, *, stream: bool) -> Submitted:
        """Begin a request; never blocks, and raises nothing: what goes wrong is told by its progress."""
        request_id = request.request_id or f"exec-{secrets.token_hex(8)}"
        prompt = request.prompt if isinstance(request.prompt, str) else None
        progress = Progress(request_id, prompt, request.sampling_params.num_outputs, tells_pieces=stream)
        submitted = Submitted(replace(request, request_id=request_id), progress, stream)
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._open.add(submitted)
                self._loop.call_soon_threadsafe(self._begin, submitted)
        if is_closed:
            progress.finish(self._end)
        return submitted

    def abort(self, submitted: Submitted) -> None:
        """Take a request back, if it is not over. Returns at once."""
        with self._lock:
            if not self._is_closed:
                self._loop.call_soon_threadsafe(self._cancel, submitted)

    def stats(self) -> Future[Stats]:
        """The backend's. The future raises ApiError."""
        future: Future[Stats] = Future()
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                return asyncio.run_coroutine_threadsafe(self._backend.stats(), self._loop)
        future.set_exception(self._end)
        return future

    def shutdown(self, timeout_s: float = 30.0) -> None:
        """End everything: requests that are not over fail with ShutDownError. Waits up to ``timeout_s`` for the threads' end."""
        if os.getpid() != self._pid:
            return  # a forked process has the memory, but not the threads; the sockets and files are its parent's
        with self._lock:
            if not self._is_closed and self._thread.ident is not None:
                self._loop.call_soon_threadsafe(self._stopping.set)
        if self._thread.ident is None or self._thread is threading.current_thread():
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("the executor has not ended within %g s: the model is still in a step", timeout_s)

    # -- the executor's thread -------------------------------------------------------------------------------------

    def _main(self) -> None:
        threads = DaemonThreads(_NUM_THREADS, "kvrelay-executor-call")
        self._loop.set_default_executor(threads)
        try:
            self._loop.run_until_complete(self._live())
            self._loop.run_until_complete(_end_leftovers())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        except Exception as error:
            logger.critical("the executor's thread ends", exc_info=True)
            self._end = WorkerDiedError(f"the executor's thread ended unexpectedly: {error!r}")
        finally:
            with self._lock:
                self._is_closed = True
                left, self._open = self._open, set()
            for submitted in left:
                submitted.progress.finish(self._end)
            threads.shutdown()
            self._loop.close()

    async def _live(self) -> None:
        try:
            try:
                await self._backend.start()
            except Exception as error:
                self._started.set_exception(error)
                return
            self._started.set_result(None)
            while not self._stopping.is_set():
                self._look()
                try:
                    async with asyncio.timeout(_LOOK_S):
                        await self._stopping.wait()
                except TimeoutError:
                    continue
        finally:
            with self._lock:
                self._is_closed = True
            await self._cancel_all()
            await self._backend.stop()

    def _look(self) -> None:
        """Whether anything can still come of requests; if not, all end, and so do those to come."""
        if reasons := self._backend.not_live():
            self._end = WorkerDiedError(
                f"the worker in this process has ended: {'; '.join(reasons)}; make a new executor"
            )
            logger.critical("%s", self._end)
            self._stopping.set()

    async def _cancel_all(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, submitted: Submitted) -> None:
        if not self._stopping.is_set():
            task = self._tasks[submitted] = self._loop.create_task(self._run(submitted))
            task.add_done_callback(lambda _: self._forget(submitted))

    def _cancel(self, submitted: Submitted) -> None:
        """Called behind ``_begin``: a request that is not among the tasks is over."""
        if (task := self._tasks.get(submitted)) is not None:
            submitted.progress.finish()
            task.cancel()

    async def _run(self, submitted: Submitted) -> None:
        progress = submitted.progress
        try:
            await self._backend.run(submitted.request, progress, stream=submitted.stream)
            progress.finish()
        except ApiError as error:
            progress.finish(error)
        except Exception as error:
            logger.exception("a request failed", extra={"request_id": submitted.request.request_id})
            progress.finish(ApiError(f"the executor failed on this request: {error!r}"))

    def _forget(self, submitted: Submitted) -> None:
        """Its task is done, maybe without ever having run."""
        del self._tasks[submitted]
        with self._lock:
            self._open.discard(submitted)
        submitted.progress.finish(self._end)  # if it is not over: its task was cancelled, and not by its owner


async def _end_leftovers() -> None:
    """Who still waits for something on the loop, for instance for statistics, must not wait for ever."""
    await asyncio.sleep(0)  # what other threads asked for meanwhile begins
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
