"""Hand-offs between pools that the host reaches only through a few staging slots. Copies to the device are delayed."""

from __future__ import annotations

import random
import socket as sockets
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvrelay.engine.kv.device.copies import StagingPlan
from kvrelay.engine.kv.device.staged_read import StagedRead
from kvrelay.engine.kv.device.staging import Staging
from kvrelay.wire.blocks.frames import BlockHeader, parse_header
from kvrelay.wire.blocks.seal import TAG_NBYTES
from kvrelay.wire.messages import FailureCode
from tests.engine.late_device import LateDevice

from .lease_bench import BLOCK_NBYTES, WAIT_S, Granted, offer_of, until
from .rig import Rig
from .sending import assert_all_done_soon

NUM_SLOTS = 4
NUM_TOKENS = 100  # 25 blocks and more than six times the slots


class StagedStore:
    """Replaces :class:`tests.wire.lease_bench.CountingStore` by a staged pool on a device that copies late."""

    def __init__(self, num_blocks: int, device: LateDevice) -> None:
        self.num_blocks, self.block_nbytes = num_blocks, BLOCK_NBYTES
        self.device = device
        self.memory = torch.zeros(num_blocks, BLOCK_NBYTES, dtype=torch.uint8)
        self.staging = Staging(self.memory, StagingPlan(self.device, NUM_SLOTS * BLOCK_NBYTES), [BLOCK_NBYTES])
        self.register = None if self.staging.registered is None else self.staging.registered.register
        self.reads: Counter[int] = Counter()
        self.writes: Counter[int] = Counter()

    def block(self, block_id: int) -> memoryview:
        return self.memory[block_id].numpy().data

    def open_read(self, block_id: int, group: int = 0) -> StagedRead:
        self.reads[block_id] += 1
        return self.staging.open_read(block_id, BLOCK_NBYTES)

    def close_read(self, block_id: int) -> None:
        self.reads[block_id] -= 1
        self.staging.close_read(block_id)

    def begin_write(self, block_id: int, group: int, payload: memoryview) -> Callable[[], bytes]:
        wait = self.staging.begin_write(block_id, payload)
        self.writes[block_id] += 1

        def written() -> bytes:
            self.writes[block_id] -= 1
            return wait()

        return written

    def open_write(self, block_id: int, group: int = 0) -> memoryview:
        view = self.staging.open_write(block_id)
        self.writes[block_id] += 1
        return view

    def close_write(self, block_id: int) -> None:
        self.writes[block_id] -= 1
        self.staging.close_write(block_id)


class StagedRig(Rig):
    """A rig whose two pools are staged, on devices of one kind."""

    def __init__(self, context: Any, *, hashes: bool, reaches: bool, **options: Any) -> None:
        self._kind = {"hashes": hashes, "reaches": reaches}
        super().__init__(context, **options)

    def new_store(self, num_blocks: int) -> Any:
        return StagedStore(num_blocks, LateDevice(random.Random(num_blocks), **self._kind))


class Holder:
    """A reader of blocks that is not done."""

    is_done = False


# How blocks are proved: by the host's checksum, a seal, digests of the device, and digests beside copies into the ring itself.
KINDS = {
    "plain": {"seals_kv": False, "hashes": False, "reaches": False},
    "sealed": {"seals_kv": True, "hashes": False, "reaches": False},
    "hashed": {"seals_kv": False, "hashes": True, "reaches": False},
    "direct": {"seals_kv": False, "hashes": True, "reaches": True},
    "direct-sealed": {"seals_kv": True, "hashes": True, "reaches": True},
}

BY_SLOTS = [kind for kind in KINDS if kind != "direct"]  # a device that reaches the ring needs no slot


@pytest.fixture(params=KINDS)
def rig(request: pytest.FixtureRequest, context: Any, path: str) -> Iterator[Any]:
    rig = StagedRig(context, num_blocks=80, path=path, **KINDS[request.param])
    yield rig
    rig.close()
    for store in (rig.store, rig.source):
        assert len(store.staging._free) == NUM_SLOTS
        assert not store.device.registered, "a ring that was unmapped is still registered"


def assert_arrived(rig: Any, lease: Any) -> None:
    """Check the lease's blocks as a step sees them that is launched now."""
    rig.store.staging.order_steps()
    rig.assert_holds(lease)


def hold_all(rig: Any) -> tuple[Holder, list[int]]:
    """Another reader takes all slots."""
    holder, block_ids = Holder(), list(range(70, 70 + NUM_SLOTS))
    for block_id in block_ids:
        assert rig.source.open_read(block_id).wait(holder, WAIT_S) is not None
    return holder, block_ids


@pytest.mark.parametrize("rig", ["sealed", "direct-sealed"], indirect=True)
def test_what_was_forged_is_overwritten_by_what_is_genuine(rig: Any) -> None:
    """Forged blocks are copied to their place first. The genuine blocks are copied after them, and remain."""
    key, grant = rig.granted(NUM_TOKENS)
    lease = Granted(offer_of(list(range(NUM_TOKENS))), grant)
    for index in range(2 * NUM_SLOTS):
        rig.send(lease.frames(index)[0], bytes(BLOCK_NBYTES + TAG_NBYTES))
        assert rig.next_block() == "bad_seal"
    assert_arrived(rig, rig.complete(key))


