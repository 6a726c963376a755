"""The receiver of shared memory: which senders it accepts, how it handles wrong and silent ones, and that it frees everything."""

from __future__ import annotations

import gc
import os
import resource
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvrelay.wire.errors import WireError
from kvrelay.wire.lines.shared.packets import Greeting, pack_block
from kvrelay.wire.lines.shared.place import SharedPlace
from kvrelay.wire.lines.shared.receiver import SharedReceiver
from kvrelay.wire.lines.shared.ring import RingShape, make_ring

from ..lease_bench import BAD_PAYLOAD, BLOCK_NBYTES, WAIT_S, until
from ..rig import STRANGER_S, Rig
from ..shared_peer import SharedPeer, nothing_left, num_mapped_rings, open_descriptors

SHAPE = RingShape.of(BLOCK_NBYTES)
TOKEN = "the token"


@pytest.fixture
def receiver(one_rig: Rig) -> Iterator[SharedReceiver]:
    """A receiver that asks for a token, unlike the rig's. Afterwards no descriptor and no mapped ring may be left."""
    with nothing_left():
        receiver = SharedReceiver(
            SharedPlace(), one_rig.table, BLOCK_NBYTES, one_rig.metrics, token=TOKEN, stranger_s=STRANGER_S
        )
        receiver.start()
        yield receiver
        assert receiver.is_alive
        receiver.stop()
        assert not receiver.is_alive


def refused(one_rig: Rig, cause: str) -> float:
    return one_rig.registry.get_sample_value("kvrelay_refused_shared_memory_total", {"cause": cause}) or 0.0


# -- greetings -------------------------------------------------------------------------------------------------------------


def test_a_block_goes_through_a_slot_and_the_slot_comes_back(one_rig: Rig, receiver: SharedReceiver) -> None:
    frame, payload = one_rig.leased().frames(0)
    with SharedPeer(receiver.name) as peer:
        assert peer.greet(BLOCK_NBYTES, TOKEN.encode()) is None
        peer.send(5, frame, payload)
        assert peer.slots_back() == [5]
    assert one_rig.next_block() == "ok"
    until(lambda: receiver.num_connections == 0, "who has left is still there")


@pytest.mark.parametrize("token", [b"", b"another", TOKEN.encode() + b"x"])
def test_a_sender_without_the_token_is_refused_and_counted(
    one_rig: Rig, receiver: SharedReceiver, token: bytes
) -> None:
    with SharedPeer(receiver.name) as peer:
        assert "not the token" in str(peer.greet(BLOCK_NBYTES, token))
        assert peer.ended_with() == b""
    assert refused(one_rig, "wrong_token") == 1
    assert one_rig.registry.get_sample_value("kvrelay_refused_tokens_total") == 1


@pytest.mark.parametrize(
    "shape",
    [
        RingShape(SHAPE.slot_nbytes, 0),
        RingShape(SHAPE.slot_nbytes, 33),
        RingShape(SHAPE.slot_nbytes, 2**32 - 1),
        RingShape(SHAPE.slot_nbytes + 4096, 8),
        RingShape(0, 8),
        RingShape(2**64 - 1, 8),
    ],
)
def test_a_ring_of_another_shape_is_refused(one_rig: Rig, receiver: SharedReceiver, shape: RingShape) -> None:
    ring, descriptor = make_ring(SHAPE)
    with SharedPeer(receiver.name) as peer:
        refusal = peer.introduce(Greeting(shape, TOKEN.encode()).pack(), descriptor)
        assert "1 to 32 of 4096 are taken" in str(refusal)
    os.close(descriptor)
    ring.close()
    assert refused(one_rig, "wrong_shape") == 1


@pytest.mark.parametrize("num_descriptors", [0, 1, 2, 5])
def test_a_greeting_brings_one_descriptor_of_sealed_memory(
    one_rig: Rig, receiver: SharedReceiver, num_descriptors: int
) -> None:
    with SharedPeer(receiver.name) as peer:
        refusal = peer.introduce(Greeting(SHAPE, TOKEN.encode()).pack(), *[0] * num_descriptors)
        assert ("no memory" if num_descriptors == 1 else "brings one descriptor") in str(refusal)
        assert peer.ended_with() == b""
    assert refused(one_rig, "bad_memory") == 1


@pytest.mark.parametrize("packet", [b"junk", b"x" * 5000, Greeting(SHAPE, b"t" * 600).pack(), b"\x91" * 400])
def test_what_is_no_greeting_is_refused(one_rig: Rig, receiver: SharedReceiver, packet: bytes) -> None:
    with SharedPeer(receiver.name) as peer:
        assert "refuses it" in str(peer.introduce(packet))
    assert refused(one_rig, "bad_greeting") == 1


def test_who_leaves_without_a_greeting_is_not_refused(one_rig: Rig, receiver: SharedReceiver) -> None:
    """Every decode worker that starts looks so whether the others' sockets in the directory are alive."""
    for _ in range(3):
        with SharedPeer(receiver.name):
            until(lambda: receiver.num_connections == 1, "who has come is not there")
        until(lambda: receiver.num_connections == 0, "who has left is still there")
    assert refused(one_rig, "bad_greeting") == 0


