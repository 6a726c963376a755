"""The threads that receive through shared memory: several connections at a time, each by one, in turn; and how they all end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from kvrelay.wire.blocks.frames import _copy_beside_others
from kvrelay.wire.lines.shared.place import SharedPlace
from kvrelay.wire.lines.shared.receiver import SharedReceiver

from ..lease_bench import BLOCK_NBYTES, BLOCK_SIZE, WAIT_S, until
from ..rig import Rig
from ..shared_peer import SharedPeer, num_mapped_rings, open_descriptors

NUM_THREADS = 3


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig(num_blocks=128, num_sockets=NUM_THREADS)


class Crowd:
    """Senders that have greeted a receiver, and a lease whose blocks they send. Use it in ``with``."""

    def __init__(self, rig: Rig, receiver: SharedReceiver, num_senders: int) -> None:
        self._lease = rig.leased(64 * BLOCK_SIZE)
        self._stack = ExitStack()
        self.peers = [self._stack.enter_context(SharedPeer(receiver.name)) for _ in range(num_senders)]
        for peer in self.peers:
            assert peer.greet(BLOCK_NBYTES) is None

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        for peer in self.peers:
            peer.ring.close()

    def send(self, number: int, index: int) -> None:
        """A block, in a slot of its own for each index modulo the ring."""
        peer = self.peers[number]
        peer.send(index % peer.ring.shape.num_slots, *self._lease.frames(index))


def next_inside(rig: Rig) -> int:
    return rig.table.inside.get(timeout=WAIT_S)


def test_connections_are_served_side_by_side_and_each_by_one_thread(rig: Rig) -> None:
    rig.table.may_finish.clear()
    with Crowd(rig, rig.shared, NUM_THREADS) as crowd:
        for number in range(NUM_THREADS):
            crowd.send(number, number)
            if number == 0:
                crowd.send(0, NUM_THREADS)  # behind the one that is being taken, while two threads have nothing to do
            assert next_inside(rig) == number
        assert rig.table.inside.empty()
        rig.table.may_finish.set()
        assert next_inside(rig) == NUM_THREADS
        assert [rig.next_block() for _ in range(NUM_THREADS + 1)] == ["ok"] * (NUM_THREADS + 1)
    rig.table.abort_peer("p")


def test_a_sender_that_has_just_begun_has_its_turn_within_eight_blocks_of_anothers(rig: Rig) -> None:
    """With one thread, and thirty blocks that lie there already. Who is told yes has a place in the line."""
    receiver = SharedReceiver(SharedPlace(), rig.table, BLOCK_NBYTES, rig.metrics)
    receiver.start()
    with Crowd(rig, receiver, 2) as crowd:
        rig.table.may_finish.clear()
        for index in range(30):
            crowd.send(0, index)
        assert next_inside(rig) == 0
        crowd.send(1, 30)
        rig.table.may_finish.set()
        assert [next_inside(rig) for _ in range(30)] == [*range(1, 8), 30, *range(8, 30)]
        assert [rig.next_block() for _ in range(31)] == ["ok"] * 31
    receiver.stop()
    rig.table.abort_peer("p")


def test_stopping_waits_for_blocks_that_are_being_written_and_leaves_nothing(rig: Rig) -> None:
    before, rings = open_descriptors(), num_mapped_rings()
    receiver = SharedReceiver(SharedPlace(), rig.table, BLOCK_NBYTES, rig.metrics, num_threads=NUM_THREADS)
    receiver.start()
    rig.table.may_finish.clear()
    with Crowd(rig, receiver, NUM_THREADS + 1) as crowd:
        for number in range(NUM_THREADS + 1):
            crowd.send(number, number)
        for _ in range(NUM_THREADS):
            next_inside(rig)
        stopping = threading.Thread(target=receiver.stop)
        stopping.start()
        until(lambda: receiver._wakeup.is_set, "a stop that does not begin")
        rig.table.may_finish.set()
        stopping.join(WAIT_S)
        assert not stopping.is_alive()
        assert not receiver.is_alive
        rig.assert_books()  # no write is open
    assert open_descriptors() == before
    assert num_mapped_rings() == rings
    rig.table.abort_peer("p")
    rig.assert_all_free()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("dies", ["a taker", "the door"])
def test_one_thread_that_dies_takes_all_with_it_and_senders_hear_of_it(
    rig: Rig, dies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, rings = open_descriptors(), num_mapped_rings()
    receiver = SharedReceiver(SharedPlace(), rig.table, BLOCK_NBYTES, rig.metrics, num_threads=NUM_THREADS)
    receiver.start()

    def fail(*_: object) -> None:
        raise RuntimeError("nobody expects that")

    with Crowd(rig, receiver, 2) as crowd:
        if dies == "a taker":
            monkeypatch.setattr(rig.table, "begin_piece", fail)
            crowd.send(0, 0)
        else:
            monkeypatch.setattr(receiver, "_accept", fail)
            SharedPeer(receiver.name).socket.close()
        for peer in crowd.peers:
            assert peer.ended_with() == b""
        until(lambda: not any(thread.is_alive() for thread in receiver._threads), "threads that live on")
        assert not receiver.is_alive
        receiver.stop()
    assert open_descriptors() == before
    assert num_mapped_rings() == rings
    rig.table.abort_peer("p")


def test_a_copy_out_of_memory_that_is_read_only_lets_other_threads_run() -> None:
    """Threads are given Python's lock only by who lets go of it: the interval after which they may ask for it is endless here."""
    source = memoryview(bytes(range(256)) * 2**13)
    target = memoryview(bytearray(len(source)))
    start, has_run = threading.Event(), threading.Event()

    def run() -> None:
        start.wait()
        has_run.set()

    other = threading.Thread(target=run)
    other.start()
    interval_s, deadline_s = sys.getswitchinterval(), time.monotonic() + WAIT_S
    sys.setswitchinterval(1e6)
    try:
        start.set()
        while not (ran_meanwhile := has_run.is_set()) and time.monotonic() < deadline_s:
            _copy_beside_others(source, target)
    finally:
        sys.setswitchinterval(interval_s)
    other.join(WAIT_S)
    assert ran_meanwhile
    assert target == source
