"""Threads for an asyncio loop that must be able to stop while the interpreter exits.

From then on Python starts no threads (3.12), nor takes its own thread pools any work, and just then an executor that nobody shut
down has to close sockets and join threads, off its loop. So these threads are there from the beginning, and nobody waits for them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class DaemonThreads(ThreadPoolExecutor):
    """A pool with daemon threads of its own. (asyncio takes nothing but a ThreadPoolExecutor; none of its threads ever starts.)"""

    def __init__(self, num_threads: int, name: str) -> None:
        """All threads start here."""
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
        """The threads end when what was submitted is done; ``wait`` for that."""
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
            del call, future, work  # while this thread waits, it must not keep anything alive
