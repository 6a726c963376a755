"""Hand-offs between a transfer table and a lease table over real data sockets: what must work, and every way to lie.

``rig`` (see conftest) has a prefill side, a decode side and a data socket between them. Its teardown checks the books.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import zmq

from kvrelay.common.block_hash import HASH_NBYTES
from kvrelay.common.sampling import SampledToken
from kvrelay.engine.block_manager import Owner, OwnerKind
from kvrelay.wire.errors import BlockRefusedError
from kvrelay.wire.messages import Abort, Commit, FailureCode, Grant, Refuse, Renew, Timings

NUM_TOKENS = 10  # two full blocks and a partial one
BLOCK_NBYTES = 512
TTL_S = 30.0
WAIT_S = 10.0
BAD_PAYLOAD = b"\xee" * BLOCK_NBYTES


def content_of(block_hash: bytes) -> bytes:
    return block_hash * (BLOCK_NBYTES // HASH_NBYTES)


def hand_over(rig: Any, num_tokens: int = NUM_TOKENS, request_id: str = "r") -> Any:
    """A whole hand-off; returns the verified lease, whose blocks are still leased."""
    key, _ = rig.granted(num_tokens, request_id)
    rig.commit(key)
    rig.pump()
    lease = rig.verdict()
    rig.settle()
    return lease


def send_raw(rig: Any, *frames: bytes) -> None:
    """Frames as any peer might send them."""
    with rig.context.socket(zmq.DEALER) as socket:
        socket.linger = 1000
        socket.connect(rig.receiver.address)
        socket.send_multipart(frames)


def offer_for(rig: Any, num_tokens: int = NUM_TOKENS) -> tuple[Any, Any]:
    """A granted lease without a transfer: the test plays the sender."""
    offer = rig.offer_of(list(range(num_tokens)))
    grant = rig.leases.offer("p", offer)
    assert isinstance(grant, Grant)
    return offer, grant


def send_block(rig: Any, offer: Any, grant: Any, index: int, payload: bytes | None = None) -> None:
    """A right block, or a right header in front of another payload of the header's making."""
    right = content_of(offer.block_hashes[index])
    packed = rig.header(grant, offer, index).pack(memoryview(right))
    send_raw(rig, packed, right if payload is None else payload)


def commit_of(offer: Any, grant: Any, **changes: Any) -> Commit:
    commit = Commit(
        lease_id=grant.lease_id,
        epoch=grant.epoch,
        chain_hash=offer.block_hashes[-1],
        first_token=SampledToken(1),
        num_cached_tokens=0,
        timings=Timings(),
    )
    return msgspec.structs.replace(commit, **changes)


# -- what must work ----------------------------------------------------------------------------------------------------


def test_every_byte_arrives(rig: Any) -> None:
    lease = hand_over(rig)
    for block_id, block_hash in zip(lease.block_ids, lease.offer.block_hashes, strict=True):
        assert bytes(rig.store.block(block_id)) == content_of(block_hash)
    assert lease.commit.first_token.token_id == 5
    assert rig.transfer_ends.verified == rig.transfer_ends.released == [("r", 1)]
    assert rig.transfer_ends.failed == []
    assert not +rig.source.reads
    assert rig.registry.get_sample_value("kvrelay_kv_blocks_received_total") == 3
    assert rig.registry.get_sample_value("kvrelay_kv_bytes_received_total") == 3 * BLOCK_NBYTES
    assert rig.prefill_registry.get_sample_value("kvrelay_kv_blocks_sent_total") == 3
    assert rig.prefill_registry.get_sample_value("kvrelay_kv_bytes_sent_total") == 3 * BLOCK_NBYTES
    assert rig.prefill_registry.get_sample_value("kvrelay_handoffs_total", {"outcome": "verified"}) == 1
    assert rig.handoffs("verified") == 1
    assert rig.registry.get_sample_value("kvrelay_transfer_wait_seconds_count") == 1


def test_room_is_reserved_for_the_first_token_too(rig: Any) -> None:
    lease = hand_over(rig, num_tokens=8)  # two full blocks: the ninth token needs a third
    assert (len(lease.offer.block_hashes), len(lease.block_ids)) == (2, 3)


