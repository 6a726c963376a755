"""Staging over a device that copies as late as it may: no reader gets a byte too early, and no slot has two users at a
time."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from kvrelay.engine.kv.device.copies import StagingPlan
from kvrelay.engine.kv.device.staged_read import StagedRead
from kvrelay.engine.kv.device.staging import Staging

from ..late_device import LateDevice

NBYTES = 64
WAIT_S = 30.0


@dataclass(eq=False)
class Ticket:
    is_done: bool = False


class Bench:
    """A pool of bytes, its staging, and the device between them."""

    def __init__(
        self,
        num_blocks: int = 16,
        num_slots: int = 4,
        device: LateDevice | None = None,
        group_nbytes: Sequence[int] = (NBYTES,),
    ) -> None:
        self.device = device or LateDevice()
        self.blocks = torch.zeros(num_blocks, NBYTES, dtype=torch.uint8)
        self.staging = Staging(self.blocks, StagingPlan(self.device, num_slots * NBYTES), group_nbytes)
        for block_id in range(num_blocks):
            self.compute(block_id, block_id + 1)

    def compute(self, block_id: int, value: int) -> None:
        """A step writes the block at once."""
        assert not self.device.uses(self.blocks[block_id]), f"a step writes block {block_id} in the midst of its copy"
        self.blocks[block_id] = value

    def open_read(self, block_id: int) -> StagedRead:
        read = self.staging.open_read(block_id, NBYTES)
        read.begin()
        return read

    def wait(self, read: StagedRead, ticket: Ticket | None = None) -> memoryview:
        view = read.wait(ticket or Ticket(), WAIT_S)
        assert view is not None
        return view

    def write(self, block_id: int, value: int) -> None:
        self.staging.open_write(block_id)[:] = bytes([value]) * NBYTES
        self.staging.close_write(block_id)

    def step(self) -> torch.Tensor:
        """The first byte of each block as a step launched now would read it."""
        self.staging.order_steps()
        return self.blocks[:, 0].clone()


def filled(view: memoryview) -> int:
    """The single value of all bytes of a view."""
    assert view.nbytes == NBYTES
    (value,) = {*view}
    return value


def until(is_so: Callable[[], bool]) -> None:
    """Poll for another thread's progress."""
    event = threading.Event()
    for _ in range(int(WAIT_S / 0.001)):
        if is_so():
            return
        event.wait(0.001)
    raise AssertionError("it never came to be so")


# -- reads -------------------------------------------------------------------------------------------------------------------


def test_opening_waits_for_nothing_and_reading_waits_for_the_copy() -> None:
    bench = Bench()
    reads = [bench.open_read(block_id) for block_id in range(10)]
    assert [read.nbytes for read in reads] == [NBYTES] * 10
    assert bench.device.num_launched == 0, "the network thread launched a copy"
    assert filled(bench.wait(reads[0], Ticket(is_done=True))) == 1
    assert bench.device.num_launched == 3, "half of the slots are for those whose senders wait"
    for block_id, read in enumerate(reads):
        ticket = Ticket()
        assert filled(bench.wait(read, ticket)) == block_id + 1
        ticket.is_done = True
        bench.staging.close_read(block_id)
    assert bench.device.num_launched == 10, "every block is copied once"
    assert bench.device.num_pinned == 1, "all memory is taken at the start"


def test_later_blocks_are_copied_while_one_is_read() -> None:
    bench = Bench()
    first, second = bench.open_read(1), bench.open_read(2)
    view = bench.wait(first)
    assert bench.device.num_launched == 2, "the second copy is under way"
    bench.wait(second)
    assert filled(view) == 2


def test_slots_of_readers_that_are_done_are_used_ahead_of_the_next_wait() -> None:
    bench = Bench()
    reads = [bench.open_read(block_id) for block_id in range(10)]
    tickets = [Ticket() for _ in reads]
    for read, ticket in zip(reads[:3], tickets, strict=False):
        bench.wait(read, ticket)
        ticket.is_done = True  # set by the sender's thread; the network thread has closed no read yet
    bench.wait(reads[3], tickets[3])
    assert bench.device.num_launched == 6, "two are copied while the fourth is read"


def test_what_is_lent_stays_until_its_reader_is_done() -> None:
    bench = Bench(num_slots=4)
    tickets = [Ticket() for _ in range(4)]
    views = [bench.wait(bench.open_read(block_id), tickets[block_id]) for block_id in range(4)]
    fifth = bench.open_read(4)
    assert fifth.wait(Ticket(), 0.0) is None, "all slots are lent"
    assert [filled(view) for view in views] == [1, 2, 3, 4]
    tickets[2].is_done = True  # the read is not closed yet
    assert filled(bench.wait(fifth)) == 5
    assert [filled(views[index]) for index in (0, 1, 3)] == [1, 2, 4]


