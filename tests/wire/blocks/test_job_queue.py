"""The queue of blocks that a sender's lines share: ``select`` sees waiting blocks, and each block is taken once."""

from __future__ import annotations

import queue
import select
import threading
from collections.abc import Iterator

import pytest

from kvrelay.wire.blocks.frames import BlockHeader
from kvrelay.wire.blocks.send_job import JobQueue, SendJob, SendTicket, Wakeup

from ..lease_bench import WAIT_S


def job(index: int = 0) -> SendJob:
    return SendJob(SendTicket(), BlockHeader(1, 1, index, 8, b"h" * 16), memoryview(b""), None)


@pytest.fixture
def jobs() -> Iterator[JobQueue]:
    jobs = JobQueue()
    yield jobs
    jobs.close()


def test_it_can_be_read_while_a_block_waits(jobs: JobQueue) -> None:
    def can_be_read() -> bool:
        return bool(select.select([jobs], [], [], 0)[0])

    for _ in range(2):
        assert not can_be_read()
        assert jobs.take() is None
        for index in range(3):
            jobs.put(job(index))
        for index in range(3):
            assert can_be_read()
            taken = jobs.take()
            assert taken is not None
            assert taken.header.block_index == index
    assert not can_be_read()


def test_each_block_is_taken_once_and_none_is_left(jobs: JobQueue) -> None:
    wakeup = Wakeup()
    taken: queue.SimpleQueue[int] = queue.SimpleQueue()

    def run() -> None:
        while not wakeup.is_set:
            select.select([jobs, wakeup], [], [])
            if (one := jobs.take()) is not None:
                taken.put(one.header.block_index)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for index in range(300):
        jobs.put(job(index))
    assert sorted(taken.get(timeout=WAIT_S) for _ in range(300)) == list(range(300))
    wakeup.set()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert taken.empty()
    wakeup.close()
