"""The threads that take blocks out of rings: several connections at a time, each by one thread, in turn; and how they all end."""

from __future__ import annotations

import errno
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from kvrelay.wire.block_frames import _copy_beside_others
from kvrelay.wire.shared_packets import Greeting
from kvrelay.wire.shared_place import SharedPlace
from kvrelay.wire.shared_receiver import SharedReceiver
from kvrelay.wire.shared_ring import RingShape, make_ring

from .handoffs import offer_for
from .rig import BLOCK_NBYTES, BLOCK_SIZE, WAIT_S, Rig, content_of, until
from .shared_peer import SharedPeer, num_mapped_rings, open_descriptors

NUM_THREADS = 3


@pytest.fixture
def rig(context: Any) -> Iterator[Rig]:
    rig = Rig(context, "tcp://127.0.0.1:0", num_blocks=128, num_sockets=NUM_THREADS)
    yield rig
    rig.close()


class Crowd:
    """Senders that have greeted a receiver, and a lease whose blocks they send. Use it in ``with``."""

    def __init__(self, rig: Rig, receiver: SharedReceiver, num_senders: int) -> None:
        self._rig = rig
        self.offer, self.grant = offer_for(rig, 64 * BLOCK_SIZE)
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
        payload = content_of(self.offer.block_hashes[index])
        frame = self._rig.header(self.grant, self.offer, index).pack(memoryview(payload))
        peer = self.peers[number]
        peer.send(index % peer.ring.shape.num_slots, frame, payload)


def next_inside(rig: Rig) -> int:
    return rig.leases.inside.get(timeout=WAIT_S)


def test_connections_are_served_side_by_side_and_each_by_one_thread(rig: Rig) -> None:
    rig.leases.may_finish.clear()
    with Crowd(rig, rig.shared, NUM_THREADS) as crowd:
        for number in range(NUM_THREADS):
            crowd.send(number, number)
            if number == 0:
                crowd.send(0, NUM_THREADS)  # behind the one that is being taken, while two threads have nothing to do
            assert next_inside(rig) == number
        assert rig.leases.inside.empty()
        rig.leases.may_finish.set()
        assert next_inside(rig) == NUM_THREADS
        assert [rig.next_block() for _ in range(NUM_THREADS + 1)] == ["ok"] * (NUM_THREADS + 1)
    rig.leases.abort_peer("p")


@contextmanager
def first_of_thirty(rig: Rig) -> Iterator[tuple[Crowd, SharedReceiver]]:
    """A receiver with one thread, and two senders: the first one's first block is being taken, 29 more lie there."""
    receiver = SharedReceiver(SharedPlace(), rig.leases, BLOCK_NBYTES, rig.decode_metrics)
    receiver.start()
    with Crowd(rig, receiver, 2) as crowd:
        rig.leases.may_finish.clear()
        for index in range(30):
            crowd.send(0, index)
        assert next_inside(rig) == 0
        yield crowd, receiver
    receiver.stop()
    rig.leases.abort_peer("p")


def assert_next_but_for_eight(rig: Rig, crowd: Crowd) -> None:
    """The second sender's block is taken behind eight of the first one's."""
    crowd.send(1, 30)
    rig.leases.may_finish.set()
    assert [next_inside(rig) for _ in range(30)] == [*range(1, 8), 30, *range(8, 30)]
    assert [rig.next_block() for _ in range(31)] == ["ok"] * 31


def test_a_sender_that_has_just_begun_has_its_turn_within_eight_blocks_of_anothers(rig: Rig) -> None:
    """With one thread, and thirty blocks that lie there already. Who is told yes has a place in the line."""
    with first_of_thirty(rig) as (crowd, _):
        assert_next_but_for_eight(rig, crowd)


def test_stopping_waits_for_blocks_that_are_being_written_and_leaves_nothing(rig: Rig) -> None:
    before, rings = open_descriptors(), num_mapped_rings()
    receiver = SharedReceiver(SharedPlace(), rig.leases, BLOCK_NBYTES, rig.decode_metrics, num_threads=NUM_THREADS)
    receiver.start()
    rig.leases.may_finish.clear()
    with Crowd(rig, receiver, NUM_THREADS + 1) as crowd:
        for number in range(NUM_THREADS + 1):
            crowd.send(number, number)
        for _ in range(NUM_THREADS):
            next_inside(rig)
        stopping = threading.Thread(target=receiver.stop)
        stopping.start()
        until(lambda: receiver._wakeup.is_set, "a stop that does not begin")
        rig.leases.may_finish.set()
        stopping.join(WAIT_S)
        assert not stopping.is_alive()
        assert not receiver.is_alive
        rig.assert_books()  # no write is open
    assert open_descriptors() == before
    assert num_mapped_rings() == rings
    rig.leases.abort_peer("p")
    rig.assert_all_free()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("dies", ["a taker", "the door"])
def test_one_thread_that_dies_takes_all_with_it_and_senders_hear_of_it(
    rig: Rig, dies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, rings = open_descriptors(), num_mapped_rings()
    receiver = SharedReceiver(SharedPlace(), rig.leases, BLOCK_NBYTES, rig.decode_metrics, num_threads=NUM_THREADS)
    receiver.start()

    def fail(*_: object) -> None:
        raise RuntimeError("nobody expects that")

    with Crowd(rig, receiver, 2) as crowd:
        if dies == "a taker":
            monkeypatch.setattr(rig.leases, "begin_block", fail)
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
    rig.leases.abort_peer("p")


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


def test_who_cannot_be_told_yes_is_dropped(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands in line already, and would be a sender that does not know that it is one."""
    receiver = SharedReceiver(SharedPlace(), rig.leases, BLOCK_NBYTES, rig.decode_metrics)
    monkeypatch.setattr("kvrelay.wire.shared_receiver._sent", lambda connection, packet: False)
    receiver.start()
    ring, descriptor = make_ring(RingShape.of(BLOCK_NBYTES))
    with SharedPeer(receiver.name) as peer:
        socket.send_fds(peer.socket, [Greeting(ring.shape, b"").pack()], [descriptor])
        assert peer.ended_with() == b""
        until(lambda: receiver.num_connections == 0, "a sender that was never told")
    os.close(descriptor)
    ring.close()
    assert receiver.is_alive
    receiver.stop()


class FullEpoll:
    """The kernel's, without room for one more."""

    def __init__(self, epoll: select.epoll) -> None:
        self._epoll = epoll

    def __getattr__(self, name: str) -> Any:
        return getattr(self._epoll, name)

    def register(self, descriptor: int, events: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_sender_that_finds_no_place_in_the_line_again_is_dropped_and_no_other(rig: Rig) -> None:
    receiver = SharedReceiver(SharedPlace(), rig.leases, BLOCK_NBYTES, rig.decode_metrics)
    receiver.start()
    with Crowd(rig, receiver, 2) as crowd:
        door: Any = receiver
        whole, door._epoll = door._epoll, FullEpoll(door._epoll)
        crowd.send(0, 0)
        assert crowd.peers[0].slots_back() == [0]
        assert crowd.peers[0].ended_with() == b""
        door._epoll = whole
        crowd.send(1, 1)
        assert crowd.peers[1].slots_back() == [1]
        assert receiver.is_alive
    receiver.stop()
    rig.leases.abort_peer("p")
