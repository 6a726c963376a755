"""Hand-offs between devices that hash their blocks, and that copy them into a ring and out of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvrelay.wire.blocks.frames import BlockHeader
from kvrelay.wire.blocks.seal import TAG_NBYTES
from kvrelay.wire.blocks.send_job import SendJob, SendTicket, Wakeup
from kvrelay.wire.lines.shared.place import SharedPlace
from kvrelay.wire.lines.shared.sender import SharedLine, SharedTarget
from kvrelay.wire.messages import FailureCode

from .lease_bench import BAD_PAYLOAD, BLOCK_NBYTES, BLOCK_SIZE, WAIT_S, until
from .sending import NeverThere
from .shared_peer import SharedPeer
from .test_handoff_staged import KINDS, NUM_TOKENS, StagedRig, assert_arrived, rig

__all__ = ["rig"]  # a fixture


@pytest.mark.parametrize("path", ["shared_memory"], indirect=True)
@pytest.mark.parametrize("rig", ["direct"], indirect=True)
def test_devices_copy_into_the_ring_and_out_of_it(rig: Any) -> None:
    """Both devices reach the ring, so no block passes the host's own memory."""
    until(lambda: rig.senders[0]._is_direct, "a line that the device reaches")
    key, _ = rig.granted(NUM_TOKENS)
    assert_arrived(rig, rig.complete(key))
    num_blocks = NUM_TOKENS // BLOCK_SIZE
    assert rig.source.device.num_direct == rig.store.device.num_direct == num_blocks
    device = rig.source.device
    assert device.num_launched == num_blocks + device.num_digests, "every block is copied once"
    assert device.num_digests <= 1 + num_blocks, "digests of a block are made twice"


@pytest.mark.parametrize("rig", ["hashed", "direct"], indirect=True)
@pytest.mark.parametrize("side", ["store", "source"])
def test_a_block_that_is_copied_wrongly_into_a_pool_or_out_of_one_is_refused(rig: Any, side: str) -> None:
    """What came was right, or what was sent: only digests of both pools' own memory can tell."""
    getattr(rig, side).device.flips = True
    key, _ = rig.granted(NUM_TOKENS)
    rig.transfers.blocks_ready(key, 1)
    assert rig.next_block() == "bad_checksum"
    assert rig.rejection().code is FailureCode.INTEGRITY
    rig.pump()
    rig.settle()


@pytest.fixture
def direct(context: Any) -> Iterator[Any]:
    """Devices that reach the ring, and copy only when somebody waits."""
    rig = StagedRig(context, num_blocks=80, path="shared_memory", **KINDS["direct"])
    until(lambda: rig.senders[0]._is_direct, "a line that the device reaches")
    for store in (rig.store, rig.source):
        store.device._chance = None
    yield rig
    rig.close()
    assert not rig.store.device.registered
    assert not rig.source.device.registered


@contextmanager
def connected(rig: Any) -> Iterator[SharedLine]:
    """A line of its own from the source's device. The test plays its sender."""
    target = SharedTarget(rig.shared.name, SharedPlace(), BLOCK_NBYTES, register=rig.source.register)
    line = SharedLine.connect(target, rig.prefill_metrics, wakeup := Wakeup())
    try:
        yield line
    finally:
        line.close()
        wakeup.close()


def job(payload: Any, index: int = 0) -> SendJob:
    return SendJob(SendTicket(), BlockHeader(9, 1, index, BLOCK_NBYTES, b"h" * 16), payload, None)


def test_a_line_that_closes_waits_for_the_copies_into_its_ring(direct: Any) -> None:
    """The device would write to memory that is not there any more. It refuses to unregister what a copy still uses."""
    jobs = [job(direct.source.open_read(index), index) for index in range(2)]
    with connected(direct) as line:
        assert all(map(line.ship, jobs))
        assert not any(one.ticket.is_done for one in jobs), "a ticket was done before the copy"
        assert direct.source.device.uses(direct.source.memory[0])
    assert all(one.ticket.is_done for one in jobs)
    for index in range(2):
        direct.source.close_read(index)


def test_blocks_that_are_copied_one_behind_the_other_are_hashed_together(direct: Any) -> None:
    device, num_before = direct.source.device, direct.source.device.num_digests
    jobs = [job(direct.source.open_read(index), index) for index in range(6)]
    with connected(direct) as line:
        for number, one in enumerate(jobs):
            assert line.ship(one)
            assert device.num_digests == num_before + (number >= 4), "a launch for each block"
        assert jobs[1].ticket.is_done
    assert device.num_digests == num_before + 2
    for index in range(6):
        direct.source.close_read(index)


def test_copies_by_the_device_are_over_before_the_host_copies(direct: Any) -> None:
    first = job(direct.source.open_read(0))
    with connected(direct) as line:
        assert line.ship(first)
        assert not first.ticket.is_done
        assert line.ship(job(memoryview(bytes(BLOCK_NBYTES)), 1))
        assert first.ticket.is_done
    direct.source.close_read(0)


