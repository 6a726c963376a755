"""Hand-offs that end early, over real data sockets: either side gives up, falls silent or dies, and every block comes back."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvrelay.engine.block_manager import Owner, OwnerKind
from kvrelay.wire.block_frames import BlockHeader
from kvrelay.wire.block_sender import BlockSender
from kvrelay.wire.errors import BlockRefusedError
from kvrelay.wire.messages import Abort, FailureCode, Grant, Renew
from kvrelay.wire.seal import BlockSealer
from kvrelay.wire.send_job import SendTicket

from .handoffs import NUM_TOKENS, commit_of, offer_for, send_block
from .rig import TTL_S, WAIT_S, content_of


def await_taken(sender: BlockSender) -> None:
    """Until ZeroMQ has every block that was queued."""
    deadline_s = time.monotonic() + WAIT_S
    while not sender._jobs.is_empty:
        assert time.monotonic() < deadline_s, "blocks that never leave the queue"
        time.sleep(0.001)


# -- the sender gives up ---------------------------------------------------------------------------------------------------


def test_abort_before_the_grant_frees_the_lease_that_comes_late(one_rig: Any) -> None:
    key = one_rig.open(one_rig.offer_of(list(range(NUM_TOKENS))))
    one_rig.transfers.abort(key, "test")
    one_rig.settle()
    assert one_rig.transfer_ends.released == [key]
    one_rig.pump()  # the offer is granted now; the answer to that is an abort, which the same pump delivers
    assert one_rig.rejection().code is FailureCode.CANCELLED
    one_rig.assert_all_free()


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


def test_an_abort_of_another_epoch_is_void(one_rig: Any) -> None:
    """Lease ids start anew with every process: an abort meant for the process before must not hit this one's lease."""
    offer, grant = offer_for(one_rig)
    one_rig.leases.abort("p", Abort(lease_id=grant.lease_id, epoch=grant.epoch - 1, reason="stale"))
    assert len(one_rig.leases.snapshot()) == 1
    send_block(one_rig, offer, grant, 0)
    assert one_rig.next_block() == "ok"


def test_blocks_are_not_reused_while_zmq_may_still_read_them(rig: Any) -> None:
    rig.num_sockets = 1  # one of several lines takes nothing before it is connected
    link, line = rig.new_link("tcp://127.0.0.1:9")  # nobody is there: what is sent stays queued
    offer = rig.offer_of(list(range(NUM_TOKENS)))
    rig.transfers.open(("r", 1), link, offer, rig.fill(offer))
    rig.transfers.on_message(
        link, Grant(request_id="r", attempt=1, lease_id=1, epoch=7, num_cached_blocks=0, ttl_s=TTL_S)
    )
    rig.commit(("r", 1))
    await_taken(rig.senders[-1])
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


def test_cancel_and_abort_peer_hit_nobody_else(one_rig: Any) -> None:
    offer_for(one_rig)
    one_rig.leases.cancel("r", 2)
    one_rig.leases.abort_peer("q")
    assert len(one_rig.leases.snapshot()) == 1


def test_traffic_and_renewals_put_the_end_off(one_rig: Any) -> None:
    offer, grant = offer_for(one_rig)
    for step in (
        lambda: (send_block(one_rig, offer, grant, 0), one_rig.next_block()),
        lambda: one_rig.leases.renew("p", Renew(lease_id=grant.lease_id, epoch=grant.epoch)),
        lambda: one_rig.leases.commit("p", commit_of(offer, grant)),
    ):
        one_rig.clock.now_s += TTL_S - 1
        step()
        one_rig.leases.reap()
        assert one_rig.leases.snapshot()[0]["expires_in_s"] == TTL_S
    one_rig.leases.renew("p", Renew(lease_id=grant.lease_id, epoch=grant.epoch - 1))  # of another epoch: void
    one_rig.clock.now_s += TTL_S
    one_rig.leases.reap()
    assert one_rig.rejection().code is FailureCode.LEASE_EXPIRED
    assert one_rig.handoffs("lease_expired") == 1
    one_rig.assert_all_free()


def test_a_block_for_an_expired_lease_finds_nothing(rig: Any) -> None:
    offer, grant = offer_for(rig)
    rig.clock.now_s += TTL_S
    rig.leases.reap()
    send_block(rig, offer, grant, 0)
    assert rig.next_block() == "unknown_lease"
    rig.assert_all_free()


