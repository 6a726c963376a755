"""Runs requests over a backend, on its own thread with an asyncio loop. Callers are on any other thread or loop.

Life cycle: ``start`` (the backend gets ready), then ``submit`` from any thread, then ``shutdown``. Every submitted request ends
exactly once: complete, aborted, or with an error. This also holds if the backend or the thread dies.
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

_LOOK_S = 0.25  # how often to ask whether the backend is live: a dying thread reports nothing
_NUM_THREADS = 4  # threads for work that would block the loop


Stats = dict[str, int]
"""Counts: running and waiting requests, used and free KV blocks (free includes cached), tokens of prompts and of output so far."""


class Backend(Protocol):
    """Made on any thread. All methods are called on the executor's asyncio loop."""

    async def start(self) -> None:
        """Get ready for requests. Raises KvrelayError; ``stop`` is called in that case, too."""

    async def run(self, request: Request, progress: Progress, *, stream: bool) -> None:
        """Write the request's outputs into ``progress``. The request is complete when this returns. Raises ApiError.

        If cancelled, it releases everything that the request holds.
        """

    async def stats(self) -> Stats:
        """The current load. Raises ApiError."""

    def not_live(self) -> list[str]:
        """Why no request can succeed any more; empty if one can."""

    async def stop(self) -> None:
        """End everything. No request is running then."""


@dataclass(frozen=True, slots=True, eq=False)
class Submitted:
    """A submitted request."""

    request: Request
    progress: Progress
    stream: bool


class Executor:
    """Call ``start`` once, and ``shutdown`` at least once."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._thread = threading.Thread(target=self._main, name="kvrelay-executor", daemon=True)
        self._loop = asyncio.new_event_loop()
        self._started: Future[None] = Future()
        self._stopping = asyncio.Event()
        self._lock = threading.Lock()
        self._open: set[Submitted] = set()  # not over
        self._is_closed = False
        self._end: ApiError = ShutDownError()  # the error of open requests when the executor ends
        self._tasks: dict[Submitted, asyncio.Task[None]] = {}  # on the loop only
        self._pid = os.getpid()

    def start(self) -> None:
        """Returns when requests can be served. Raises what the backend raises; the executor is then shut down."""
        self._thread.start()
        try:
            self._started.result()
        except BaseException:
            self.shutdown()
            raise

    # -- from any thread -------------------------------------------------------------------------------------------

    def submit(self, request: Request, *, stream: bool) -> Submitted:
        """Begin a request. Never blocks and never raises: errors appear in its progress."""
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
        """Abort a request that is not over. Returns at once."""
        with self._lock:
            if not self._is_closed:
                self._loop.call_soon_threadsafe(self._cancel, submitted)

    def stats(self) -> Future[Stats]:
        """The backend's statistics. The future may raise ApiError."""
        future: Future[Stats] = Future()
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                return asyncio.run_coroutine_threadsafe(self._backend.stats(), self._loop)
        future.set_exception(self._end)
        return future

    def shutdown(self, timeout_s: float = 30.0) -> None:
        """End everything. Open requests fail with ShutDownError. Waits up to ``timeout_s`` for the threads' end."""
        if os.getpid() != self._pid:
            return  # a forked process has the memory but not the threads; sockets and files belong to its parent
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
        """Whether requests can still succeed. If not, all requests end, and so do later ones."""
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
        """Called after ``_begin``: a request without a task is over."""
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
        """The request's task is done, perhaps without having run."""
        del self._tasks[submitted]
        with self._lock:
            self._open.discard(submitted)
        submitted.progress.finish(self._end)  # if it is not over, its task was cancelled, but not by its owner


async def _end_leftovers() -> None:
    """Cancel other tasks on the loop, such as calls for statistics, so that their callers do not wait forever."""
    await asyncio.sleep(0)  # lets calls that other threads have scheduled begin
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
