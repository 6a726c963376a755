"""The queue of blocks that a sender's lines share: one block wakes one of them, and one that waits."""

from __future__ import annotations

import queue
import select
import threading
from collections.abc import Iterator
from typing import cast

import pytest

from kvrelay.wire.block_frames import BlockHeader
from kvrelay.wire.errors import PeerLostError
from kvrelay.wire.send_job import Bell, JobQueue, Line, SendJob, SendTicket, Wakeup

from .rig import WAIT_S

NUM_LINES = 3


def job(index: int = 0) -> SendJob:
    return SendJob(SendTicket(), BlockHeader(1, 1, index, 8, b"h" * 16), memoryview(b""), None)


class HeldLine:
    """A line whose thread waits for a block, and leaves, or dies, when the test says so."""

    def __init__(self, jobs: JobQueue) -> None:
        self.error: Exception | None = None
        self._jobs = jobs
        self._bells: queue.Queue[Bell] = queue.Queue()
        self._may_leave = threading.Semaphore(0)
        self._left: queue.Queue[Exception | None] = queue.Queue()

    def wait_for(self, bell: Bell) -> None:
        self._bells.put(bell)
        assert self._may_leave.acquire(timeout=WAIT_S)
        if self.error is not None:
            raise self.error

    def begin(self) -> None:
        """Have a thread wait for a block."""
        threading.Thread(target=self._run, daemon=True).start()
        self.bell = self._bells.get(timeout=WAIT_S)

    def leave(self, error: Exception | None = None) -> None:
        """Have the thread leave, or die of ``error``."""
        self.error = error
        self._may_leave.release()
        assert self._left.get(timeout=WAIT_S) is error

    def _run(self) -> None:
        try:
            self._jobs.wait(cast(Line, self))
        except Exception as error:
            self._left.put(error)
        else:
            self._left.put(None)


@pytest.fixture
def jobs() -> Iterator[JobQueue]:
    jobs = JobQueue()
    for _ in range(NUM_LINES - 1):
        jobs.expect_one_more()
    yield jobs
    jobs.close()


@pytest.fixture
def lines(jobs: JobQueue) -> list[HeldLine]:
    """All wait for a block."""
    lines = [HeldLine(jobs) for _ in range(NUM_LINES)]
    for line in lines:
        line.begin()
    return lines


def woken(lines: list[HeldLine]) -> list[HeldLine]:
    """Those whose wait would end."""
    return [line for line in lines if select.select([line.bell], [], [], 0)[0]]


def test_one_block_wakes_one_line(jobs: JobQueue, lines: list[HeldLine]) -> None:
    for num_blocks in range(1, NUM_LINES + 2):
        jobs.put(job())
        assert len(woken(lines)) == min(num_blocks, NUM_LINES)
    for line in lines:
        line.leave()


def test_who_was_woken_can_wait_and_be_woken_again(jobs: JobQueue, lines: list[HeldLine]) -> None:
    for _ in range(5):
        jobs.put(job())
        (line,) = woken(lines)
        line.leave()
        assert jobs.take() is not None
        line.begin()
        assert woken(lines) == [], "of what it had taken"
    for line in lines:
        line.leave()


def test_a_line_that_is_busy_may_take_a_block_that_another_was_woken_for(jobs: JobQueue, lines: list[HeldLine]) -> None:
    jobs.put(job())
    assert jobs.take() is not None
    (line,) = woken(lines)
    line.leave()
    assert jobs.take() is None
    line.begin()
    jobs.put(job())
    assert len(woken(lines)) == 1
    for line in lines:
        line.leave()


def test_no_line_waits_while_there_is_a_block(jobs: JobQueue) -> None:
    jobs.put(job())
    jobs.wait(cast(Line, HeldLine(jobs)))  # which would say that it waits
    assert jobs.take() is not None


def test_a_line_that_dies_when_its_block_was_taken_wakes_nobody(jobs: JobQueue, lines: list[HeldLine]) -> None:
    jobs.put(job())
    assert jobs.take() is not None
    (dying,) = woken(lines)
    dying.leave(PeerLostError("gone"))
    lines.remove(dying)
    assert woken(lines) == []
    for line in lines:
        line.leave()


def test_a_line_that_died_unwoken_is_not_woken_for_what_comes_later(jobs: JobQueue, lines: list[HeldLine]) -> None:
    for dying in lines[1:]:
        dying.leave(PeerLostError("gone"))
        jobs.put(job())
        left = [line for line in lines if line.error is None]
        assert woken(left), "a block that nobody is woken for"
        assert jobs.take() is not None
        (line,) = woken(left)[:1]
        line.leave()
        line.begin()
    lines[0].leave()


class Waiter:
    """A line that waits as lines do."""

    def __init__(self, wakeup: Wakeup) -> None:
        self._wakeup = wakeup

    def wait_for(self, bell: Bell) -> None:
        select.select([bell, self._wakeup], [], [])


def test_as_many_threads_are_woken_as_blocks_come(jobs: JobQueue) -> None:
    """None is left to wait while there is a block, and none of several blocks for a thread that has one."""
    wakeup, together = Wakeup(), threading.Barrier(NUM_LINES + 1)
    taken: queue.SimpleQueue[SendJob] = queue.SimpleQueue()

    def run() -> None:
        while not wakeup.is_set:
            jobs.wait(cast(Line, Waiter(wakeup)))
            if (one := jobs.take()) is not None:
                together.wait(WAIT_S)
                taken.put(one)

    threads = [threading.Thread(target=run) for _ in range(NUM_LINES)]
    for thread in threads:
        thread.start()
    for index in range(0, 300, NUM_LINES):
        for number in range(NUM_LINES):
            jobs.put(job(index + number))
        together.wait(WAIT_S)
        indexes = {taken.get(timeout=WAIT_S).header.block_index for _ in range(NUM_LINES)}
        assert indexes == {*range(index, index + NUM_LINES)}
    wakeup.set()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    wakeup.close()