def test_full_blocks_are_published_and_a_later_hand_off_does_not_send_them(rig: Any) -> None:
    first = hand_over(rig)
    rig.manager.release(Owner(OwnerKind.LEASE, first.lease_key))
    second = hand_over(rig, request_id="again")
    assert second.block_ids[:2] == first.block_ids[:2]
    # The partial block is never published, so it is sent again.
    assert rig.registry.get_sample_value("kvrelay_kv_blocks_received_total") == 4
    assert rig.registry.get_sample_value("kvrelay_kv_blocks_reused_total") == 2
    assert rig.prefill_registry.get_sample_value("kvrelay_kv_blocks_sent_total") == 4


def test_a_prompt_that_is_cached_as_a_whole_ships_nothing(rig: Any) -> None:
    hand_over(rig, num_tokens=8)
    hand_over(rig, num_tokens=8, request_id="again")
    assert rig.registry.get_sample_value("kvrelay_kv_blocks_received_total") == 2


def test_blocks_go_out_as_they_get_ready(rig: Any) -> None:
    key, _ = rig.granted(NUM_TOKENS)
    rig.transfers.blocks_ready(key, 1)
    assert rig.next_block() == "ok"
    rig.transfers.blocks_ready(key, 1)  # said twice, sent once
    rig.transfers.blocks_ready(key, 2)
    assert rig.next_block() == "ok"
    assert rig.lease_ends.verified.empty()
    rig.commit(key)
    rig.pump()
    rig.verdict()
    rig.settle()


def test_blocks_that_are_ready_before_the_grant_follow_it(rig: Any) -> None:
    key = rig.open(rig.offer_of(list(range(NUM_TOKENS))))
    rig.transfers.blocks_ready(key, 2)
    rig.commit(key)
    assert rig.leases.seen.empty()
    rig.pump()
    rig.verdict()
    rig.settle()


def test_a_commit_may_overtake_the_blocks(rig: Any) -> None:
    offer, grant = offer_for(rig)
    rig.leases.commit("p", commit_of(offer, grant))
    for index in (2, 0, 1):
        send_block(rig, offer, grant, index)
        assert rig.next_block() == "ok"
    assert rig.lease_ends.verified.get(timeout=WAIT_S).offer is offer


def test_hand_off_over_ipc(context: Any, tmp_path: Any, rig: Any) -> None:
    other = type(rig)(context, f"ipc://{tmp_path}/kv")
    hand_over(other)
    other.close()
    assert list(tmp_path.iterdir()) == [], "a socket file stays behind"


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
def test_a_size_that_is_not_what_was_announced_ends_the_lease_and_spills_nowhere(rig: Any, nbytes: int) -> None:
    offer, grant = offer_for(rig)
    before = [bytes(rig.store.block(block_id)) for block_id in range(rig.store.num_blocks)]
    payload = bytes(BLOCK_NBYTES * 2)[:nbytes]
    packed = rig.header(grant, offer, 0).pack(memoryview(payload))
    send_raw(rig, packed, payload)
    assert rig.next_block() == "bad_size"
    assert rig.rejection().code is FailureCode.INTEGRITY
    assert rig.refused("bad_size") == 1
    assert [bytes(rig.store.block(block_id)) for block_id in range(rig.store.num_blocks)] == before


def test_an_announced_size_that_is_no_block_is_refused_before_the_write(rig: Any) -> None:
    offer, grant = offer_for(rig)
    payload = bytes(8)
    send_raw(rig, rig.header(grant, offer, 0, payload_nbytes=8).pack(memoryview(payload)), payload)
    assert rig.next_block() == "bad_size"
    rig.rejection()
    assert rig.store.num_write_opens == 0


def test_more_parts_than_two_are_no_block(rig: Any) -> None:
    offer, grant = offer_for(rig)
    payload = content_of(offer.block_hashes[0])
    send_raw(rig, rig.header(grant, offer, 0).pack(memoryview(payload)), payload, b"more")
    assert rig.next_block() == "bad_size"
    rig.rejection()


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
def test_garbage_is_counted_and_the_next_block_is_taken(rig: Any, frames: tuple[bytes, ...]) -> None:
    offer, grant = offer_for(rig)
    send_raw(rig, *frames)
    assert rig.next_block() == "bad_header"
    assert rig.refused("bad_header") == 1
    send_block(rig, offer, grant, 0)
    assert rig.next_block() == "ok"
    assert rig.receiver.is_alive