# -- liars -----------------------------------------------------------------------------------------------------------------


_CONNECT = """
import os, socket, sys
os.setgid(65534)
os.setuid(65534)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
    peer.connect("\\0" + sys.argv[1][1:])
    peer.settimeout(20)
    print(peer.recv(100))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_another_user_of_the_machine_is_not_heard(one_rig: Rig, receiver: SharedReceiver) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-c", _CONNECT, receiver.name], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.stdout.strip() == "b''", done.stderr
    assert refused(one_rig, "other_user") == 1
    assert receiver.num_connections == 0


@pytest.mark.parametrize(
    "packet_of",
    [
        lambda frame: b"x",
        lambda frame: pack_block(0, b""),
        lambda frame: pack_block(0, frame[:-1]),
        lambda frame: pack_block(0, frame + b"x"),
        lambda frame: pack_block(0, b"x" * 5000),
        lambda frame: pack_block(0, b"?" + frame[1:]),
        lambda frame: pack_block(SHAPE.num_slots, frame),
        lambda frame: pack_block(2**32 - 1, frame),
    ],
)
def test_a_packet_that_is_no_block_costs_its_sender_the_connection_only(
    one_rig: Rig, packet_of: Callable[[bytes], bytes]
) -> None:
    lease = one_rig.leased()
    with SharedPeer(one_rig.shared.name) as liar, SharedPeer(one_rig.shared.name) as honest:
        assert liar.greet(BLOCK_NBYTES) is None
        assert honest.greet(BLOCK_NBYTES) is None
        liar.socket.send(packet_of(lease.frames(0)[0]))
        assert liar.ended_with() == b""
        assert one_rig.refused("bad_header") == 1
        honest.send(1, *lease.frames(0))
        assert honest.slots_back() == [1]
    assert [one_rig.next_block(), one_rig.next_block()] == ["bad_header", "ok"]
    one_rig.table.abort_peer("p")


def test_slots_come_back_when_blocks_are_refused(one_rig: Rig) -> None:
    """A sender sends more bad blocks than there are slots. It gets each slot back, so its other hand-offs can go on."""
    frame, _ = one_rig.leased().frames(0)
    num_blocks = 3 * SHAPE.num_slots
    with SharedPeer(one_rig.shared.name) as peer:
        assert peer.greet(BLOCK_NBYTES) is None
        for number in range(num_blocks):
            peer.send(number % SHAPE.num_slots, frame, BAD_PAYLOAD)
            assert peer.slots_back() == [number % SHAPE.num_slots]
    assert [one_rig.next_block() for _ in range(num_blocks)] == ["bad_checksum"] + ["unknown_lease"] * (num_blocks - 1)
    assert one_rig.rejection().key == ("r", 1)


def test_a_slot_that_changes_before_its_copy_is_refused(one_rig: Rig) -> None:
    """The sender changes a slot after the receiver has accepted the header. The checksum over the pool's copy fails."""
    frame, payload = one_rig.leased().frames(0)
    one_rig.table.may_finish.clear()
    with SharedPeer(one_rig.shared.name) as peer:
        assert peer.greet(BLOCK_NBYTES) is None
        peer.send(0, frame, payload)
        one_rig.table.inside.get(timeout=WAIT_S)
        peer.ring.slots[0][100] ^= 1
        one_rig.table.may_finish.set()
        assert one_rig.next_block() == "bad_checksum"
        assert peer.slots_back() == [0]
    assert one_rig.rejection().key == ("r", 1)


def send_for_ever(peer: SharedPeer, frame: bytes, payload: bytes) -> None:
    while True:
        peer.send(0, frame, payload)


def test_a_sender_that_takes_no_slots_back_is_dropped(one_rig: Rig) -> None:
    """A sender sends without end and never reads which slots it gets back. The receiver closes its connection."""
    frame, payload = one_rig.leased().frames(0)
    with SharedPeer(one_rig.shared.name) as peer:
        assert peer.greet(BLOCK_NBYTES) is None
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            send_for_ever(peer, frame, payload)
    until(lambda: one_rig.shared.num_connections == 0, "it is still there")
    assert one_rig.shared.is_alive


def test_what_a_sender_sent_that_is_gone_is_taken_and_its_memory_is_let_go(one_rig: Rig) -> None:
    gc.collect()  # else garbage of earlier tests could be collected between the counts
    rings = num_mapped_rings()
    one_rig.table.may_finish.clear()
    with SharedPeer(one_rig.shared.name) as peer:
        assert peer.greet(BLOCK_NBYTES) is None
        peer.send(0, *one_rig.leased().frames(0))
        one_rig.table.inside.get(timeout=WAIT_S)  # the receiver is inside the write
        peer.ring.close()
        assert num_mapped_rings() == rings + 1
    one_rig.table.may_finish.set()
    assert one_rig.next_block() == "ok"
    until(lambda: one_rig.shared.num_connections == 0, "who has left is still there")
    until(
        lambda: num_mapped_rings() == rings, "the memory of who has left is still there"
    )  # it is unmapped behind that


