"""A pool that works for asyncio, and ends when it is told to."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from kvrelay.executor.daemon_threads import DaemonThreads


def test_asyncio_uses_it_and_it_ends() -> None:
    before = set(threading.enumerate())
    threads = DaemonThreads(2, "called")
    loop = asyncio.new_event_loop()
    loop.set_default_executor(threads)

    async def work() -> list[str]:
        names = [asyncio.to_thread(lambda: threading.current_thread().name) for _ in range(20)]
        return await asyncio.gather(*names)

    assert set(loop.run_until_complete(work())) <= {"called-0", "called-1"}
    with pytest.raises(ZeroDivisionError):
        loop.run_until_complete(asyncio.to_thread(lambda: 1 // 0))
    loop.close()
    threads.shutdown()
    assert not set(threading.enumerate()) - before


def test_what_was_cancelled_is_not_called() -> None:
    threads = DaemonThreads(1, "called")
    hold = threading.Event()
    first = threads.submit(hold.wait, 10)
    second = threads.submit(time.sleep, 1000)
    assert second.cancel()
    hold.set()
    assert first.result(10) is True
    threads.shutdown()