def test_a_header_without_a_payload_is_no_block(rig: Any) -> None:
    offer, grant = offer_for(rig)
    send_raw(rig, rig.header(grant, offer, 0).pack(memoryview(b"")))
    assert rig.next_block() == "bad_header"
    assert len(rig.leases.snapshot()) == 1


def test_a_frame_beyond_the_bound_costs_its_sender_the_connection_only(rig: Any) -> None:
    offer, grant = offer_for(rig)
    packed = rig.header(grant, offer, 0).pack(memoryview(b""))
    with rig.context.socket(zmq.DEALER) as rogue:
        rogue.linger = 0
        monitor = rogue.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        rogue.connect(rig.receiver.address)
        rogue.send_multipart([packed, bytes(2**20)])
        assert monitor.poll(WAIT_S * 1000)
        rogue.disable_monitor()
        monitor.close(linger=0)
    send_block(rig, offer, grant, 0)
    assert rig.next_block() == "ok"


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


# -- offers ----------------------------------------------------------------------------------------------------------------


def test_another_fingerprint_is_refused(rig: Any) -> None:
    offer = msgspec.structs.replace(rig.offer_of([1, 2, 3]), fingerprint=b"x" * 16)
    answer = rig.leases.offer("p", offer)
    assert isinstance(answer, Refuse)
    assert answer.code is FailureCode.LAYOUT_MISMATCH
    assert rig.handoffs("refused_fingerprint") == 1


def test_hashes_that_are_not_the_tokens_are_refused(rig: Any) -> None:
    offer = rig.offer_of(list(range(NUM_TOKENS)))
    for hashes in ([*offer.block_hashes[:2], b"?" * 16], offer.block_hashes[:2], [*offer.block_hashes, b"?" * 16]):
        answer = rig.leases.offer("p", msgspec.structs.replace(offer, block_hashes=hashes))
        assert isinstance(answer, Refuse)
        assert answer.code is FailureCode.INTEGRITY
    assert rig.handoffs("refused_hashes") == 3


@pytest.mark.parametrize("token_ids", [[], [-1], [2**32]])
def test_tokens_that_cannot_be_are_refused_not_raised(rig: Any, token_ids: list[int]) -> None:
    offer = msgspec.structs.replace(rig.offer_of([1]), token_ids=token_ids, block_hashes=[b"h" * 16] * bool(token_ids))
    answer = rig.leases.offer("p", offer)
    assert isinstance(answer, Refuse)
    assert answer.code is FailureCode.INVALID
    rig.assert_all_free()


def test_no_room_is_refused_with_a_hint_when_to_come_again(rig: Any) -> None:
    answer = rig.leases.offer("p", rig.offer_of(list(range(32 * 4))))  # 33 blocks with the first token's
    assert isinstance(answer, Refuse)
    assert (answer.code, answer.retry_after_s) == (FailureCode.NO_ROOM, 0.5)
    assert rig.handoffs("refused_no_room") == 1
    rig.assert_all_free()


def test_the_same_attempt_twice_is_misuse(rig: Any) -> None:
    offer, _ = offer_for(rig)
    answer = rig.leases.offer("p", offer)
    assert isinstance(answer, Refuse)
    assert answer.code is FailureCode.INVALID
    assert len(rig.leases.snapshot()) == 1


def test_a_refusal_fails_the_transfer(rig: Any) -> None:
    key = rig.open(rig.offer_of(list(range(32 * 4))))
    rig.pump()
    rig.settle()
    assert [(k, code) for k, code, _ in rig.transfer_ends.failed] == [(key, FailureCode.NO_ROOM)]
    assert rig.transfer_ends.released == [key]


def test_another_workers_refusal_is_not_ours(rig: Any) -> None:
    key = rig.open(rig.offer_of(list(range(NUM_TOKENS))))
    other_link, _ = rig.new_link()
    refuse = Refuse(request_id="r", attempt=1, code=FailureCode.NO_ROOM, detail="late answer of a lost worker")
    rig.transfers.on_message(other_link, refuse)
    assert rig.transfer_ends.failed == []
    rig.pump()
    rig.commit(key)
    rig.pump()
    rig.verdict()
    rig.settle()


