"""The thread that receives through shared memory: it serves connections in turn, and ends cleanly."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from kvrelay.wire.lines.shared.place import SharedPlace
from kvrelay.wire.lines.shared.receiver import SharedReceiver

from ..lease_bench import BLOCK_NBYTES, BLOCK_SIZE, WAIT_S, until
from ..rig import Rig
from ..shared_peer import SharedPeer, nothing_left


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig(num_blocks=128)


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
        """Send block ``index`` through slot ``index`` modulo the number of slots."""
        peer = self.peers[number]
        peer.send(index % peer.ring.shape.num_slots, *self._lease.frames(index))


def next_inside(rig: Rig) -> int:
    return rig.table.inside.get(timeout=WAIT_S)


def test_a_sender_that_has_just_begun_has_its_turn_within_two_turns_of_anothers(rig: Rig) -> None:
    """One sender has thirty blocks waiting. The block of another sender comes after fifteen more of them (turns of eight)."""
    receiver = SharedReceiver(SharedPlace(), rig.table, BLOCK_NBYTES, rig.metrics)
    receiver.start()
    with Crowd(rig, receiver, 2) as crowd:
        rig.table.may_finish.clear()
        for index in range(30):
            crowd.send(0, index)
        assert next_inside(rig) == 0
        crowd.send(1, 30)
        rig.table.may_finish.set()
        assert [next_inside(rig) for _ in range(30)] == [*range(1, 16), 30, *range(16, 30)]
        assert [rig.next_block() for _ in range(31)] == ["ok"] * 31
    receiver.stop()
    rig.table.abort_peer("p")


def test_stopping_waits_for_blocks_that_are_being_written_and_leaves_nothing(rig: Rig) -> None:
    with nothing_left():
        receiver = SharedReceiver(SharedPlace(), rig.table, BLOCK_NBYTES, rig.metrics)
        receiver.start()
        rig.table.may_finish.clear()
        with Crowd(rig, receiver, 4) as crowd:
            for number in range(4):
                crowd.send(number, number)
            next_inside(rig)
            stopping = threading.Thread(target=receiver.stop)
            stopping.start()
            until(lambda: receiver._wakeup.is_set, "a stop that does not begin")
            rig.table.may_finish.set()
            stopping.join(WAIT_S)
            assert not stopping.is_alive()
            assert not receiver.is_alive
            rig.assert_books()  # no write is open
    rig.table.abort_peer("p")
    rig.assert_all_free()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("dies", ["taking blocks", "at the door"])
def test_senders_hear_of_a_thread_that_dies(rig: Rig, dies: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with nothing_left():
        receiver = SharedReceiver(SharedPlace(), rig.table, BLOCK_NBYTES, rig.metrics)
        receiver.start()

        def fail(*_: object) -> None:
            raise RuntimeError("nobody expects that")

        with Crowd(rig, receiver, 2) as crowd:
            if dies == "taking blocks":
                monkeypatch.setattr(rig.table, "begin_piece", fail)
                crowd.send(0, 0)
            else:
                monkeypatch.setattr(receiver, "_accept", fail)
                SharedPeer(receiver.name).socket.close()
            for peer in crowd.peers:
                assert peer.ended_with() == b""
            until(lambda: not receiver.is_alive, "a thread that lives on")
            receiver.stop()
    rig.table.abort_peer("p")
