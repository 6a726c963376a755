"""The receiver of shared memory: whom it lets in, what it does with liars and with the silent, and what it leaves behind."""

from __future__ import annotations

import os
import resource
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvrelay.wire.errors import WireError
from kvrelay.wire.shared_packets import Greeting, pack_block
from kvrelay.wire.shared_place import SharedPlace
from kvrelay.wire.shared_receiver import SharedReceiver
from kvrelay.wire.shared_ring import RingShape, make_ring

from .handoffs import BAD_PAYLOAD, offer_for
from .rig import BLOCK_NBYTES, WAIT_S, content_of, until
from .shared_peer import SharedPeer, num_mapped_rings, open_descriptors

SHAPE = RingShape.of(BLOCK_NBYTES)
TOKEN = "the token"


@pytest.fixture
def rig(tcp_rig: Any) -> Any:
    return tcp_rig


@pytest.fixture
def receiver(rig: Any) -> Iterator[SharedReceiver]:
    """One that asks for a token, and leaves nothing behind. (The rig's own asks for none.)"""
    before, rings = open_descriptors(), num_mapped_rings()
    receiver = SharedReceiver(SharedPlace(), rig.leases, BLOCK_NBYTES, rig.decode_metrics, token=TOKEN)
    receiver.start()
    yield receiver
    assert receiver.is_alive
    receiver.stop()
    assert not receiver.is_alive
    assert open_descriptors() == before
    assert num_mapped_rings() == rings


def refused(rig: Any, cause: str) -> float:
    return rig.registry.get_sample_value("kvrelay_refused_shared_memory_total", {"cause": cause}) or 0.0


def right_block(rig: Any, index: int = 0) -> tuple[bytes, bytes]:
    """Header and payload of a block of a lease made for it."""
    offer, grant = offer_for(rig)
    payload = content_of(offer.block_hashes[index])
    return rig.header(grant, offer, index).pack(memoryview(payload)), payload


# -- greetings -------------------------------------------------------------------------------------------------------------


def test_a_block_goes_through_a_slot_and_the_slot_comes_back(rig: Any, receiver: SharedReceiver) -> None:
    frame, payload = right_block(rig)
    with SharedPeer(receiver.name) as peer:
        assert peer.greet(BLOCK_NBYTES, TOKEN.encode()) is None
        peer.send(5, frame, payload)
        assert peer.slots_back() == [5]
    assert rig.next_block() == "ok"
    until(lambda: receiver.num_connections == 0, "who has left is still there")


@pytest.mark.parametrize("token", [b"", b"another", TOKEN.encode() + b"x"])
def test_a_sender_without_the_token_is_refused_and_counted(rig: Any, receiver: SharedReceiver, token: bytes) -> None:
    with SharedPeer(receiver.name) as peer:
        assert "not the token" in str(peer.greet(BLOCK_NBYTES, token))
        assert peer.ended_with() == b""
    assert refused(rig, "wrong_token") == 1
    assert rig.registry.get_sample_value("kvrelay_refused_tokens_total") == 1


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
def test_a_ring_of_another_shape_is_refused(rig: Any, receiver: SharedReceiver, shape: RingShape) -> None:
    ring, descriptor = make_ring(SHAPE)
    with SharedPeer(receiver.name) as peer:
        refusal = peer.introduce(Greeting(shape, TOKEN.encode()).pack(), descriptor)
        assert "1 to 32 of 4096 are taken" in str(refusal)
    os.close(descriptor)
    ring.close()
    assert refused(rig, "wrong_shape") == 1


def test_memory_that_is_not_sealed_or_not_of_its_size_is_refused(rig: Any, receiver: SharedReceiver) -> None:
    greeting = Greeting(SHAPE, TOKEN.encode()).pack()
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, SHAPE.nbytes)
    ring, short = make_ring(RingShape(SHAPE.slot_nbytes, SHAPE.num_slots - 1))
    for descriptor, says in ((loose, "must be sealed"), (short, "bytes of memory"), (0, "")):
        with SharedPeer(receiver.name) as peer:
            assert says in str(peer.introduce(greeting, descriptor))
            assert peer.ended_with() == b""
    os.close(loose)
    os.close(short)
    ring.close()
    assert refused(rig, "bad_memory") == 3