def test_a_grant_of_another_worker_is_given_back_to_it(rig: Any) -> None:
    rig.open(rig.offer_of(list(range(NUM_TOKENS))))
    other_link, other_line = rig.new_link()
    late = Grant(request_id="r", attempt=1, lease_id=9, epoch=4, num_cached_blocks=0, ttl_s=TTL_S)
    rig.transfers.on_message(other_link, late)
    assert [(type(message), message.lease_id, message.epoch) for message in other_line.sent] == [(Abort, 9, 4)]
    rig.pump()
    rig.commit(("r", 1))
    rig.pump()
    rig.verdict()
    rig.settle()


# -- the sender gives up ---------------------------------------------------------------------------------------------------


def test_abort_before_the_grant_frees_the_lease_that_comes_late(rig: Any) -> None:
    key = rig.open(rig.offer_of(list(range(NUM_TOKENS))))
    rig.transfers.abort(key, "test")
    rig.settle()
    assert rig.transfer_ends.released == [key]
    rig.pump()  # the offer is granted now; the answer to that is an abort, which the same pump delivers
    assert rig.rejection().code is FailureCode.CANCELLED
    rig.assert_all_free()


@pytest.mark.parametrize("num_ready", [0, 2])
def test_abort_while_granted_or_shipping(rig: Any, num_ready: int) -> None:
    key, _ = rig.granted(NUM_TOKENS)
    rig.transfers.blocks_ready(key, num_ready)
    for _ in range(num_ready):
        assert rig.next_block() == "ok"
    rig.transfers.abort(key, "test")
    rig.pump()
    assert rig.rejection().code is FailureCode.CANCELLED
    rig.settle()
    rig.assert_all_free()
    assert rig.transfer_ends.released == [key]
    assert rig.transfer_ends.failed == []
    assert not +rig.source.reads


def test_abort_after_the_commit_and_after_the_verdict_is_harmless(rig: Any) -> None:
    key, _ = rig.granted(NUM_TOKENS)
    rig.commit(key)
    rig.pump()
    lease = rig.lease_ends.verified.get(timeout=WAIT_S)
    rig.transfers.abort(key, "test")  # COMMITTED here, VERIFIED there
    rig.pump()
    rig.settle()
    rig.transfers.abort(key, "test")  # gone
    assert rig.transfer_ends.released == [key]
    assert rig.lease_ends.rejected.empty()
    assert len(rig.manager.owned_blocks(Owner(OwnerKind.LEASE, lease.lease_key))) == 3


def test_an_abort_of_another_epoch_is_void(rig: Any) -> None:
    """Lease ids start anew with every process: an abort meant for the process before must not hit this one's lease."""
    offer, grant = offer_for(rig)
    rig.leases.abort("p", Abort(lease_id=grant.lease_id, epoch=grant.epoch - 1, reason="stale"))
    assert len(rig.leases.snapshot()) == 1
    send_block(rig, offer, grant, 0)
    assert rig.next_block() == "ok"


def test_blocks_are_not_reused_while_zmq_may_still_read_them(rig: Any) -> None:
    link, line = rig.new_link("tcp://127.0.0.1:9")  # nobody is there: what is sent stays queued
    offer = rig.offer_of(list(range(NUM_TOKENS)))
    rig.transfers.open(("r", 1), link, offer, rig.fill(offer))
    rig.transfers.on_message(
        link, Grant(request_id="r", attempt=1, lease_id=1, epoch=7, num_cached_blocks=0, ttl_s=TTL_S)
    )
    rig.commit(("r", 1))
    rig.transfers.abort(("r", 1), "test")
    rig.transfers.tick()
    assert rig.transfer_ends.released == []
    assert +rig.source.reads
    assert isinstance(line.sent[-1], Abort)
    rig.senders[-1].close()
    rig.settle()
    assert rig.transfer_ends.released == [("r", 1)]
    assert not +rig.source.reads


