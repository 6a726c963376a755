"""Every way to lie in a hand-off over real data sockets: the pool stays right, and only the liar's lease ends."""

from __future__ import annotations

from typing import Any

import pytest
import zmq

from kvrelay.wire.messages import FailureCode, Grant

from .handoffs import BAD_PAYLOAD, NUM_TOKENS, commit_of, hand_over, offer_for, send_block, send_raw
from .rig import BLOCK_NBYTES, WAIT_S, content_of

# -- lies ----------------------------------------------------------------------------------------------------------------


def test_a_corrupted_payload_ends_the_lease(rig: Any) -> None:
    offer, grant = offer_for(rig)
    send_block(rig, offer, grant, 0, BAD_PAYLOAD)
    assert rig.next_block() == "bad_checksum"
    assert rig.rejection().code is FailureCode.INTEGRITY
    assert rig.refused("bad_checksum") == rig.handoffs("integrity") == 1
    rig.assert_all_free()


def test_swapped_payloads_end_the_lease(rig: Any) -> None:
    offer, grant = offer_for(rig)
    send_block(rig, offer, grant, 0, content_of(offer.block_hashes[1]))
    assert rig.next_block() == "bad_checksum"
    assert rig.rejection().code is FailureCode.INTEGRITY


def test_swapped_headers_end_the_lease(rig: Any) -> None:
    offer, grant = offer_for(rig)
    payload = content_of(offer.block_hashes[1])  # consistent in itself, but not what was promised at index 0
    header = rig.header(grant, offer, 0, block_hash=offer.block_hashes[1])
    send_raw(rig, header.pack(memoryview(payload)), payload)
    assert rig.next_block() == "wrong_block"
    assert rig.rejection().code is FailureCode.INTEGRITY
    assert rig.refused("wrong_block") == 1
    rig.assert_all_free()


def test_an_index_beyond_the_offer_ends_the_lease(rig: Any) -> None:
    offer, grant = offer_for(rig, num_tokens=8)  # a third block is reserved, but nothing was offered for it
    header = rig.header(grant, offer, 2)
    send_raw(rig, header.pack(memoryview(BAD_PAYLOAD)), BAD_PAYLOAD)
    assert rig.next_block() == "wrong_block"
    assert rig.rejection().code is FailureCode.INTEGRITY


@pytest.mark.parametrize("nbytes", [0, BLOCK_NBYTES - 1, BLOCK_NBYTES + 1])
def test_a_size_that_is_not_what_was_announced_ends_the_lease_and_spills_nowhere(tcp_rig: Any, nbytes: int) -> None:
    offer, grant = offer_for(tcp_rig)
    before = [bytes(tcp_rig.store.block(block_id)) for block_id in range(tcp_rig.store.num_blocks)]
    payload = bytes(BLOCK_NBYTES * 2)[:nbytes]
    packed = tcp_rig.header(grant, offer, 0).pack(memoryview(payload))
    send_raw(tcp_rig, packed, payload)
    assert tcp_rig.next_block() == "bad_size"
    assert tcp_rig.rejection().code is FailureCode.INTEGRITY
    assert tcp_rig.refused("bad_size") == 1
    assert [bytes(tcp_rig.store.block(block_id)) for block_id in range(tcp_rig.store.num_blocks)] == before


def test_an_announced_size_that_is_no_block_is_refused_before_the_write(rig: Any) -> None:
    offer, grant = offer_for(rig)
    payload = bytes(8)
    send_raw(rig, rig.header(grant, offer, 0, payload_nbytes=8).pack(memoryview(payload)), payload)
    assert rig.next_block() == "bad_size"
    rig.rejection()
    assert rig.store.num_write_opens == 0


def test_more_parts_than_two_are_no_block(tcp_rig: Any) -> None:
    offer, grant = offer_for(tcp_rig)
    payload = content_of(offer.block_hashes[0])
    send_raw(tcp_rig, tcp_rig.header(grant, offer, 0).pack(memoryview(payload)), payload, b"more")
    assert tcp_rig.next_block() == "bad_size"
    tcp_rig.rejection()


def test_a_stale_epoch_is_dropped_and_hurts_nobody(rig: Any) -> None:
    offer, grant = offer_for(rig)
    payload = content_of(offer.block_hashes[0])
    header = rig.header(grant, offer, 0, epoch=grant.epoch - 1)
    send_raw(rig, header.pack(memoryview(payload)), payload)
    assert rig.next_block() == "stale_epoch"
    assert rig.store.num_write_opens == 0
    send_block(rig, offer, grant, 0)
    assert rig.next_block() == "ok"
    assert rig.refused("stale_epoch") == 1


def test_an_unknown_lease_is_dropped(rig: Any) -> None:
    offer, grant = offer_for(rig)
    payload = content_of(offer.block_hashes[0])
    send_raw(rig, rig.header(grant, offer, 0, lease_id=99).pack(memoryview(payload)), payload)
    assert rig.next_block() == "unknown_lease"
    assert rig.refused("unknown_lease") == 1
    assert len(rig.leases.snapshot()) == 1


@pytest.mark.parametrize("frames", [(b"junk",), (b"junk", b"payload"), (b"", b"", b"", b"")])
def test_garbage_is_counted_and_the_next_block_is_taken(tcp_rig: Any, frames: tuple[bytes, ...]) -> None:
    offer, grant = offer_for(tcp_rig)
    send_raw(tcp_rig, *frames)
    assert tcp_rig.next_block() == "bad_header"
    assert tcp_rig.refused("bad_header") == 1
    send_block(tcp_rig, offer, grant, 0)
    assert tcp_rig.next_block() == "ok"
    assert tcp_rig.receiver.is_alive