@pytest.mark.parametrize("num_descriptors", [0, 2, 5])
def test_a_greeting_brings_one_descriptor(rig: Any, receiver: SharedReceiver, num_descriptors: int) -> None:
    ring, descriptor = make_ring(SHAPE)
    with SharedPeer(receiver.name) as peer:
        refusal = peer.introduce(Greeting(SHAPE, TOKEN.encode()).pack(), *[descriptor] * num_descriptors)
        assert "brings one descriptor" in str(refusal)
    os.close(descriptor)
    ring.close()
    assert refused(rig, "bad_memory") == 1


@pytest.mark.parametrize("packet", [b"junk", b"x" * 5000, Greeting(SHAPE, b"t" * 300).pack()])
def test_what_is_no_greeting_is_refused(rig: Any, receiver: SharedReceiver, packet: bytes) -> None:
    with SharedPeer(receiver.name) as peer:
        assert "refuses it" in str(peer.introduce(packet))
    assert refused(rig, "bad_greeting") == 1


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
def test_another_user_of_the_machine_is_not_heard(rig: Any, receiver: SharedReceiver) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-c", _CONNECT, receiver.name], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.stdout.strip() == "b''", done.stderr
    assert refused(rig, "other_user") == 1
    assert receiver.num_connections == 0


def packets_that_are_no_blocks(rig: Any) -> list[bytes]:
    frame, _ = right_block(rig)
    return [
        b"x",
        pack_block(0, b""),
        pack_block(0, frame[:-1]),
        pack_block(0, frame + b"x"),
        pack_block(0, b"x" * 5000),
        pack_block(0, b"?" + frame[1:]),
        pack_block(SHAPE.num_slots, frame),
        pack_block(2**32 - 1, frame),
    ]


@pytest.mark.parametrize("number", range(8))
def test_a_packet_that_is_no_block_costs_its_sender_the_connection_only(rig: Any, number: int) -> None:
    packet = packets_that_are_no_blocks(rig)[number]
    with SharedPeer(rig.shared.name) as liar, SharedPeer(rig.shared.name) as honest:
        assert liar.greet(BLOCK_NBYTES) is None
        assert honest.greet(BLOCK_NBYTES) is None
        liar.socket.send(packet)
        assert liar.ended_with() == b""
        assert rig.refused("bad_header") == 1
        offer, grant = offer_for_another(rig)
        payload = content_of(offer.block_hashes[0])
        honest.send(1, rig.header(grant, offer, 0).pack(memoryview(payload)), payload)
        assert honest.slots_back() == [1]
    assert [rig.next_block(), rig.next_block()] == ["bad_header", "ok"]
    rig.leases.abort_peer("p")


def offer_for_another(rig: Any) -> tuple[Any, Any]:
    offer = rig.offer_of([9, 9, 9], "another")
    return offer, rig.leases.offer("p", offer)


def test_slots_come_back_when_blocks_are_refused(rig: Any) -> None:
    """More refusals than there are slots: else a lie that is over would stop the sender's other hand-offs."""
    frame, _ = right_block(rig)
    num_blocks = 3 * SHAPE.num_slots
    with SharedPeer(rig.shared.name) as peer:
        assert peer.greet(BLOCK_NBYTES) is None
        for number in range(num_blocks):
            peer.send(number % SHAPE.num_slots, frame, BAD_PAYLOAD)
            assert peer.slots_back() == [number % SHAPE.num_slots]
    assert [rig.next_block() for _ in range(num_blocks)] == ["bad_checksum"] + ["unknown_lease"] * (num_blocks - 1)
    assert rig.rejection().key == ("r", 1)