def test_a_long_prompt_passes_through_few_slots(rig: Any) -> None:
    told = rig.ends.on_lease_verified

    def verified(lease: Any) -> None:
        # A step that is launched before a block's copy would read old bytes.
        assert not +rig.store.writes, "a lease is verified before its last block is on its way"
        told(lease)

    rig.ends.on_lease_verified = verified
    for request_id in ("first", "second"):
        key, _ = rig.granted(NUM_TOKENS, request_id)
        rig.transfers.blocks_ready(key, 7)
        assert_arrived(rig, rig.complete(key))
        assert rig.transfer_ends.released[-1] == key


@pytest.mark.parametrize("rig", BY_SLOTS, indirect=True)
def test_a_sender_waits_for_a_slot_and_goes_on_when_one_is_free(rig: Any) -> None:
    holder, block_ids = hold_all(rig)
    key, _ = rig.granted(NUM_TOKENS)
    rig.commit(key)
    rig.pump()
    until(lambda: rig.source.staging._num_waiting, "a sender that waits")
    assert rig.table.seen.empty(), "a block was sent from nowhere"
    holder.is_done = True
    assert_arrived(rig, rig.verdict())
    for block_id in block_ids:
        rig.source.close_read(block_id)
    rig.settle()


@pytest.mark.parametrize("path", ["tcp"], indirect=True)
def test_links_that_take_nothing_leave_slots_for_the_others(rig: Any) -> None:
    """There are more stuck links than slots, with several blocks each. ZeroMQ takes their blocks, and another hand-off works."""
    header, block_ids = BlockHeader(9, 1, 0, BLOCK_NBYTES, b"h" * 16), range(40, 70)
    tickets = []
    with sockets.create_server(("127.0.0.1", 0), backlog=100) as deaf:  # ZeroMQ's handshake never ends
        links = [rig.new_link(f"tcp://127.0.0.1:{deaf.getsockname()[1]}")[0] for _ in range(NUM_SLOTS + 1)]
        for block_id in block_ids:
            link = links[block_id % len(links)]
            tickets.append(link.data.send(header, rig.source.open_read(block_id), None))
        until(lambda: all(not sender._jobs._jobs for sender in rig.senders), "links that take nothing hold all slots")
        key, _ = rig.granted(NUM_TOKENS)
        assert_arrived(rig, rig.complete(key))
        for sender in rig.senders[1:]:
            sender.close()
            sender.join()
    assert_all_done_soon(tickets)
    for block_id in block_ids:
        rig.source.close_read(block_id)
    rig.settle()


@pytest.mark.parametrize("rig", BY_SLOTS, indirect=True)
def test_a_link_that_is_lost_ends_a_sender_that_waits_for_a_slot(rig: Any) -> None:
    _, block_ids = hold_all(rig)
    key, _ = rig.granted(NUM_TOKENS)
    rig.commit(key)
    until(lambda: rig.source.staging._num_waiting, "a sender that waits")
    rig.lose_link()
    assert rig.transfer_ends.failures == [FailureCode.PEER_LOST]
    assert rig.transfer_ends.released == [key]
    for block_id in block_ids:
        rig.source.close_read(block_id)
    rig.table.abort_peer("p")


@pytest.mark.parametrize("rig", BY_SLOTS, indirect=True)
def test_an_aborted_transfer_gives_its_slots_back(rig: Any) -> None:
    _, block_ids = hold_all(rig)
    key, _ = rig.granted(NUM_TOKENS, "aborted")
    rig.commit(key)
    rig.pump()
    rig.transfers.abort(key, "test")
    for block_id in block_ids:
        rig.source.close_read(block_id)
    rig.settle()
    assert rig.transfer_ends.released == [key]
    rig.pump()
    rig.rejection()
    key, _ = rig.granted(NUM_TOKENS, "next")
    assert_arrived(rig, rig.complete(key))


def test_a_block_that_cannot_be_copied_into_the_pool_is_not_received(rig: Any) -> None:
    lease = rig.leased(3)
    frame, payload = lease.frames(0)
    header = parse_header(frame)
    rig.table.begin_piece(header)
    rig.store.device._is_broken = True
    with pytest.raises(RuntimeError, match="broken"):
        rig.table.write_piece(header, memoryview(payload))()
    rig.table.commit("p", lease.commit())
    assert rig.ends.verified.empty()


def test_a_failed_copy_is_not_sent_and_ends_the_link(rig: Any) -> None:
    rig.source.device._fails_at = 3
    key, _ = rig.granted(NUM_TOKENS)
    rig.commit(key)
    rig.pump()
    until(lambda: not rig.senders[0].is_alive, "a sender that goes on over a broken device")
    rig.lose_link()
    assert rig.transfer_ends.released == [key]
    rig.table.abort_peer("p")
    outcomes = [rig.table.seen.get_nowait() for _ in range(rig.table.seen.qsize())]
    # Right blocks may also arrive after the lease has ended.
    assert set(outcomes) <= {"ok", "unknown_lease"}, "what the copy left was sent"
    assert len(outcomes) < 3
    assert rig.ends.verified.empty()