def test_who_waits_for_a_slot_gets_the_next_one() -> None:
    bench = Bench(num_slots=4)
    tickets = [Ticket() for _ in range(4)]
    for block_id, ticket in enumerate(tickets):
        bench.wait(bench.open_read(block_id), ticket)
    queued = [bench.open_read(block_id) for block_id in range(4, 10)]
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(filled(bench.wait(queued[-1]))))
    thread.start()
    until(lambda: bench.staging._num_waiting == 1)
    bench.staging.close_read(3)
    thread.join(WAIT_S)
    assert found == [10]
    assert bench.open_read(3).wait(Ticket(), 0.0) is None, "nobody else's slot was taken for it"


def test_blocks_that_queue_for_a_sender_that_takes_none_hold_up_no_other_sender() -> None:
    bench = Bench(num_blocks=64, num_slots=4)
    for block_id in range(50):
        bench.open_read(block_id)
    for block_id in range(50, 60):
        ticket = Ticket()
        assert filled(bench.wait(bench.open_read(block_id), ticket)) == block_id + 1
        ticket.is_done = True
        bench.staging.close_read(block_id)


def test_two_readers_share_a_copy_and_the_block_stays_open_for_the_second() -> None:
    bench = Bench()
    first, second = Ticket(), Ticket()
    read = bench.open_read(7)
    assert bench.open_read(7) is read
    assert filled(bench.wait(read, first)) == 8
    first.is_done = True
    bench.staging.close_read(7)
    for block_id in range(4):  # their slots include the first reader's
        bench.wait(bench.open_read(block_id), Ticket(is_done=True))
    assert filled(bench.wait(read, second)) == 8
    bench.staging.close_read(7)
    with pytest.raises(ValueError, match="block 7 is read, but is not open"):
        read.wait(Ticket(), 0.0)


def test_a_read_that_is_closed_early_frees_its_slot_and_later_copies_go_on() -> None:
    bench = Bench(num_slots=4)
    for block_id in range(10):
        bench.open_read(block_id)
    for block_id in range(9):
        bench.staging.close_read(block_id)
    assert filled(bench.wait(bench.open_read(9))) == 10
    tickets = [Ticket() for _ in range(3)]
    views = [bench.wait(bench.open_read(block_id), tickets[block_id]) for block_id in range(3)]
    assert [filled(view) for view in views] == [1, 2, 3]


def test_no_step_writes_a_block_while_a_copy_that_nobody_wanted_reads_it() -> None:
    bench = Bench()
    bench.open_read(1)
    bench.wait(bench.open_read(2))
    bench.staging.close_read(1)
    assert bench.device.uses(bench.blocks[1]), "or this shows nothing"
    bench.step()
    bench.compute(1, 77)


# -- writes ------------------------------------------------------------------------------------------------------------------


def test_a_step_behind_a_write_sees_it_and_the_host_waits_for_nothing() -> None:
    bench = Bench()
    bench.write(3, 99)
    assert bench.blocks[3, 0] == 4, "the copy is still under way, or this shows nothing"
    assert bench.step()[3] == 99
    assert bench.staging.order_steps() is None, "once is enough"


def test_a_slot_is_not_filled_again_before_its_copy_is_over() -> None:
    bench = Bench(num_slots=4)
    for block_id in range(12):
        bench.write(block_id, 100 + block_id)
    assert bench.step().tolist() == [*range(100, 112), 13, 14, 15, 16]


def test_a_block_has_one_writer() -> None:
    bench = Bench()
    bench.staging.open_write(1)
    with pytest.raises(ValueError, match="block 1 is open for writing already"):
        bench.staging.open_write(1)
    bench.staging.close_write(1)
    assert len(bench.staging._free) == 4


def test_a_writer_without_a_slot_waits_until_another_one_is_through() -> None:
    bench = Bench(num_slots=4)
    for block_id in range(4):
        bench.staging.open_write(block_id)[:] = bytes([50 + block_id]) * NBYTES
    thread = threading.Thread(target=bench.write, args=(4, 54))
    thread.start()
    until(lambda: bench.staging._num_waiting == 1)
    bench.staging.close_write(2)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    for block_id in (0, 1, 3):
        bench.staging.close_write(block_id)
    assert bench.step()[:6].tolist() == [50, 51, 52, 53, 54, 6]


# -- what fails --------------------------------------------------------------------------------------------------------------


