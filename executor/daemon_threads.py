"""Threads for an asyncio loop that must be able to stop while the interpreter exits.

During its exit Python starts no threads (3.12), and its own thread pools take no work. Just then an executor that was not shut down
must close sockets and join threads, outside of its loop. So these threads start at the beginning, and the exit does not wait for
them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class DaemonThreads(ThreadPoolExecutor):
    """A pool with its own daemon threads. asyncio accepts only a ThreadPoolExecutor, but the base class's threads never start."""

    def __init__(self, num_threads: int, name: str) -> None:
        """Starts all threads."""
        super().__init__(max_workers=1)
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._daemons = [
            threading.Thread(target=self._serve, name=f"{name}-{index}", daemon=True) for index in range(num_threads)
        ]
        for thread in self._daemons:
            thread.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See concurrent.futures.Executor."""
        future: Future[Any] = Future()
        self._calls.put((future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end when the submitted work is done; ``wait`` for that."""
        for _ in self._daemons:
            self._calls.put(None)
        if wait:
            for thread in self._daemons:
                thread.join()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            future, work = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del call, future, work  # a waiting thread must not keep anything alive