def test_a_block_that_is_called_off_takes_no_slot(direct: Any) -> None:
    late = job(NeverThere())
    late.ticket.is_unwanted = True
    with connected(direct) as line:
        num_free = len(line._free)
        assert line.ship(late)
        assert late.ticket.is_done
        assert len(line._free) == num_free


def test_a_slot_goes_back_when_its_copy_is_over(direct: Any) -> None:
    lease = direct.leased(4 * BLOCK_SIZE)
    with SharedPeer(direct.shared.name) as peer:
        assert peer.greet(BLOCK_NBYTES) is None
        for index in range(4):
            peer.send(index, *lease.frames(index))
        given: set[int] = set()
        while len(given) < 4:
            given |= {*peer.slots_back()}
            for slot in given:
                peer.ring.slots[slot][:] = bytes(len(peer.ring.slots[slot]))
        assert [direct.next_block() for _ in range(4)] == ["ok"] * 4
        assert direct.store.device.num_direct == 4
        direct.table.commit("p", lease.commit())
        direct.assert_verified(lease)
    peer.ring.close()


def send_in_one_turn(rig: Any, lease: Any, peer: SharedPeer, *payloads: bytes | None) -> None:
    """Send a block for each payload (None: the right one), and hold the receiver at the first until all are there."""
    rig.table.may_finish.clear()
    for index, payload in enumerate(payloads):
        frame, right = lease.frames(index)
        peer.send(index, frame, right if payload is None else payload)
    assert rig.table.inside.get(timeout=WAIT_S) == 0


def test_a_ring_whose_sender_is_gone_stays_until_its_blocks_are_copied(direct: Any) -> None:
    lease, num_connections = direct.leased(4 * BLOCK_SIZE), direct.shared.num_connections
    with SharedPeer(direct.shared.name) as peer:
        assert peer.greet(BLOCK_NBYTES) is None
        send_in_one_turn(direct, lease, peer, None, None, None)
    peer.ring.close()
    direct.table.may_finish.set()
    assert [direct.next_block() for _ in range(3)] == ["ok"] * 3
    until(lambda: direct.shared.num_connections == num_connections, "who has left is still there")
    direct.table.abort_peer("p")
    assert direct.ends.rejected.get(timeout=WAIT_S).code is FailureCode.PEER_LOST
    direct.assert_all_free()


def test_a_wrong_block_among_others_of_a_turn_ends_its_lease_once(direct: Any) -> None:
    """Its blocks are free when the device writes none of them any more, and all slots go back."""
    lease = direct.leased(4 * BLOCK_SIZE)
    with SharedPeer(direct.shared.name) as peer:
        assert peer.greet(BLOCK_NBYTES) is None
        send_in_one_turn(direct, lease, peer, None, BAD_PAYLOAD, None, None)
        direct.table.may_finish.set()
        assert [direct.next_block() for _ in range(4)] == ["ok", "bad_checksum", "ok", "ok"]
        assert direct.ends.rejected.get(timeout=WAIT_S).code is FailureCode.INTEGRITY
        assert not direct.store.device._pending, "blocks are free, and a copy into one is under way"
        direct.assert_all_free()
        given: set[int] = set()
        while len(given) < 4:
            given |= {*peer.slots_back()}
        assert given == {0, 1, 2, 3}
    peer.ring.close()
    assert direct.ends.rejected.empty()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("side", ["store", "source"])
def test_digests_that_cannot_be_made_leave_no_copy_behind(direct: Any, side: str) -> None:
    """The copy was launched. The thread ends, and its ring with it, but not before the copy."""
    getattr(direct, side).device.fails_to_digest = True
    key, _ = direct.granted(NUM_TOKENS)
    direct.commit(key)
    direct.pump()
    until(lambda: not (direct.shared if side == "store" else direct.senders[0]).is_alive, "a thread that goes on")
    if side == "store":
        direct.table.abort_peer("p")
        assert not direct.store.device._pending, "blocks are free, and a copy into one is under way"
    direct.lose_link()
    until(lambda: not getattr(direct, side).device.registered, "a ring that stays")


def test_two_sealed_frames_for_one_place_in_a_turn_do_not_wait_for_each_other(context: Any) -> None:
    rig = StagedRig(context, num_blocks=80, path="shared_memory", **KINDS["direct-sealed"])
    lease = rig.leased(4 * BLOCK_SIZE)
    with SharedPeer(rig.shared.name) as peer:
        assert peer.greet(BLOCK_NBYTES) is None
        rig.table.may_finish.clear()
        peer.send(0, *lease.frames(0))
        assert rig.table.inside.get(timeout=WAIT_S) == 0
        for slot in (1, 2):
            peer.send(slot, lease.frames(1)[0], bytes(BLOCK_NBYTES + TAG_NBYTES))
        peer.send(3, *lease.frames(1))
        rig.table.may_finish.set()
        assert [rig.next_block() for _ in range(4)] == ["ok", "bad_seal", "bad_seal", "ok"]
    peer.ring.close()
    rig.table.abort_peer("p")
    rig.close()