# -- strangers -------------------------------------------------------------------------------------------------------------


def test_who_says_nothing_is_dropped(one_rig: Rig) -> None:
    receiver = SharedReceiver(SharedPlace(), one_rig.table, BLOCK_NBYTES, one_rig.metrics, stranger_s=0.05)
    receiver.start()
    with SharedPeer(receiver.name) as silent:
        assert silent.ended_with() == b""
    until(lambda: receiver.num_connections == 0, "it is still there")
    receiver.stop()


def test_a_crowd_that_says_nothing_shuts_nobody_out(one_rig: Rig) -> None:
    with ExitStack() as crowd:
        strangers = [crowd.enter_context(SharedPeer(one_rig.shared.name)) for _ in range(100)]
        until(lambda: one_rig.shared.num_connections == 64, "more strangers than there may be at a time, or fewer")
        assert strangers[0].ended_with() == b""  # the oldest connection was closed
        frame, payload = one_rig.leased().frames(0)
        with SharedPeer(one_rig.shared.name) as honest:
            assert honest.greet(BLOCK_NBYTES) is None
            honest.send(0, frame, payload)
            assert honest.slots_back() == [0]
    assert one_rig.next_block() == "ok"


def test_no_more_senders_than_there_may_be(one_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.wire.lines.shared.receiver._MAX_SENDERS", 2)
    with ExitStack() as stack:
        first, second, third = (stack.enter_context(SharedPeer(one_rig.shared.name)) for _ in range(3))
        assert first.greet(BLOCK_NBYTES) is None
        assert second.greet(BLOCK_NBYTES) is None
        assert "no more are taken" in str(third.greet(BLOCK_NBYTES))
        first.socket.close()
        until(lambda: one_rig.shared.num_connections == 1, "who has left is still there")
        with SharedPeer(one_rig.shared.name) as fourth:
            assert fourth.greet(BLOCK_NBYTES) is None
    assert refused(one_rig, "too_many") == 1


def test_without_a_descriptor_left_it_waits_and_then_accepts(one_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.wire.lines.shared.receiver._PAUSE_S", 0.05)
    with ExitStack() as stack:
        known = stack.enter_context(SharedPeer(one_rig.shared.name))
        assert known.greet(BLOCK_NBYTES) is None
        late = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(int(one.split()[0]) for one in open_descriptors())
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
            fillers = []
            try:
                while True:
                    fillers.append(os.dup(0))
            except OSError:
                pass
            late.connect(SharedPlace().address(one_rig.shared.name))
            frame, payload = one_rig.leased().frames(0)
            until(lambda: one_rig.shared._accepts_from_s is not None, "it accepts without a descriptor")
            known.send(0, frame, payload)  # a sender that is connected is served meanwhile
            assert one_rig.next_block() == "ok"
        finally:
            for filler in fillers:
                os.close(filler)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        until(lambda: one_rig.shared.num_connections == 2, "who came without a descriptor left is never accepted")


# -- start and end ---------------------------------------------------------------------------------------------------------


def test_a_receiver_that_never_started_leaves_nothing(one_rig: Rig) -> None:
    with nothing_left():
        receiver = SharedReceiver(SharedPlace(), one_rig.table, BLOCK_NBYTES, one_rig.metrics)
        assert not receiver.is_alive
        receiver.stop()


def test_stopping_lets_go_of_senders_and_their_memory(one_rig: Rig) -> None:
    with nothing_left():
        receiver = SharedReceiver(SharedPlace(), one_rig.table, BLOCK_NBYTES, one_rig.metrics)
        receiver.start()
        with SharedPeer(receiver.name) as sender, SharedPeer(receiver.name):
            assert sender.greet(BLOCK_NBYTES) is None
            receiver.stop()
            assert sender.ended_with() == b""
            sender.ring.close()


def test_a_socket_in_a_directory_is_this_users_and_goes_with_the_receiver(one_rig: Rig, socket_directory: Path) -> None:
    place = SharedPlace(socket_directory)
    receiver = SharedReceiver(place, one_rig.table, BLOCK_NBYTES, one_rig.metrics)
    receiver.start()
    (file,) = socket_directory.iterdir()
    assert file.name == receiver.name
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with SharedPeer(receiver.name, place) as peer:
        assert peer.greet(BLOCK_NBYTES) is None
    receiver.stop()
    assert list(socket_directory.iterdir()) == []


def test_a_directory_that_cannot_be_used_is_an_error(one_rig: Rig, tmp_path: Path) -> None:
    with nothing_left(), pytest.raises(WireError, match="choose another --shared-memory, or off"):
        SharedReceiver(SharedPlace(tmp_path / "gone"), one_rig.table, BLOCK_NBYTES, one_rig.metrics)