# -- silence and death -----------------------------------------------------------------------------------------------------


def test_no_answer_to_an_offer(one_rig: Any) -> None:
    key = one_rig.open(one_rig.offer_of(list(range(NUM_TOKENS))))
    one_rig.clock.now_s += 10.1
    one_rig.transfers.tick()
    one_rig.transfers.tick()
    assert [(k, code) for k, code, _ in one_rig.transfer_ends.failed] == [(key, FailureCode.PEER_LOST)]
    assert one_rig.transfer_ends.released == [key]


def test_no_verdict_on_a_commit(rig: Any) -> None:
    key, _ = rig.granted(NUM_TOKENS)
    rig.commit(key)
    rig.wait_sent()
    rig.transfers.tick()
    rig.clock.now_s += 30.1
    rig.transfers.tick()
    rig.transfers.tick()
    assert [code for _, code, _ in rig.transfer_ends.failed] == [FailureCode.PEER_LOST]
    assert rig.transfer_ends.released == [key]
    assert isinstance(rig.line.sent[-1], Abort)
    assert not rig.link.data.is_alive, "a way for blocks that seems to lead nowhere, and is kept"


def test_as_long_as_blocks_leave_a_verdict_is_waited_for(rig: Any) -> None:
    """However long a slow network takes; only silence is a reason to give up."""
    key, _ = rig.granted(NUM_TOKENS)
    rig.commit(key)
    rig.wait_sent()
    rig.clock.now_s += 29.0
    rig.transfers.tick()  # sees that they have left
    rig.clock.now_s += 29.0
    rig.transfers.tick()
    assert rig.transfer_ends.failed == []
    rig.clock.now_s += 2.0
    rig.transfers.tick()
    assert [code for _, code, _ in rig.transfer_ends.failed] == [FailureCode.PEER_LOST]
    rig.settle()
    assert rig.transfer_ends.released == [key]


def test_a_ticket_can_be_called_off_until_it_is_taken() -> None:
    waiting, taken = SendTicket(), SendTicket()
    assert taken.take()
    for ticket in (waiting, taken):
        ticket.call_off()
    assert waiting.is_done
    assert not waiting.take()
    assert not taken.is_done


class Queue:
    """A block sender whose thread is busy with others' gigabytes."""

    def __init__(self) -> None:
        self.tickets: list[SendTicket] = []
        self.is_given_up = False

    def send(self, header: BlockHeader, payload: memoryview, sealer: BlockSealer | None) -> SendTicket:
        self.tickets.append(SendTicket())
        return self.tickets[-1]

    def give_up(self) -> None:
        self.is_given_up = True


def test_blocks_that_are_still_queued_come_back_at_once(rig: Any) -> None:
    link, _ = rig.new_link("tcp://127.0.0.1:9")
    queue = Queue()
    busy = replace(link, data=queue)
    offer = rig.offer_of(list(range(NUM_TOKENS)))
    rig.transfers.open(("r", 1), busy, offer, rig.fill(offer))
    grant = Grant(request_id="r", attempt=1, lease_id=1, epoch=7, num_cached_blocks=0, ttl_s=TTL_S)
    rig.transfers.on_message(busy, grant)
    rig.commit(("r", 1))
    assert queue.tickets[0].take()
    rig.transfers.abort(("r", 1), "test")
    rig.transfers.tick()
    assert [ticket.is_done for ticket in queue.tickets] == [False] + [True] * (len(queue.tickets) - 1)
    assert rig.transfer_ends.released == []
    queue.tickets[0].end()
    rig.transfers.tick()
    assert rig.transfer_ends.released == [("r", 1)]
    rig.senders[-1].close()