# -- the receiver gives up -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancel", "abort", "abort_peer", "reap"])
def test_blocks_stay_leased_until_the_writer_is_out(rig: Any, how: str) -> None:
    offer, grant = offer_for(rig)
    rig.leases.may_finish.clear()
    send_block(rig, offer, grant, 0)
    assert rig.leases.inside.get(timeout=WAIT_S) == 0
    match how:
        case "cancel":
            rig.leases.cancel("r", 1)
        case "abort":
            rig.leases.abort("p", Abort(lease_id=grant.lease_id, epoch=grant.epoch, reason="test"))
        case "abort_peer":
            rig.leases.abort_peer("p")
        case _:
            rig.clock.now_s += TTL_S
            rig.leases.reap()
    assert rig.leases.snapshot()[0]["state"] == "aborting"
    assert rig.lease_ends.rejected.empty()
    assert rig.manager.ledger().num_leased == 3
    rig.leases.may_finish.set()
    expected = {"abort_peer": FailureCode.PEER_LOST, "reap": FailureCode.LEASE_EXPIRED}
    assert rig.rejection().code is expected.get(how, FailureCode.CANCELLED)
    assert rig.next_block() == "ok"
    rig.assert_all_free()
    assert rig.lease_ends.rejected.empty(), "told twice"


def test_a_lease_that_is_aborting_takes_no_more_blocks(rig: Any) -> None:
    offer, grant = offer_for(rig)
    rig.leases.may_finish.clear()
    send_block(rig, offer, grant, 0)
    assert rig.leases.inside.get(timeout=WAIT_S) == 0
    rig.leases.cancel("r", 1)
    with pytest.raises(BlockRefusedError, match="not live"):
        rig.leases.begin_block(rig.header(grant, offer, 1))
    rig.leases.may_finish.set()
    rig.rejection()
    assert {rig.next_block(), rig.next_block()} == {"unknown_lease", "ok"}
    rig.assert_all_free()


def test_the_handler_hears_of_the_end_without_the_lock_held(rig: Any) -> None:
    offer_for(rig)
    done = threading.Event()

    def on_rejected(*args: Any) -> None:
        thread = threading.Thread(target=rig.leases.snapshot)
        thread.start()
        thread.join(WAIT_S)
        if not thread.is_alive():
            done.set()

    rig.lease_ends.on_lease_rejected = on_rejected
    rig.leases.cancel("r", 1)
    assert done.is_set()


def test_cancel_and_abort_peer_hit_nobody_else(rig: Any) -> None:
    offer_for(rig)
    rig.leases.cancel("r", 2)
    rig.leases.abort_peer("q")
    assert len(rig.leases.snapshot()) == 1


def test_traffic_and_renewals_put_the_end_off(rig: Any) -> None:
    offer, grant = offer_for(rig)
    for step in (
        lambda: (send_block(rig, offer, grant, 0), rig.next_block()),
        lambda: rig.leases.renew("p", Renew(lease_id=grant.lease_id, epoch=grant.epoch)),
        lambda: rig.leases.commit("p", commit_of(offer, grant)),
    ):
        rig.clock.now_s += TTL_S - 1
        step()
        rig.leases.reap()
        assert rig.leases.snapshot()[0]["expires_in_s"] == TTL_S
    rig.leases.renew("p", Renew(lease_id=grant.lease_id, epoch=grant.epoch - 1))  # of another epoch: void
    rig.clock.now_s += TTL_S
    rig.leases.reap()
    assert rig.rejection().code is FailureCode.LEASE_EXPIRED
    assert rig.handoffs("lease_expired") == 1
    rig.assert_all_free()


def test_a_block_for_an_expired_lease_finds_nothing(rig: Any) -> None:
    offer, grant = offer_for(rig)
    rig.clock.now_s += TTL_S
    rig.leases.reap()
    send_block(rig, offer, grant, 0)
    assert rig.next_block() == "unknown_lease"
    rig.assert_all_free()


# -- silence and death -----------------------------------------------------------------------------------------------------


def test_no_answer_to_an_offer(rig: Any) -> None:
    key = rig.open(rig.offer_of(list(range(NUM_TOKENS))))
    rig.clock.now_s += 10.1
    rig.transfers.tick()
    rig.transfers.tick()
    assert [(k, code) for k, code, _ in rig.transfer_ends.failed] == [(key, FailureCode.PEER_LOST)]
    assert rig.transfer_ends.released == [key]


