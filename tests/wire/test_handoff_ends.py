"""Hand-offs that end early, over real data sockets. One side gives up, falls silent or dies, and all blocks are released."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from kvrelay.engine.kv.owners import Owner, OwnerKind
from kvrelay.wire.blocks.frames import BlockHeader
from kvrelay.wire.blocks.seal import BlockSealer
from kvrelay.wire.blocks.send_job import SendTicket
from kvrelay.wire.errors import BlockRefusedError, WireError
from kvrelay.wire.messages import Abort, FailureCode, Grant, Renew

from .lease_bench import EPOCH, NUM_TOKENS, TTL_S, WAIT_S, LeaseBench, offer_of, until
from .rig import Rig


@pytest.fixture
def bench() -> LeaseBench:
    return LeaseBench()


def grant_of(lease_id: int, request_id: str = "r", num_cached: int = 0) -> Grant:
    """A grant of a decode worker that the test plays."""
    return Grant(
        request_id=request_id, attempt=1, lease_id=lease_id, epoch=EPOCH, num_cached_blocks=num_cached, ttl_s=TTL_S
    )


# -- the sender gives up ---------------------------------------------------------------------------------------------------


def test_abort_before_the_grant_frees_the_lease_that_comes_late(one_rig: Rig) -> None:
    key = one_rig.open(offer_of(list(range(NUM_TOKENS))))
    one_rig.transfers.abort(key, "test")
    one_rig.settle()
    assert one_rig.transfer_ends.released == [key]
    one_rig.pump()  # the offer is granted now, and the prefill side answers with an abort
    assert one_rig.rejection().code is FailureCode.CANCELLED
    one_rig.assert_all_free()


@pytest.mark.parametrize("num_ready", [0, 2])
def test_abort_while_granted_or_shipping(rig: Rig, num_ready: int) -> None:
    key, _ = rig.granted()
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


def test_abort_after_the_commit_and_after_the_verdict_is_harmless(one_rig: Rig) -> None:
    key, _ = one_rig.granted()
    one_rig.commit(key)
    one_rig.pump()
    lease = one_rig.ends.verified.get(timeout=WAIT_S)
    one_rig.transfers.abort(key, "test")  # COMMITTED at the prefill side, VERIFIED at the decode side
    one_rig.pump()
    one_rig.settle()
    one_rig.transfers.abort(key, "test")  # the transfer has ended
    assert one_rig.transfer_ends.released == [key]
    assert one_rig.ends.rejected.empty()
    assert len(one_rig.manager.owned_blocks(Owner(OwnerKind.LEASE, lease.lease_key))) == 3


def test_blocks_are_not_reused_while_zmq_may_still_read_them(one_rig: Rig) -> None:
    rig = one_rig
    link, line = rig.new_link("tcp://127.0.0.1:9")  # no listener: blocks stay in ZeroMQ's queue
    key = rig.open(offer_of(list(range(NUM_TOKENS))), link)
    rig.transfers.on_message(link, grant_of(1))
    rig.commit(key)
    until(lambda: not rig.senders[-1]._jobs._jobs, "blocks that never leave the queue")
    rig.transfers.abort(key, "test")
    rig.transfers.tick()
    assert rig.transfer_ends.released == []
    assert +rig.source.reads
    assert isinstance(line.sent[-1], Abort)
    rig.senders[-1].close()
    rig.settle()
    assert rig.transfer_ends.released == [key]
    assert not +rig.source.reads


# -- the receiver gives up -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancel", "abort", "abort_peer", "reap"])
def test_blocks_stay_leased_until_the_writer_is_out(one_rig: Rig, how: str) -> None:
    rig, lease = one_rig, one_rig.leased()
    rig.table.may_finish.clear()
    rig.send(*lease.frames(0))
    assert rig.table.inside.get(timeout=WAIT_S) == 0
    match how:
        case "cancel":
            rig.table.cancel("r", 1)
        case "abort":
            rig.table.abort("p", Abort(lease_id=lease.grant.lease_id, epoch=EPOCH, reason="test"))
        case "abort_peer":
            rig.table.abort_peer("p")
        case _:
            rig.clock.now_s += TTL_S
            rig.table.reap()
    assert rig.table.snapshot()[0]["state"] == "aborting"
    assert rig.ends.rejected.empty()
    assert rig.manager.ledger().num_leased == 3
    with pytest.raises(BlockRefusedError, match="not live"):
        rig.table.begin_piece(lease.header(1))
    assert rig.next_block() == "unknown_lease"
    rig.table.may_finish.set()
    expected = {"abort_peer": FailureCode.PEER_LOST, "reap": FailureCode.LEASE_EXPIRED}
    assert rig.rejection().code is expected.get(how, FailureCode.CANCELLED)
    assert rig.next_block() == "ok"
    rig.assert_all_free()
    assert rig.ends.rejected.empty(), "told twice"


def test_the_handler_hears_of_the_end_without_the_lock_held(bench: LeaseBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.leased()
    done = threading.Event()

    def on_rejected(*args: Any) -> None:
        thread = threading.Thread(target=bench.table.snapshot)
        thread.start()
        thread.join(WAIT_S)
        if not thread.is_alive():
            done.set()

    monkeypatch.setattr(bench.ends, "on_lease_rejected", on_rejected)
    bench.table.cancel("r", 1)
    assert done.is_set()


def test_nobody_ends_what_is_not_his(bench: LeaseBench) -> None:
    lease = bench.leased()
    lease_id, table = lease.grant.lease_id, bench.table
    table.cancel("r", 2)
    table.abort_peer("q")
    table.commit("another", lease.commit())
    table.abort("another", Abort(lease_id=lease_id, epoch=EPOCH, reason="test"))
    table.abort("p", Abort(lease_id=lease_id, epoch=EPOCH - 1, reason="stale"))
    assert [entry["state"] for entry in table.snapshot()] == ["granted"]
    table.abort("p", Abort(lease_id=lease_id, epoch=EPOCH, reason="test"))
    bench.assert_all_free()


def test_traffic_and_renewals_put_the_end_off(bench: LeaseBench) -> None:
    lease, table = bench.leased(), bench.table
    renew = Renew(lease_id=lease.grant.lease_id, epoch=EPOCH)
    for step in (
        lambda: bench.receive(lease.frames(0)),
        lambda: table.renew("p", renew),
        lambda: table.commit("p", lease.commit()),
    ):
        bench.clock.now_s += TTL_S - 1
        step()
        table.reap()
        assert table.snapshot()[0]["expires_in_s"] == TTL_S
    table.renew("p", Renew(lease_id=lease.grant.lease_id, epoch=EPOCH - 1))  # another epoch: has no effect
    bench.clock.now_s += TTL_S
    table.reap()
    assert bench.ends.rejected.get_nowait().code is FailureCode.LEASE_EXPIRED
    assert bench.handoffs("lease_expired") == 1
    bench.assert_all_free()


# -- silence and death -----------------------------------------------------------------------------------------------------


def test_no_answer_to_an_offer(one_rig: Rig) -> None:
    key = one_rig.open(offer_of(list(range(NUM_TOKENS))))
    one_rig.clock.now_s += 10.1
    one_rig.transfers.tick()
    one_rig.transfers.tick()
    assert one_rig.transfer_ends.failures == [FailureCode.PEER_LOST]
    assert one_rig.transfer_ends.released == [key]


def test_no_verdict_on_a_commit(rig: Rig) -> None:
    """The time-out of the verdict starts when the blocks have left, so a slow network does not end the transfer.

    When no verdict comes by then, the transfer fails and its block sender is given up.
    """
    key, _ = rig.granted()
    rig.commit(key)
    rig.wait_sent()
    for _ in range(2):
        rig.clock.now_s += 29.0
        rig.transfers.tick()  # the first one sees that the blocks have left
    assert rig.transfer_ends.failed == []
    rig.clock.now_s += 2.0
    rig.transfers.tick()
    rig.transfers.tick()
    assert rig.transfer_ends.failures == [FailureCode.PEER_LOST]
    assert rig.transfer_ends.released == [key]
    assert isinstance(rig.line.sent[-1], Abort)
    assert not rig.link.data.is_alive, "a way for blocks that seems to lead nowhere, and is kept"  # type: ignore[attr-defined]


def test_a_ticket_can_be_called_off_until_it_is_taken() -> None:
    waiting, taken = SendTicket(), SendTicket()
    assert taken.take()
    for ticket in (waiting, taken):
        ticket.call_off()
    assert waiting.is_done
    assert not waiting.take()
    assert not taken.is_done


class Queue:
    """A block sender whose thread is busy with other blocks, or dead."""

    def __init__(self) -> None:
        self.tickets: list[SendTicket] = []
        self.is_given_up = False
        self.is_dead = False

    def send(self, header: BlockHeader, payload: object, sealer: BlockSealer | None) -> SendTicket:
        if self.is_dead:
            raise WireError("this block sender is closed: its decode worker is lost")
        self.tickets.append(SendTicket())
        return self.tickets[-1]

    def give_up(self) -> None:
        self.is_given_up = True


def test_blocks_that_are_still_queued_come_back_at_once(one_rig: Rig) -> None:
    rig, queue = one_rig, Queue()
    busy = replace(rig.link, data=queue)
    key = rig.open(offer_of(list(range(NUM_TOKENS))), busy)
    rig.transfers.on_message(busy, grant_of(1))
    rig.commit(key)
    assert queue.tickets[0].take()
    rig.transfers.abort(key, "test")
    rig.transfers.tick()
    assert [ticket.is_done for ticket in queue.tickets] == [False, True, True]
    assert rig.transfer_ends.released == []
    queue.tickets[0].end()
    rig.transfers.tick()
    assert rig.transfer_ends.released == [key]


def test_a_sender_that_died_fails_the_transfer_and_leaves_no_block_open(one_rig: Rig) -> None:
    rig, queue = one_rig, Queue()
    queue.is_dead = True
    dead = replace(rig.link, data=queue)
    key = rig.open(offer_of(list(range(NUM_TOKENS))), dead)
    rig.transfers.on_message(dead, grant_of(1))
    rig.transfers.blocks_ready(key, 2)
    assert rig.transfer_ends.failures == [FailureCode.PEER_LOST]
    assert not +rig.source.reads, "a block is read for ever"
    rig.transfers.tick()
    assert rig.transfer_ends.released == [key]


@pytest.mark.parametrize("moving", ["others", "nobody's", "cached"])
def test_a_way_is_given_up_if_nothing_moves_on_it(one_rig: Rig, moving: str) -> None:
    """A transfer gets no verdict. The sender is given up only if it also sent no other block meanwhile.

    It is kept if other blocks left, or if the transfer had no block to send.
    """
    rig, queue = one_rig, Queue()
    busy = replace(rig.link, data=queue)
    for lease_id, name in ((1, "others"), (2, "mine")):
        rig.open(offer_of([lease_id * 1000 + index for index in range(NUM_TOKENS)], name), busy)
        num_cached = 3 if moving == "cached" and name == "mine" else 0
        rig.transfers.on_message(busy, grant_of(lease_id, name, num_cached))
    rig.transfers.blocks_ready(("others", 1), 3)
    theirs = queue.tickets[:]
    rig.commit(("mine", 1))
    for ticket in theirs[:2]:
        if moving == "others":
            assert ticket.take()
            ticket.end()
        rig.clock.now_s += 15.1
        rig.transfers.tick()
    assert [key for key, _, _ in rig.transfer_ends.failed] == [("mine", 1)]
    assert queue.is_given_up is (moving == "nobody's")


def test_blocks_that_are_called_off_in_the_queue_do_not_count_as_sent(one_rig: Rig) -> None:
    """A connection is stuck. Requests that wait for it are cancelled, and it is given up nevertheless."""
    rig, queue = one_rig, Queue()
    stuck = replace(rig.link, data=queue)
    for lease_id, name in ((1, "mine"), (2, "cancelled")):
        rig.open(offer_of([lease_id * 1000 + index for index in range(NUM_TOKENS)], name), stuck)
        rig.transfers.on_message(stuck, grant_of(lease_id, name))
    rig.commit(("mine", 1))
    assert queue.tickets[0].take()
    rig.transfers.blocks_ready(("cancelled", 1), 3)
    rig.clock.now_s += 20.0
    rig.transfers.abort(("cancelled", 1), "test")
    rig.transfers.tick()
    assert rig.transfer_ends.released == [("cancelled", 1)]
    rig.clock.now_s += 11.0
    rig.transfers.tick()
    assert [key for key, _, _ in rig.transfer_ends.failed] == [("mine", 1)]
    assert queue.is_given_up, "a cancelled request passed for a block that left"


def test_granted_leases_are_renewed_while_the_prompt_computes(one_rig: Rig) -> None:
    _, grant = one_rig.granted()
    for _ in range(3):
        one_rig.clock.now_s += TTL_S / 3 + 0.1
        one_rig.transfers.tick()
        one_rig.transfers.tick()
        assert one_rig.line.sent == [Renew(lease_id=grant.lease_id, epoch=grant.epoch)]
        one_rig.line.sent.clear()


def test_a_lost_link_fails_its_transfers_and_gives_their_blocks_back(rig: Rig) -> None:
    key, _ = rig.granted()
    rig.transfers.blocks_ready(key, 2)
    rig.lose_link()
    assert rig.transfer_ends.failures == [FailureCode.PEER_LOST]
    assert rig.transfer_ends.released == [key]
    assert not +rig.source.reads
    rig.transfers.blocks_ready(key, 3)  # the model thread may not know of the loss yet
    rig.commit(key)


def test_an_offer_on_a_link_that_is_down_fails_at_once(one_rig: Rig) -> None:
    one_rig.line.is_up = False
    key = one_rig.open(offer_of([1]))
    one_rig.settle()
    assert one_rig.transfer_ends.failures == [FailureCode.PEER_LOST]
    assert one_rig.transfer_ends.released == [key]
