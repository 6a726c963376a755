"""A block sender's lines by themselves, played: who takes which block, when one more line is opened, and how all of them end."""

from __future__ import annotations

import errno
import queue
import select
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from prometheus_client import CollectorRegistry

from kvrelay.wire.blocks.frames import BlockHeader
from kvrelay.wire.blocks.send_job import JobQueue, SendJob, SendTicket, Wakeup
from kvrelay.wire.errors import PeerLostError, WireError
from kvrelay.wire.lines.block_sender import BlockSender
from kvrelay.wire.metrics import WireMetrics

from ..lease_bench import WAIT_S, until
from ..sending import NeverThere, assert_all_done_soon

NUM_SOCKETS = 3


class PlayedLine:
    """For TcpLine: has room, and ships, when the test says so. Waits as a line does, and says what it does."""

    def __init__(self, wakeup: Wakeup, number: int) -> None:
        self.number = number
        self.has_started_waiting: queue.Queue[None] = queue.Queue()  # for room; once for every round of its thread
        self.room = threading.Semaphore(0)
        self.takes = threading.Semaphore(0)
        self.taken: list[SendJob] = []
        self.shipped: list[SendJob] = []
        self.error: Exception | None = None
        self.num_closed = 0
        self._wakeup = wakeup

    def has_room(self) -> bool:
        self.has_started_waiting.put(None)
        return self._await(self.room)

    def wait_for(self, jobs: JobQueue) -> None:
        select.select([jobs, self._wakeup], [], [])

    def ship(self, job: SendJob) -> bool:
        if not job.ticket.take():
            return True
        self.taken.append(job)
        if not self._await(self.takes):
            return False
        if self.error is not None:
            raise self.error
        self.shipped.append(job)
        job.ticket.end()
        return True

    def close(self) -> None:
        self.num_closed += 1

    def _await(self, leave: threading.Semaphore) -> bool:
        while not leave.acquire(timeout=0.001):
            if self._wakeup.is_set:
                return False
        return not self._wakeup.is_set


class Stage:
    """A sender with played lines."""

    def __init__(self, num_sockets: int) -> None:
        self.lines: list[PlayedLine] = []
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        metrics = WireMetrics(CollectorRegistry())
        self.has_ended = threading.Event()
        self.sender = BlockSender(
            "tcp://nobody", metrics=metrics, context=context, num_sockets=num_sockets, on_end=self.has_ended.set
        )
        context.term()
        self.num_sent = 0

    def send(self, num_blocks: int = 1) -> list[SendTicket]:
        payload = memoryview(bytes(8))
        numbers = range(self.num_sent, self.num_sent + num_blocks)
        self.num_sent += num_blocks
        return [self.sender.send(BlockHeader(1, 1, number, 8, b"h" * 16), payload) for number in numbers]

    def next_round(self, number: int) -> None:
        """Wait until a line's thread waits for room (once more). The line may not be there yet."""
        until(lambda: len(self.lines) > number, "a line that is not opened")
        self.lines[number].has_started_waiting.get(timeout=WAIT_S)

    def ship_one(self, number: int) -> None:
        """Let a line that waits for room send one block, and wait until its thread comes for the next."""
        self.lines[number].room.release()
        self.lines[number].takes.release()
        self.next_round(number)

    def open_all(self) -> None:
        """Have blocks wait until all lines are open: all but the last have shipped one, and one waits."""
        self.send(NUM_SOCKETS)
        self.next_round(0)
        for number in range(NUM_SOCKETS - 1):
            self.ship_one(number)
            self.next_round(number + 1)

    def taken_by(self, number: int) -> list[int]:
        return [job.header.block_index for job in self.lines[number].taken]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Stage]]:
    stages: list[Stage] = []
    lines: list[PlayedLine] = []

    def open_line(address: str, *, wakeup: Wakeup, thread: int, num_lines: int, **_: Any) -> PlayedLine:
        lines.append(PlayedLine(wakeup, thread))
        return lines[-1]

    def make(num_sockets: int) -> Stage:
        stages.append(Stage(num_sockets))
        stages[-1].lines = lines
        return stages[-1]

    monkeypatch.setattr("kvrelay.wire.lines.block_sender.TcpLine", open_line)
    yield make
    for one in stages:
        one.sender.close()
    assert [line.num_closed for line in lines] == [1] * len(lines)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("block-sender")]


def assert_all_ends(on: Stage, tickets: list[SendTicket]) -> None:
    """All threads, and every block of ``tickets``."""
    for thread in on.sender._threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert not on.sender.is_alive
    assert_all_done_soon(tickets)


def test_a_link_with_little_to_do_stays_with_one_line(stage: Callable[[int], Stage]) -> None:
    on = stage(NUM_SOCKETS)
    on.next_round(0)
    for _ in range(5):
        (ticket,) = on.send()
        on.ship_one(0)
        assert ticket.is_done
    assert len(on.lines) == 1