def test_a_header_without_a_payload_is_no_block(tcp_rig: Any) -> None:
    offer, grant = offer_for(tcp_rig)
    send_raw(tcp_rig, tcp_rig.header(grant, offer, 0).pack(memoryview(b"")))
    assert tcp_rig.next_block() == "bad_header"
    assert len(tcp_rig.leases.snapshot()) == 1


def test_a_frame_beyond_the_bound_costs_its_sender_the_connection_only(tcp_rig: Any) -> None:
    offer, grant = offer_for(tcp_rig)
    packed = tcp_rig.header(grant, offer, 0).pack(memoryview(b""))
    with tcp_rig.context.socket(zmq.DEALER) as rogue:
        rogue.linger = 0
        monitor = rogue.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        rogue.connect(tcp_rig.receiver.address)
        rogue.send_multipart([packed, bytes(2**20)])
        assert monitor.poll(WAIT_S * 1000)
        rogue.disable_monitor()
        monitor.close(linger=0)
    send_block(tcp_rig, offer, grant, 0)
    assert tcp_rig.next_block() == "ok"


def test_a_block_sent_twice_does_not_touch_what_is_there(rig: Any) -> None:
    offer, grant = offer_for(rig)
    send_block(rig, offer, grant, 0)
    assert rig.next_block() == "ok"
    num_write_opens = rig.store.num_write_opens
    send_block(rig, offer, grant, 0, BAD_PAYLOAD)
    assert rig.next_block() == "duplicate"
    assert rig.refused("duplicate") == 1
    assert rig.store.num_write_opens == num_write_opens
    assert len(rig.leases.snapshot()) == 1


def test_a_block_that_is_cached_here_is_not_overwritten(rig: Any) -> None:
    first = hand_over(rig)
    for _ in range(3):
        assert rig.next_block() == "ok"
    grant = rig.leases.offer("p", offer := rig.offer_of(list(range(NUM_TOKENS)), "again"))
    assert grant.num_cached_blocks == 2
    send_block(rig, offer, grant, 0, BAD_PAYLOAD)
    assert rig.next_block() == "duplicate"
    assert bytes(rig.store.block(first.block_ids[0])) == content_of(offer.block_hashes[0])


def test_a_replay_after_the_verdict_cannot_change_the_pool(rig: Any) -> None:
    lease = hand_over(rig)
    memory = [bytes(rig.store.block(block_id)) for block_id in lease.block_ids]
    for _ in range(3):
        assert rig.next_block() == "ok"
    header = rig.header(
        Grant(request_id="r", attempt=1, lease_id=lease.lease_id, epoch=7, num_cached_blocks=0, ttl_s=1), lease.offer, 0
    )
    send_raw(rig, header.pack(memoryview(BAD_PAYLOAD)), BAD_PAYLOAD)
    assert rig.next_block() == "unknown_lease"
    assert [bytes(rig.store.block(block_id)) for block_id in lease.block_ids] == memory


def test_the_view_that_was_filled_is_the_view_that_is_checked(rig: Any) -> None:
    """One open_write per block: a staging pool would give a second one other memory."""
    hand_over(rig)
    assert rig.store.num_write_opens == 3


def test_a_wrong_chain_hash_in_the_commit_ends_the_lease(rig: Any) -> None:
    offer, grant = offer_for(rig)
    rig.leases.commit("p", commit_of(offer, grant, chain_hash=b"?" * 16))
    assert rig.rejection().code is FailureCode.INTEGRITY
    rig.assert_all_free()


def test_a_commit_of_another_epoch_is_void(rig: Any) -> None:
    offer, grant = offer_for(rig)
    rig.leases.commit("p", commit_of(offer, grant, epoch=grant.epoch - 1))
    assert rig.leases.snapshot()[0]["state"] == "granted"


def test_the_same_blocks_over_both_ways_at_once(tcp_rig: Any) -> None:
    """A liar fills one lease over TCP and through shared memory. A block has one writer; the lease ends when both have left."""
    rig = tcp_rig
    offer, grant = offer_for(rig)
    rig.leases.may_finish.clear()
    send_block(rig, offer, grant, 0)
    assert rig.leases.inside.get(timeout=WAIT_S) == 0
    rig.path = "shared_memory"
    send_block(rig, offer, grant, 0, BAD_PAYLOAD)
    assert rig.next_block() == "duplicate"
    send_block(rig, offer, grant, 1)
    assert rig.leases.inside.get(timeout=WAIT_S) == 1
    rig.leases.abort_peer("p")
    assert [entry["state"] for entry in rig.leases.snapshot()] == ["aborting"]
    rig.leases.may_finish.set()
    assert [rig.next_block(), rig.next_block()] == ["ok", "ok"]
    assert rig.rejection().code is FailureCode.PEER_LOST
    rig.assert_all_free()


def test_one_hand_off_over_both_ways(tcp_rig: Any) -> None:
    rig = tcp_rig
    offer, grant = offer_for(rig)
    rig.leases.commit("p", commit_of(offer, grant))
    for index, path in enumerate(["tcp", "shared_memory", "tcp"]):
        rig.path = path
        send_block(rig, offer, grant, index)
        assert rig.next_block() == "ok"
    assert rig.lease_ends.verified.get(timeout=WAIT_S).offer is offer