def test_what_a_failed_copy_left_is_read_by_nobody() -> None:
    bench = Bench(device=LateDevice(fails_at=1))
    read = bench.open_read(1)
    bench.open_read(1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            read.wait(Ticket(), WAIT_S)
    bench.staging.close_read(1)
    bench.staging.close_read(1)
    assert len(bench.staging._free) == 4


def test_a_device_that_takes_no_copies_any_more_is_noticed_by_who_reads_not_by_who_opens() -> None:
    bench = Bench(device=LateDevice(fails_at=1))
    with pytest.raises(RuntimeError, match="broken"):
        bench.open_read(1).wait(Ticket(), WAIT_S)
    read = bench.open_read(2)
    with pytest.raises(RuntimeError, match="broken"):
        read.wait(Ticket(), WAIT_S)
    for block_id in (1, 2):
        bench.staging.close_read(block_id)
    assert len(bench.staging._free) == 4


def test_a_write_whose_copy_fails_fails_the_step_behind_it() -> None:
    bench = Bench(device=LateDevice(fails_at=2))
    bench.write(1, 51)
    bench.write(2, 52)
    behind = bench.staging.order_steps()
    assert behind is not None
    with pytest.raises(RuntimeError, match="broken"):
        behind.synchronize()
    with pytest.raises(RuntimeError, match="broken"):
        bench.staging.order_steps()
    with pytest.raises(RuntimeError, match="broken"):
        bench.write(3, 53)
    assert len(bench.staging._free) == 4
    assert not bench.staging._writes


def test_a_copy_that_has_failed_already_stops_every_step() -> None:
    bench = Bench(device=LateDevice(fails_at=1))
    bench.write(1, 51)
    with pytest.raises(RuntimeError, match="broken"):
        bench.device.reach(1, waits=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            bench.staging.order_steps()


# -- everything at once ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_in_whatever_order_bytes_are_where_they_belong(seed: int) -> None:
    """Blocks are computed, shipped, given up and received in random order. Copies happen at random legal moments."""
    chance = random.Random(seed)
    bench = Bench(num_blocks=10, num_slots=chance.choice((4, 5, 8)), device=LateDevice(chance if seed % 2 else None))
    content = {block_id: block_id + 1 for block_id in range(10)}  # as steps see it
    opens: list[tuple[int, StagedRead, Ticket, memoryview | None]] = []
    writing: dict[int, memoryview] = {}
    for _ in range(400):
        reading = {block_id for block_id, *_ in opens}
        idle = [block_id for block_id in content if block_id not in reading and block_id not in writing]
        act = chance.choice(("open", "open", "wait", "wait", "done", "give up", "write", "fill", "step"))
        if act == "open" and len(writing) < 10:
            block_id = chance.choice([one for one in content if one not in writing])
            opens.append((block_id, bench.open_read(block_id), Ticket(), None))
        elif act == "wait" and (waiting := [one for one in opens if one[3] is None]):
            entry = chance.choice(waiting)
            view = entry[1].wait(entry[2], 0.0)
            if view is not None:
                opens[opens.index(entry)] = (*entry[:3], view)
        elif act == "done" and (lent := [one for one in opens if one[3] is not None]):
            entry = chance.choice(lent)
            assert filled(entry[3]) == content[entry[0]]  # type: ignore[arg-type]
            entry[2].is_done = True
            opens.remove(entry)
            bench.staging.close_read(entry[0])
        elif act == "give up" and (waiting := [one for one in opens if one[3] is None]):
            entry = chance.choice(waiting)
            opens.remove(entry)
            bench.staging.close_read(entry[0])
        elif act == "write" and idle and bench.staging._free:  # else open_write would wait for this thread
            block_id = chance.choice(idle)
            writing[block_id] = bench.staging.open_write(block_id)
        elif act == "fill" and writing:
            block_id, view = writing.popitem()
            content[block_id] = chance.randrange(256)
            view[:] = bytes([content[block_id]]) * NBYTES
            bench.staging.close_write(block_id)
        elif act == "step":
            seen = bench.step()
            assert {block_id: int(seen[block_id]) for block_id in content if block_id not in writing} == {
                block_id: value for block_id, value in content.items() if block_id not in writing
            }
            for block_id in idle[:2]:
                content[block_id] = chance.randrange(256)
                bench.compute(block_id, content[block_id])
    for block_id, *_ in opens:
        bench.staging.close_read(block_id)
    for block_id in writing:
        bench.staging.close_write(block_id)
    assert len(bench.staging._free) == bench.staging.num_slots
    assert (bench.staging._num_ahead, len(bench.staging._lent), len(bench.staging._queued)) == (0, 0, 0)


def test_many_senders_share_few_slots() -> None:
    bench = Bench(num_blocks=60, num_slots=4, device=LateDevice(random.Random(0)))
    reads = {block_id: bench.open_read(block_id) for block_id in range(60)}
    wrong: list[tuple[int, int]] = []

    def send(block_ids: range) -> None:
        for block_id in block_ids:
            ticket = Ticket()
            value = filled(bench.wait(reads[block_id], ticket))
            if value != block_id + 1:
                wrong.append((block_id, value))
            ticket.is_done = True  # the slot is free before the network thread closes the read

    threads = [threading.Thread(target=send, args=(range(first, 60, 6),)) for first in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert wrong == []
    for block_id in reads:
        bench.staging.close_read(block_id)
    assert len(bench.staging._free) == 4