def test_a_slot_that_changes_between_copy_and_proof_is_refused(rig: Any) -> None:
    """The proof is over pool memory: what the sender scribbles before the copy is seen, after it it reaches nothing."""
    frame, payload = right_block(rig)
    rig.leases.may_finish.clear()
    with SharedPeer(rig.shared.name) as peer:
        assert peer.greet(BLOCK_NBYTES) is None
        peer.send(0, frame, payload)
        rig.leases.inside.get(timeout=WAIT_S)
        peer.ring.slots[0][100] ^= 1
        rig.leases.may_finish.set()
        assert rig.next_block() == "bad_checksum"
        assert peer.slots_back() == [0]
    assert rig.rejection().key == ("r", 1)


def test_a_slot_that_changes_after_the_proof_changes_nothing(rig: Any) -> None:
    offer, grant = offer_for(rig)
    payload = content_of(offer.block_hashes[0])
    with SharedPeer(rig.shared.name) as peer:
        assert peer.greet(BLOCK_NBYTES) is None
        peer.send(0, rig.header(grant, offer, 0).pack(memoryview(payload)), payload)
        assert peer.slots_back() == [0]
        peer.ring.slots[0][:] = bytes(SHAPE.slot_nbytes)
    block_id = rig.leases._leases[grant.lease_id].block_ids[0]
    assert bytes(rig.store.block(block_id)) == payload
    rig.leases.abort_peer("p")


def send_for_ever(peer: SharedPeer, frame: bytes, payload: bytes) -> None:
    while True:
        peer.send(0, frame, payload)


def test_a_sender_that_takes_no_slots_back_is_dropped(rig: Any) -> None:
    """It names the same slot over and over; what is told it would pile up."""
    frame, payload = right_block(rig)
    with SharedPeer(rig.shared.name) as peer:
        assert peer.greet(BLOCK_NBYTES) is None
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            send_for_ever(peer, frame, payload)
    until(lambda: rig.shared.num_connections == 0, "it is still there")
    assert rig.shared.is_alive


def test_what_a_killed_sender_sent_is_taken_and_its_memory_is_let_go(rig: Any) -> None:
    rings = num_mapped_rings()
    program = (
        "import sys, time; from tests.wire.shared_peer import SharedPeer;"
        f"peer = SharedPeer(sys.argv[1]); assert peer.greet({BLOCK_NBYTES}) is None;"
        "peer.send(0, bytes.fromhex(sys.argv[2]), bytes.fromhex(sys.argv[3])); print(flush=True); time.sleep(60)"
    )
    frame, payload = right_block(rig)
    rig.leases.may_finish.clear()
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", program, rig.shared.name, frame.hex(), payload.hex()],
        stdout=subprocess.PIPE,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    ) as sender:
        assert sender.stdout is not None
        assert sender.stdout.readline() == b"\n"
        rig.leases.inside.get(timeout=WAIT_S)  # in the midst of the block
        assert num_mapped_rings() == rings + 1
        sender.send_signal(signal.SIGKILL)
    rig.leases.may_finish.set()
    assert rig.next_block() == "ok"
    until(lambda: rig.shared.num_connections == 0, "the killed sender is still there")
    assert num_mapped_rings() == rings


# -- strangers -------------------------------------------------------------------------------------------------------------


def test_who_says_nothing_is_dropped(rig: Any) -> None:
    receiver = SharedReceiver(SharedPlace(), rig.leases, BLOCK_NBYTES, rig.decode_metrics, stranger_s=0.05)
    receiver.start()
    with SharedPeer(receiver.name) as silent:
        assert silent.ended_with() == b""
    until(lambda: receiver.num_connections == 0, "it is still there")
    receiver.stop()