@pytest.mark.parametrize("moving", ["others", "nobody's", "cached"])
def test_a_way_is_given_up_if_nothing_moves_on_it(rig: Any, moving: str) -> None:
    """Blocks that wait behind others', and a verdict that hangs on no block, say nothing of the way."""
    link, _ = rig.new_link("tcp://127.0.0.1:9")
    queue = Queue()
    busy = replace(link, data=queue)
    for lease_id, name in ((1, "others"), (2, "mine")):
        offer = rig.offer_of([lease_id * 1000 + index for index in range(NUM_TOKENS)], request_id=name)
        num_blocks = len(offer.block_hashes)
        rig.transfers.open((name, 1), busy, offer, rig.fill(offer))
        num_cached = num_blocks if moving == "cached" and name == "mine" else 0
        grant = Grant(request_id=name, attempt=1, lease_id=lease_id, epoch=7, num_cached_blocks=num_cached, ttl_s=TTL_S)
        rig.transfers.on_message(busy, grant)
    rig.transfers.blocks_ready(("others", 1), num_blocks)
    theirs = queue.tickets[:]
    rig.commit(("mine", 1))
    assert len(theirs) > 1
    for ticket in theirs[:2]:
        if moving == "others":
            assert ticket.take()
            ticket.end()
        rig.clock.now_s += 15.1
        rig.transfers.tick()
    assert [key for key, _, _ in rig.transfer_ends.failed] == [("mine", 1)]
    assert queue.is_given_up is (moving == "nobody's")
    rig.senders[-1].close()


def test_granted_leases_are_renewed_while_the_prompt_computes(one_rig: Any) -> None:
    _, grant = one_rig.granted(NUM_TOKENS)
    for _ in range(3):
        one_rig.clock.now_s += TTL_S / 3 + 0.1
        one_rig.transfers.tick()
        one_rig.transfers.tick()
        assert one_rig.line.sent == [Renew(lease_id=grant.lease_id, epoch=grant.epoch)]
        one_rig.line.sent.clear()


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


def test_an_offer_on_a_link_that_is_down_fails_at_once(one_rig: Any) -> None:
    one_rig.line.is_up = False
    key = one_rig.open(one_rig.offer_of([1]))
    one_rig.settle()
    assert [code for _, code, _ in one_rig.transfer_ends.failed] == [FailureCode.PEER_LOST]
    assert one_rig.transfer_ends.released == [key]


def test_a_transfer_cannot_be_open_twice(one_rig: Any) -> None:
    offer = one_rig.offer_of([1])
    one_rig.open(offer)
    with pytest.raises(ValueError, match="already open"):
        one_rig.transfers.open(("r", 1), one_rig.link, offer, [0])


def test_blocks_that_do_not_fit_the_offer_are_misuse(one_rig: Any) -> None:
    with pytest.raises(ValueError, match="2 blocks"):
        one_rig.transfers.open(("r", 1), one_rig.link, one_rig.offer_of([1]), [0, 1])
    assert one_rig.line.sent == []


def test_an_answer_of_the_wrong_kind_raises(one_rig: Any) -> None:
    with pytest.raises(ValueError, match="Renew is not an answer"):
        one_rig.transfers.on_message(one_rig.link, Renew(lease_id=1, epoch=1))


def test_a_tampered_header_of_a_real_transfer_rejects_and_fails_it(rig: Any) -> None:
    key, grant = rig.granted(NUM_TOKENS)
    offer = rig.offer_of(list(range(NUM_TOKENS)))
    payload = memoryview(content_of(offer.block_hashes[0]))
    header = msgspec.structs.replace(rig.header(grant, offer, 0), block_hash=b"?" * 16)
    rig.link.data.send(header, payload)
    assert rig.next_block() == "wrong_block"
    rig.rejection()
    rig.settle()
    assert [(k, code) for k, code, _ in rig.transfer_ends.failed] == [(key, FailureCode.INTEGRITY)]
    assert rig.transfer_ends.released == [key]


def test_nobody_speaks_for_another_workers_hand_off(one_rig: Any) -> None:
    offer = one_rig.offer_of(list(range(NUM_TOKENS)))
    grant = one_rig.leases.offer("p", offer)
    one_rig.leases.abort("another", Abort(lease_id=grant.lease_id, epoch=grant.epoch, reason="test"))
    one_rig.leases.commit("another", commit_of(offer, grant))
    assert [lease["state"] for lease in one_rig.leases.snapshot()] == ["granted"]
    one_rig.leases.abort("p", Abort(lease_id=grant.lease_id, epoch=grant.epoch, reason="test"))
    assert one_rig.leases.snapshot() == []
    one_rig.manager.check_integrity()
