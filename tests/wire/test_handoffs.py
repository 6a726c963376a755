"""Hand-offs between a transfer table and a lease table over real data sockets and rings: what must work, offers, and garbage.

``rig`` (see conftest) has a prefill side, a decode side and a path for blocks. Its teardown checks the books. Wrong blocks are
tested in test_lease_lies, except those to which the path matters.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import zmq

from kvrelay.engine.kv.owners import Owner, OwnerKind
from kvrelay.wire.messages import Abort, FailureCode, Grant, Refuse

from .lease_bench import (
    BAD_PAYLOAD,
    BLOCK_NBYTES,
    NUM_TOKENS,
    TTL_S,
    WAIT_S,
    LeaseBench,
    offer_of,
)
from .rig import Rig

# -- what must work ----------------------------------------------------------------------------------------------------


def test_every_byte_arrives(rig: Rig) -> None:
    lease = rig.hand_over()
    rig.assert_holds(lease)
    assert lease.commit.first_token.token_id == 5
    assert rig.transfer_ends.verified == rig.transfer_ends.released == [("r", 1)]
    assert rig.transfer_ends.failed == []
    assert not +rig.source.reads
    # One open_write per block: a staging pool would give a second one other memory.
    assert rig.store.num_write_opens == rig.counted("kv_blocks_received") == 3
    assert rig.counted("kv_bytes_received") == 3 * BLOCK_NBYTES
    rig.senders[0].close()  # it counts a block after it has sent it
    assert rig.prefill_registry.get_sample_value("kvrelay_kv_blocks_sent_total", {"path": rig.path}) == 3
    assert rig.prefill_registry.get_sample_value("kvrelay_kv_bytes_sent_total", {"path": rig.path}) == 3 * BLOCK_NBYTES
    assert rig.prefill_registry.get_sample_value("kvrelay_handoffs_total", {"outcome": "verified"}) == 1
    assert rig.handoffs("verified") == 1
    assert rig.registry.get_sample_value("kvrelay_transfer_wait_seconds_count") == 1


def test_room_is_reserved_for_the_first_token_too(one_rig: Rig) -> None:
    lease = one_rig.hand_over(num_tokens=8)  # two full blocks: the ninth token needs a third
    assert (len(lease.offer.block_hashes), len(lease.block_tables[0])) == (2, 3)


def test_full_blocks_are_published_and_a_later_hand_off_does_not_send_them(one_rig: Rig) -> None:
    first = one_rig.hand_over()
    one_rig.manager.release(Owner(OwnerKind.LEASE, first.lease_key))
    second = one_rig.hand_over(request_id="again")
    assert second.block_tables[0][:2] == first.block_tables[0][:2]
    # The partial block is never published, so it is sent again.
    assert one_rig.counted("kv_blocks_received") == 4
    assert one_rig.counted("kv_blocks_reused") == 2
    one_rig.hand_over(num_tokens=8, request_id="cached as a whole")
    one_rig.senders[0].close()  # it counts a block after it has sent it
    assert one_rig.prefill_registry.get_sample_value("kvrelay_kv_blocks_sent_total", {"path": "tcp"}) == 4


def test_blocks_go_out_as_they_get_ready(rig: Rig) -> None:
    key, _ = rig.granted()
    rig.transfers.blocks_ready(key, 1)
    assert rig.next_block() == "ok"
    rig.transfers.blocks_ready(key, 1)  # the same report again sends no block
    rig.transfers.blocks_ready(key, 2)
    assert rig.next_block() == "ok"
    assert rig.ends.verified.empty()
    rig.complete(key)


def test_blocks_that_are_ready_before_the_grant_follow_it(one_rig: Rig) -> None:
    key = one_rig.open(offer_of(list(range(NUM_TOKENS))))
    one_rig.transfers.blocks_ready(key, 2)
    one_rig.commit(key)
    assert one_rig.table.seen.empty()
    one_rig.complete(key)


def test_a_commit_may_overtake_the_blocks_which_may_come_on_any_way(one_rig: Rig) -> None:
    lease = one_rig.leased()
    one_rig.table.commit("p", lease.commit())
    for index, path in ((2, "tcp"), (0, "shared_memory"), (1, "tcp")):
        one_rig.path = path
        one_rig.send(*lease.frames(index))
        assert one_rig.next_block() == "ok"
    one_rig.assert_verified(lease)


def test_hand_off_over_ipc(context: Any, tmp_path: Any) -> None:
    rig = Rig(context, f"ipc://{tmp_path}/kv")
    rig.hand_over()
    rig.close()
    assert list(tmp_path.iterdir()) == [], "a socket file stays behind"


def test_plain_and_sealed_leave_the_same_bytes_in_the_pool(rig: Rig, sealed_rig: Rig) -> None:
    for each in (rig, sealed_rig):
        each.assert_holds(each.hand_over())
        assert not +each.source.reads


# -- garbage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frames", [(b"junk",), (b"junk", b"payload"), (b"", b"", b"", b""), "a header alone"])
def test_garbage_is_counted_and_the_next_block_is_taken(one_rig: Rig, frames: Any) -> None:
    lease = one_rig.leased()
    one_rig.send(*(lease.frames(0)[:1] if isinstance(frames, str) else frames))
    assert one_rig.next_block() == "bad_header"
    assert one_rig.refused("bad_header") == 1
    one_rig.send(*lease.frames(0))
    assert one_rig.next_block() == "ok"
    assert one_rig.receiver.is_alive


def test_more_parts_than_two_are_no_block(one_rig: Rig) -> None:
    one_rig.send(*one_rig.leased().frames(0), b"more")
    assert one_rig.next_block() == "bad_size"
    one_rig.rejection()


def test_a_frame_beyond_the_bound_costs_its_sender_the_connection_only(one_rig: Rig) -> None:
    lease = one_rig.leased()
    with one_rig.context.socket(zmq.DEALER) as rogue:
        rogue.linger = 0
        monitor = rogue.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        rogue.connect(one_rig.receiver.address)
        rogue.send_multipart([lease.frames(0)[0], bytes(2**20)])
        assert monitor.poll(WAIT_S * 1000)
        rogue.disable_monitor()
        monitor.close(linger=0)
    one_rig.send(*lease.frames(0))
    assert one_rig.next_block() == "ok"


def test_the_same_blocks_over_both_ways_at_once(one_rig: Rig) -> None:
    """A sender fills one lease over TCP and shared memory. A block has one writer, and the lease ends after both writes."""
    rig = one_rig
    lease = rig.leased()
    rig.table.may_finish.clear()
    rig.send(*lease.frames(0))
    assert rig.table.inside.get(timeout=WAIT_S) == 0
    rig.path = "shared_memory"
    rig.send(*lease.frames(0, BAD_PAYLOAD))
    assert rig.next_block() == "duplicate"
    rig.send(*lease.frames(1))
    assert rig.table.inside.get(timeout=WAIT_S) == 1
    rig.table.abort_peer("p")
    assert [entry["state"] for entry in rig.table.snapshot()] == ["aborting"]
    rig.table.may_finish.set()
    assert [rig.next_block(), rig.next_block()] == ["ok", "ok"]
    assert rig.rejection().code is FailureCode.PEER_LOST
    rig.assert_all_free()


# -- offers ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def bench() -> LeaseBench:
    return LeaseBench()


GOOD = offer_of(list(range(NUM_TOKENS)))


@pytest.mark.parametrize(
    ("changes", "code", "outcome"),
    [
        ({"fingerprint": b"x" * 16}, FailureCode.LAYOUT_MISMATCH, "refused_fingerprint"),
        ({"block_hashes": [*GOOD.block_hashes[:2], b"?" * 16]}, FailureCode.INTEGRITY, "refused_hashes"),
        ({"block_hashes": GOOD.block_hashes[:2]}, FailureCode.INTEGRITY, "refused_hashes"),
        ({"block_hashes": [*GOOD.block_hashes, b"?" * 16]}, FailureCode.INTEGRITY, "refused_hashes"),
        ({"token_ids": [], "block_hashes": []}, FailureCode.INVALID, None),
        ({"token_ids": [-1], "block_hashes": [b"h" * 16]}, FailureCode.INVALID, None),
        ({"token_ids": [2**32], "block_hashes": [b"h" * 16]}, FailureCode.INVALID, None),
    ],
)
def test_an_offer_that_cannot_be_is_refused_not_raised(
    bench: LeaseBench, changes: dict[str, Any], code: FailureCode, outcome: str | None
) -> None:
    answer = bench.table.offer("p", msgspec.structs.replace(GOOD, **changes))
    assert isinstance(answer, Refuse)
    assert answer.code is code
    if outcome is not None:
        assert bench.handoffs(outcome) == 1
    bench.assert_all_free()


def test_no_room_is_refused_with_a_hint_when_to_come_again(bench: LeaseBench) -> None:
    answer = bench.table.offer("p", offer_of(list(range(16 * 4))))  # 17 blocks with the first token's
    assert isinstance(answer, Refuse)
    assert (answer.code, answer.retry_after_s) == (FailureCode.NO_ROOM, 0.5)
    assert bench.handoffs("refused_no_room") == 1
    bench.assert_all_free()


def test_the_same_attempt_twice_is_misuse(bench: LeaseBench) -> None:
    answer = bench.table.offer("p", bench.leased().offer)
    assert isinstance(answer, Refuse)
    assert answer.code is FailureCode.INVALID
    assert len(bench.table.snapshot()) == 1


def test_a_refusal_fails_the_transfer(one_rig: Rig) -> None:
    key = one_rig.open(offer_of(list(range(32 * 4))))
    one_rig.pump()
    one_rig.settle()
    assert one_rig.transfer_ends.failures == [FailureCode.NO_ROOM]
    assert one_rig.transfer_ends.released == [key]


def test_the_answers_of_another_worker_are_not_ours(one_rig: Rig) -> None:
    """A refusal and a grant come from a worker that got no offer. The refusal has no effect, and the grant is aborted."""
    key = one_rig.open(offer_of(list(range(NUM_TOKENS))))
    other_link, other_line = one_rig.new_link()
    refuse = Refuse(request_id="r", attempt=1, code=FailureCode.NO_ROOM, detail="late answer of a lost worker")
    late = Grant(request_id="r", attempt=1, lease_id=9, epoch=4, num_cached_blocks=0, ttl_s=TTL_S)
    for answer in (refuse, late):
        one_rig.transfers.on_message(other_link, answer)
    assert other_line.sent == [Abort(lease_id=9, epoch=4, reason="granted too late")]
    assert one_rig.transfer_ends.failed == []
    one_rig.pump()
    one_rig.complete(key)


@pytest.mark.parametrize(
    ("agreed", "key", "detail"),
    [
        (True, None, "agreed on sealed KV blocks, but granted no key"),
        (False, bytes(32), "agreed on plain KV blocks, but granted a key"),
        (True, bytes(16), "granted a key of 16 bytes; it must have 32"),
    ],
)
def test_nothing_is_shipped_under_a_grant_that_is_not_what_was_agreed(
    one_rig: Rig, agreed: bool, key: bytes | None, detail: str
) -> None:
    one_rig.seals_kv = agreed
    one_rig.link, one_rig.line = one_rig.new_link()
    request = one_rig.open(GOOD)
    one_rig.transfers.blocks_ready(request, 3)
    grant = Grant(request_id="r", attempt=1, lease_id=1, epoch=7, num_cached_blocks=0, ttl_s=1.0, seal_key=key)
    one_rig.transfers.on_message(one_rig.link, grant)
    assert one_rig.transfer_ends.failed == [(request, FailureCode.LAYOUT_MISMATCH, detail)]
    assert isinstance(one_rig.line.sent[-1], Abort)
    assert not +one_rig.source.reads
    one_rig.transfers.tick()
    assert one_rig.transfer_ends.released == [request]
