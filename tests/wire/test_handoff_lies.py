"""Lies over real sockets and rings, as far as the way that they come matters; all others are told in test_lease_lies."""

from __future__ import annotations

from typing import Any

import pytest
import zmq

from kvrelay.wire.messages import FailureCode

from .handoffs import BAD_PAYLOAD, commit_of, hand_over, offer_for, send_block, send_raw
from .rig import WAIT_S, content_of


def test_a_corrupted_payload_ends_the_lease(rig: Any) -> None:
    offer, grant = offer_for(rig)
    send_block(rig, offer, grant, 0, BAD_PAYLOAD)
    assert rig.next_block() == "bad_checksum"
    assert rig.rejection().code is FailureCode.INTEGRITY
    assert rig.refused("bad_checksum") == rig.handoffs("integrity") == 1
    rig.assert_all_free()


def test_more_parts_than_two_are_no_block(tcp_rig: Any) -> None:
    offer, grant = offer_for(tcp_rig)
    payload = content_of(offer.block_hashes[0])
    send_raw(tcp_rig, tcp_rig.header(grant, offer, 0).pack(memoryview(payload)), payload, b"more")
    assert tcp_rig.next_block() == "bad_size"
    tcp_rig.rejection()


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


def test_the_view_that_was_filled_is_the_view_that_is_checked(rig: Any) -> None:
    """One open_write per block: a staging pool would give a second one other memory."""
    hand_over(rig)
    assert rig.store.num_write_opens == 3


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