def test_a_crowd_that_says_nothing_shuts_nobody_out(rig: Any) -> None:
    with ExitStack() as crowd:
        strangers = [crowd.enter_context(SharedPeer(rig.shared.name)) for _ in range(100)]
        until(lambda: rig.shared.num_connections == 64, "more strangers than there may be at a time, or fewer")
        assert strangers[0].ended_with() == b""  # the oldest had to go
        frame, payload = right_block(rig)
        with SharedPeer(rig.shared.name) as honest:
            assert honest.greet(BLOCK_NBYTES) is None
            honest.send(0, frame, payload)
            assert honest.slots_back() == [0]
    assert rig.next_block() == "ok"


def test_no_more_senders_than_there_may_be(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.wire.shared_receiver._MAX_SENDERS", 2)
    with ExitStack() as stack:
        first, second, third = (stack.enter_context(SharedPeer(rig.shared.name)) for _ in range(3))
        assert first.greet(BLOCK_NBYTES) is None
        assert second.greet(BLOCK_NBYTES) is None
        assert "no more are taken" in str(third.greet(BLOCK_NBYTES))
        first.socket.close()
        until(lambda: rig.shared.num_connections == 1, "who has left is still there")
        with SharedPeer(rig.shared.name) as fourth:
            assert fourth.greet(BLOCK_NBYTES) is None
    assert refused(rig, "too_many") == 1


def test_without_a_descriptor_left_it_waits_and_then_accepts(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.wire.shared_receiver._PAUSE_S", 0.05)
    with ExitStack() as stack:
        known = stack.enter_context(SharedPeer(rig.shared.name))
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
            late.connect(SharedPlace().address(rig.shared.name))
            frame, payload = right_block(rig)
            until(lambda: rig.shared._accepts_from_s is not None, "it accepts without a descriptor")
            known.send(0, frame, payload)  # who is there is served meanwhile
            assert rig.next_block() == "ok"
        finally:
            for filler in fillers:
                os.close(filler)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        until(lambda: rig.shared.num_connections == 2, "who came without a descriptor left is never accepted")


# -- start and end ---------------------------------------------------------------------------------------------------------


def test_a_receiver_that_never_started_leaves_nothing(rig: Any) -> None:
    before = open_descriptors()
    receiver = SharedReceiver(SharedPlace(), rig.leases, BLOCK_NBYTES, rig.decode_metrics)
    assert not receiver.is_alive
    receiver.stop()
    assert open_descriptors() == before


def test_stopping_lets_go_of_senders_and_their_memory(rig: Any) -> None:
    before, rings = open_descriptors(), num_mapped_rings()
    receiver = SharedReceiver(SharedPlace(), rig.leases, BLOCK_NBYTES, rig.decode_metrics)
    receiver.start()
    with SharedPeer(receiver.name) as sender, SharedPeer(receiver.name):
        assert sender.greet(BLOCK_NBYTES) is None
        receiver.stop()
        assert sender.ended_with() == b""
        sender.ring.close()
    assert open_descriptors() == before
    assert num_mapped_rings() == rings


def test_a_socket_in_a_directory_is_this_users_and_goes_with_the_receiver(rig: Any, socket_directory: Path) -> None:
    place = SharedPlace(socket_directory)
    receiver = SharedReceiver(place, rig.leases, BLOCK_NBYTES, rig.decode_metrics)
    receiver.start()
    (file,) = socket_directory.iterdir()
    assert file.name == receiver.name
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with SharedPeer(receiver.name, place) as peer:
        assert peer.greet(BLOCK_NBYTES) is None
    receiver.stop()
    assert list(socket_directory.iterdir()) == []


def test_a_directory_that_cannot_be_used_is_an_error(rig: Any, tmp_path: Path) -> None:
    before = open_descriptors()
    with pytest.raises(WireError, match="choose another --shared-memory, or off"):
        SharedReceiver(SharedPlace(tmp_path / "gone"), rig.leases, BLOCK_NBYTES, rig.decode_metrics)
    assert open_descriptors() == before