def test_no_verdict_on_a_commit(rig: Any) -> None:
    key, _ = rig.granted(NUM_TOKENS)
    rig.commit(key)
    rig.clock.now_s += 30.1
    rig.wait_sent()
    rig.transfers.tick()
    rig.transfers.tick()
    assert [code for _, code, _ in rig.transfer_ends.failed] == [FailureCode.PEER_LOST]
    assert rig.transfer_ends.released == [key]
    assert isinstance(rig.line.sent[-1], Abort)


def test_granted_leases_are_renewed_while_the_prompt_computes(rig: Any) -> None:
    _, grant = rig.granted(NUM_TOKENS)
    for _ in range(3):
        rig.clock.now_s += TTL_S / 3 + 0.1
        rig.transfers.tick()
        rig.transfers.tick()
        assert rig.line.sent == [Renew(lease_id=grant.lease_id, epoch=grant.epoch)]
        rig.line.sent.clear()


def test_a_lost_link_fails_its_transfers_and_gives_their_blocks_back(rig: Any) -> None:
    key, _ = rig.granted(NUM_TOKENS)
    rig.transfers.blocks_ready(key, 2)
    rig.senders[0].close()
    rig.transfers.on_link_lost(rig.link)
    rig.settle()
    assert [code for _, code, _ in rig.transfer_ends.failed] == [FailureCode.PEER_LOST]
    assert rig.transfer_ends.released == [key]
    assert not +rig.source.reads
    rig.transfers.blocks_ready(key, 3)  # the model thread is not told at once
    rig.commit(key)


def test_an_offer_on_a_link_that_is_down_fails_at_once(rig: Any) -> None:
    rig.line.is_up = False
    key = rig.open(rig.offer_of([1]))
    rig.settle()
    assert [code for _, code, _ in rig.transfer_ends.failed] == [FailureCode.PEER_LOST]
    assert rig.transfer_ends.released == [key]


def test_a_transfer_cannot_be_open_twice(rig: Any) -> None:
    offer = rig.offer_of([1])
    rig.open(offer)
    with pytest.raises(ValueError, match="already open"):
        rig.transfers.open(("r", 1), rig.link, offer, [0])


def test_blocks_that_do_not_fit_the_offer_are_misuse(rig: Any) -> None:
    with pytest.raises(ValueError, match="2 blocks"):
        rig.transfers.open(("r", 1), rig.link, rig.offer_of([1]), [0, 1])
    assert rig.line.sent == []


def test_an_answer_of_the_wrong_kind_raises(rig: Any) -> None:
    with pytest.raises(ValueError, match="Renew is not an answer"):
        rig.transfers.on_message(rig.link, Renew(lease_id=1, epoch=1))


def test_a_tampered_header_of_a_real_transfer_rejects_and_fails_it(rig: Any) -> None:
    key, grant = rig.granted(NUM_TOKENS)
    offer = rig.offer_of(list(range(NUM_TOKENS)))
    payload = memoryview(content_of(offer.block_hashes[0]))
    header = replace(rig.header(grant, offer, 0), block_hash=b"?" * 16)
    rig.link.data.send(header, payload)
    assert rig.next_block() == "wrong_block"
    rig.rejection()
    rig.settle()
    assert [(k, code) for k, code, _ in rig.transfer_ends.failed] == [(key, FailureCode.INTEGRITY)]
    assert rig.transfer_ends.released == [key]


def test_nobody_speaks_for_another_workers_hand_off(rig: Any) -> None:
    offer = rig.offer_of(list(range(NUM_TOKENS)))
    grant = rig.leases.offer("p", offer)
    rig.leases.abort("another", Abort(lease_id=grant.lease_id, epoch=grant.epoch, reason="test"))
    rig.leases.commit("another", commit_of(offer, grant))
    assert [lease["state"] for lease in rig.leases.snapshot()] == ["granted"]
    rig.leases.abort("p", Abort(lease_id=grant.lease_id, epoch=grant.epoch, reason="test"))
    assert rig.leases.snapshot() == []
    rig.manager.check_integrity()
