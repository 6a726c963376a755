"""Hand-offs between a transfer table and a lease table over real data sockets: what must work, and what is offered.

``rig`` (see conftest) has a prefill side, a decode side and a data socket between them. Its teardown checks the books.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvrelay.engine.block_manager import Owner, OwnerKind
from kvrelay.wire.messages import Abort, FailureCode, Grant, Refuse

from .handoffs import NUM_TOKENS, commit_of, hand_over, offer_for, send_block
from .rig import BLOCK_NBYTES, TTL_S, WAIT_S, content_of

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
    assert rig.prefill_registry.get_sample_value("kvrelay_kv_blocks_sent_total", {"path": rig.path}) == 3
    assert rig.prefill_registry.get_sample_value("kvrelay_kv_bytes_sent_total", {"path": rig.path}) == 3 * BLOCK_NBYTES
    assert rig.prefill_registry.get_sample_value("kvrelay_handoffs_total", {"outcome": "verified"}) == 1
    assert rig.handoffs("verified") == 1
    assert rig.registry.get_sample_value("kvrelay_transfer_wait_seconds_count") == 1


def test_room_is_reserved_for_the_first_token_too(one_rig: Any) -> None:
    lease = hand_over(one_rig, num_tokens=8)  # two full blocks: the ninth token needs a third
    assert (len(lease.offer.block_hashes), len(lease.block_ids)) == (2, 3)


def test_full_blocks_are_published_and_a_later_hand_off_does_not_send_them(rig: Any) -> None:
    first = hand_over(rig)
    rig.manager.release(Owner(OwnerKind.LEASE, first.lease_key))
    second = hand_over(rig, request_id="again")
    assert second.block_ids[:2] == first.block_ids[:2]
    # The partial block is never published, so it is sent again.
    assert rig.registry.get_sample_value("kvrelay_kv_blocks_received_total") == 4
    assert rig.registry.get_sample_value("kvrelay_kv_blocks_reused_total") == 2
    assert rig.prefill_registry.get_sample_value("kvrelay_kv_blocks_sent_total", {"path": rig.path}) == 4


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


def test_hand_off_over_ipc(context: Any, tmp_path: Any, tcp_rig: Any) -> None:
    other = type(tcp_rig)(context, f"ipc://{tmp_path}/kv")
    hand_over(other)
    other.close()
    assert list(tmp_path.iterdir()) == [], "a socket file stays behind"


# -- offers ----------------------------------------------------------------------------------------------------------------


def test_another_fingerprint_is_refused(one_rig: Any) -> None:
    offer = msgspec.structs.replace(one_rig.offer_of([1, 2, 3]), fingerprint=b"x" * 16)
    answer = one_rig.leases.offer("p", offer)
    assert isinstance(answer, Refuse)
    assert answer.code is FailureCode.LAYOUT_MISMATCH
    assert one_rig.handoffs("refused_fingerprint") == 1


def test_hashes_that_are_not_the_tokens_are_refused(one_rig: Any) -> None:
    offer = one_rig.offer_of(list(range(NUM_TOKENS)))
    for hashes in ([*offer.block_hashes[:2], b"?" * 16], offer.block_hashes[:2], [*offer.block_hashes, b"?" * 16]):
        answer = one_rig.leases.offer("p", msgspec.structs.replace(offer, block_hashes=hashes))
        assert isinstance(answer, Refuse)
        assert answer.code is FailureCode.INTEGRITY
    assert one_rig.handoffs("refused_hashes") == 3


@pytest.mark.parametrize("token_ids", [[], [-1], [2**32]])
def test_tokens_that_cannot_be_are_refused_not_raised(one_rig: Any, token_ids: list[int]) -> None:
    offer = msgspec.structs.replace(
        one_rig.offer_of([1]), token_ids=token_ids, block_hashes=[b"h" * 16] * bool(token_ids)
    )
    answer = one_rig.leases.offer("p", offer)
    assert isinstance(answer, Refuse)
    assert answer.code is FailureCode.INVALID
    one_rig.assert_all_free()


def test_no_room_is_refused_with_a_hint_when_to_come_again(one_rig: Any) -> None:
    answer = one_rig.leases.offer("p", one_rig.offer_of(list(range(32 * 4))))  # 33 blocks with the first token's
    assert isinstance(answer, Refuse)
    assert (answer.code, answer.retry_after_s) == (FailureCode.NO_ROOM, 0.5)
    assert one_rig.handoffs("refused_no_room") == 1
    one_rig.assert_all_free()


def test_the_same_attempt_twice_is_misuse(one_rig: Any) -> None:
    offer, _ = offer_for(one_rig)
    answer = one_rig.leases.offer("p", offer)
    assert isinstance(answer, Refuse)
    assert answer.code is FailureCode.INVALID
    assert len(one_rig.leases.snapshot()) == 1


def test_a_refusal_fails_the_transfer(one_rig: Any) -> None:
    key = one_rig.open(one_rig.offer_of(list(range(32 * 4))))
    one_rig.pump()
    one_rig.settle()
    assert [(k, code) for k, code, _ in one_rig.transfer_ends.failed] == [(key, FailureCode.NO_ROOM)]
    assert one_rig.transfer_ends.released == [key]


def test_another_workers_refusal_is_not_ours(one_rig: Any) -> None:
    key = one_rig.open(one_rig.offer_of(list(range(NUM_TOKENS))))
    other_link, _ = one_rig.new_link()
    refuse = Refuse(request_id="r", attempt=1, code=FailureCode.NO_ROOM, detail="late answer of a lost worker")
    one_rig.transfers.on_message(other_link, refuse)
    assert one_rig.transfer_ends.failed == []
    one_rig.pump()
    one_rig.commit(key)
    one_rig.pump()
    one_rig.verdict()
    one_rig.settle()


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