def test_a_line_is_opened_when_blocks_wait_and_not_before_the_last_one_has_shipped(
    stage: Callable[[int], Stage],
) -> None:
    on = stage(NUM_SOCKETS)
    on.next_round(0)
    on.send(10)
    assert len(on.lines) == 1  # blocks wait, but its line has not shipped any
    on.ship_one(0)
    on.next_round(1)
    on.ship_one(0)  # another one of the first line's opens none: the youngest has shipped nothing
    assert len(on.lines) == 2
    on.ship_one(1)
    on.next_round(2)
    for number in range(NUM_SOCKETS):
        on.ship_one(number)
    assert [line.number for line in on.lines] == list(range(NUM_SOCKETS)), "more lines than there may be"


def test_with_one_socket_there_is_one_line_whatever_waits(stage: Callable[[int], Stage]) -> None:
    on = stage(1)
    tickets = on.send(10)
    on.next_round(0)
    for _ in range(10):
        on.ship_one(0)
    assert all(ticket.is_done for ticket in tickets)
    assert len(on.lines) == 1


def test_a_line_without_room_takes_no_block_and_holds_none_back(stage: Callable[[int], Stage]) -> None:
    on = stage(NUM_SOCKETS)
    on.open_all()
    tickets = on.send(6)
    for _ in range(3):  # lines 0 and 1 have no room; of what waits, there is one block from before
        on.ship_one(2)
    on.lines[1].room.release()  # has room, and is slow
    until(lambda: on.taken_by(1)[1:] == [5], "the next block that waits, for the next line with room")
    on.ship_one(2)
    assert on.taken_by(0) == [0]
    assert on.taken_by(2) == [2, 3, 4, 6]
    assert [ticket.is_done for ticket in tickets] == [True, True, False, True, False, False]
    on.lines[1].takes.release()
    on.next_round(1)
    assert tickets[2].is_done


@pytest.mark.parametrize("error", [PeerLostError("gone"), OSError("broken"), None], ids=["lost", "died", "given up"])
@pytest.mark.parametrize("broken", range(NUM_SOCKETS))
def test_when_one_line_breaks_all_end_and_no_block_is_held(
    stage: Callable[[int], Stage], broken: int, error: Exception | None
) -> None:
    """Each is in the middle of a block; nothing stays behind half dead."""
    on = stage(NUM_SOCKETS)
    on.open_all()
    tickets = on.send(3)
    for number in range(NUM_SOCKETS):
        on.lines[number].room.release()
    until(lambda: sum(len(line.taken) for line in on.lines) == 2 + NUM_SOCKETS, "each line has a block")
    if error is None:
        on.sender.give_up()
        on.sender.give_up()
    else:
        on.lines[broken].error = error
        on.lines[broken].takes.release()
    assert on.has_ended.wait(WAIT_S)
    assert_all_ends(on, tickets)
    with pytest.raises(WireError, match="closed"):
        on.send()


def test_closing_ends_lines_that_wait_for_room_for_a_block_and_for_the_wire(stage: Callable[[int], Stage]) -> None:
    on = stage(NUM_SOCKETS)
    on.open_all()
    on.lines[2].room.release()
    until(lambda: len(on.lines[2].taken) == 1, "a block that is on its way")
    on.lines[1].room.release()  # waits for a block; line 0 for room
    on.sender.close()
    assert [thread.is_alive() for thread in on.sender._threads] == [False] * NUM_SOCKETS
    assert on.lines[2].taken[0].ticket.is_done


def test_blocks_that_come_while_a_line_breaks_are_done(stage: Callable[[int], Stage]) -> None:
    """Whichever thread sees them first."""
    for _ in range(20):
        on = stage(NUM_SOCKETS)
        first = len(on.lines) - 1
        on.lines[first].error = OSError("broken")
        on.lines[first].room.release()
        on.lines[first].takes.release()
        tickets: list[SendTicket] = []
        while on.sender.is_alive:
            try:
                tickets += on.send()
            except WireError:
                break
        assert_all_done_soon(tickets)


def test_a_further_line_that_cannot_be_had_is_done_without(
    stage: Callable[[int], Stage], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = stage(NUM_SOCKETS)

    def no_descriptor(address: str, **_: Any) -> PlayedLine:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr("kvrelay.wire.lines.block_sender.TcpLine", no_descriptor)
    tickets = one.send(5)
    one.next_round(0)
    for _ in tickets:
        one.ship_one(0)
    assert all(ticket.is_done for ticket in tickets)
    assert one.sender.is_alive
    until(lambda: "go over 1 connections, no more can be opened" in caplog.text, "the log's word")
    assert caplog.text.count("no more can be opened") == 1


def test_a_block_that_waits_for_memory_can_be_called_off() -> None:
    """And nothing of it is read: nobody knows when there will be any."""

    payload, wakeup = NeverThere(), Wakeup()
    job = SendJob(SendTicket(), BlockHeader(1, 1, 0, 8, b"h" * 16), payload, None)
    assert job.ticket.take()
    got: list[memoryview | None] = []
    thread = threading.Thread(target=lambda: got.append(job.bytes(wakeup, lambda: None)))
    thread.start()
    assert payload.is_awaited.wait(WAIT_S)
    job.ticket.call_off()
    thread.join(WAIT_S)
    assert got == [None]
    assert job.ticket.is_done
    assert not wakeup.is_set
    wakeup.close()
