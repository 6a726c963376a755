"""A lease table under random events: the books balance after each event, and every lease ends exactly once."""

from __future__ import annotations

import threading
from itertools import product
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from kvrelay.engine.kv.owners import Owner, OwnerKind
from kvrelay.wire.blocks.frames import BlockHeader, parse_header
from kvrelay.wire.errors import BlockRefusedError
from kvrelay.wire.leases.lease import VerifiedLease
from kvrelay.wire.messages import Abort, Grant, Offer, Renew

from ..lease_bench import BLOCK_SIZE, EPOCH, TTL_S, TWO_PIECES, TWO_WITH_WINDOW, Granted, LeaseBench, offer_of


class LeaseMachine(RuleBasedStateMachine):
    """Two receivers with at most one open write each, leases from two peers, and a pool that may run out of blocks.

    Blocks come in two pieces, of two groups.
    """

    leases = Bundle("leases")
    seals_kv = False
    pieces = TWO_PIECES
    bench_class = LeaseBench

    def __init__(self) -> None:
        super().__init__()
        self.bench = self.bench_class(seals_kv=self.seals_kv, num_blocks=12, pieces=self.pieces)
        self.clock, self.manager, self.store, self.table = (
            self.bench.clock,
            self.bench.manager,
            self.bench.store,
            self.bench.table,
        )
        self.bench.ends.on_lease_verified = self.on_lease_verified  # type: ignore[method-assign]
        self.bench.ends.on_lease_rejected = self.on_lease_rejected  # type: ignore[method-assign]
        self.grants: dict[int, Granted] = {}
        self.offers: dict[int, Offer] = {}
        self.peers: dict[int, str] = {}
        self.ended: list[int] = []
        self.verified: dict[int, VerifiedLease] = {}
        self.open: dict[int, tuple[BlockHeader, bytes]] = {}  # by receiver

    def on_lease_verified(self, lease: Any) -> None:
        self.ended.append(lease.lease_id)
        self.verified[lease.lease_id] = lease

    def on_lease_rejected(self, lease_id: int, *why: Any) -> None:
        self.ended.append(lease_id)

    @rule(target=leases, num_tokens=st.integers(1, 14), request=st.integers(0, 3), peer=st.sampled_from("pq"))
    def offer(self, num_tokens: int, request: int, peer: str) -> Any:
        offer = offer_of(list(range(num_tokens)), str(request))
        answer = self.table.offer(peer, offer)
        if not isinstance(answer, Grant):
            return multiple()
        assert answer.lease_id not in self.offers
        self.offers[answer.lease_id] = offer
        self.grants[answer.lease_id] = Granted(offer, answer, self.pieces)
        self.peers[answer.lease_id] = peer
        return answer.lease_id

    @rule(
        lease_id=leases,
        index=st.integers(0, 4),
        piece=st.integers(0, 1),
        epoch=st.sampled_from([EPOCH, EPOCH, EPOCH, 2]),
        skew=st.sampled_from([{}, {}, {}, {"block_hash": b"?" * 16}, {"piece_index": 2}]),
        receiver=st.integers(0, 1),
    )
    def begin(self, lease_id: int, index: int, piece: int, epoch: int, skew: dict[str, Any], receiver: int) -> None:
        if receiver in self.open:
            return
        elsewhere = [(other.lease_id, other.place) for other, _ in self.open.values()]
        if self.seals_kv and (lease_id, (index, piece)) in elsewhere:
            return  # this thread would wait until the other write is checked
        wrong = skew if index in (2, 4) else {}  # errors in all blocks would leave few verified leases
        frame, payload = self.grants[lease_id].frames(index, piece=piece, epoch=epoch, **wrong)
        header = parse_header(frame)
        try:
            self.table.begin_piece(header)
            assert (lease_id, header.place) not in elsewhere, "two writers at one piece"
            is_seen = index >= self.first(lease_id, piece)
            assert not wrong and is_seen, "what the lease does not take was let in"  # noqa: PT018
            self.open[receiver] = (header, payload)
        except BlockRefusedError as refusal:
            if (lease_id, header.place) in elsewhere and not wrong and refusal.cause_name != "stale_epoch":
                assert refusal.cause_name in ("duplicate", "unknown_lease"), refusal  # noqa: PT017

    @rule(fault=st.sampled_from(["none", "none", "none", "bytes", "size"]), receiver=st.integers(0, 1))
    def finish(self, fault: str, receiver: int) -> None:
        if receiver not in self.open:
            return
        header, payload = self.open.pop(receiver)
        came = memoryview({"bytes": bytes(len(payload)), "size": payload[:-1]}.get(fault, payload))
        try:
            self.table.write_piece(header, came)()
            assert fault == "none"
        except BlockRefusedError:
            assert fault != "none"

    @rule(lease_id=leases)
    def commit(self, lease_id: int) -> None:
        self.table.commit(self.peers[lease_id], self.grants[lease_id].commit())

    @rule(lease_id=leases)
    def ship_the_rest(self, lease_id: int) -> None:
        for index, piece in product(range(len(self.offers[lease_id].block_hashes)), range(2)):
            if index >= self.first(lease_id, piece):
                self.begin(lease_id, index, piece, EPOCH, {}, piece)
                self.finish("none", piece)

    def first(self, lease_id: int, piece: int) -> int:
        """The first block for which this piece is expected."""
        return self.pieces[piece].first_block(len(self.offers[lease_id].token_ids), BLOCK_SIZE)

    @rule(lease_id=leases, epoch=st.sampled_from([EPOCH, 2]))
    def abort(self, lease_id: int, epoch: int) -> None:
        self.table.abort(self.peers[lease_id], Abort(lease_id=lease_id, epoch=epoch, reason=""))

    @rule(lease_id=leases)
    def cancel(self, lease_id: int) -> None:
        self.table.cancel(self.offers[lease_id].request_id, 1)

    @rule(lease_id=leases)
    def renew(self, lease_id: int) -> None:
        self.table.renew(self.peers[lease_id], Renew(lease_id=lease_id, epoch=EPOCH))

    @rule(peer=st.sampled_from("pq"))
    def lose(self, peer: str) -> None:
        self.table.abort_peer(peer)

    @rule(step_s=st.sampled_from([1.0, TTL_S / 2, TTL_S]))
    def wait(self, step_s: float) -> None:
        self.clock.now_s += step_s
        self.table.reap()

    @rule(lease_id=leases)
    def let_go(self, lease_id: int) -> None:
        """The sequence of a verified lease ends, and its blocks are released."""
        if self.verified.pop(lease_id, None) is not None:
            self.manager.release(Owner(OwnerKind.LEASE, str(lease_id)))

    @invariant()
    def the_books_balance(self) -> None:
        self.manager.check_integrity()
        live = {entry["lease_id"] for entry in self.table.snapshot()}
        assert len(set(self.ended)) == len(self.ended), f"told twice: {self.ended}"
        assert live | set(self.ended) == set(self.offers)
        assert not live & set(self.ended)
        held = live | set(self.verified)
        assert all(
            bool(self.manager.owned_blocks(Owner(OwnerKind.LEASE, str(lease_id)))) == (lease_id in held)
            for lease_id in self.offers
        )

    @invariant()
    def verified_memory_is_right(self) -> None:
        for lease in self.verified.values():
            self.bench.assert_holds(lease)

    @invariant()
    def an_open_write_has_its_block_to_itself(self) -> None:
        for header, _ in self.open.values():
            group, owner = self.pieces[header.piece_index].group, Owner(OwnerKind.LEASE, str(header.lease_id))
            block_id = self.manager.owned_blocks(owner, group)[header.block_index]
            assert block_id is not None, "a block that nobody sees is written"
            for lease_id in self.verified:
                other = Owner(OwnerKind.LEASE, str(lease_id))
                for its in range(self.manager.num_groups):
                    assert block_id not in self.manager.owned_blocks(other, its), lease_id


class SealedLeaseMachine(LeaseMachine):
    """Leases are sealed."""

    seals_kv = True


class TwoGroupsMachine(LeaseMachine):
    """Two groups of layers. The second has a window, so its first blocks are not sent."""

    pieces = TWO_WITH_WINDOW


TestTwoGroupsAtRandom = TwoGroupsMachine.TestCase
TestLeasesAtRandom = LeaseMachine.TestCase
TestSealedLeasesAtRandom = SealedLeaseMachine.TestCase


@pytest.mark.parametrize("kind", [LeaseMachine, SealedLeaseMachine, TwoGroupsMachine])
def test_threads_at_once(kind: type[LeaseMachine]) -> None:
    """Two threads receive the same blocks while this one commits and cancels. Each lease ends exactly once."""
    machine = kind()
    table = machine.table
    offers = [offer_of(list(range(request, request + 7)), str(request)) for request in range(100)]
    turn = threading.Barrier(3, timeout=20)
    leases: list[Granted] = []

    def receive() -> None:
        for offer in offers:
            turn.wait()
            lease = leases[-1]
            for index, piece in product(range(len(offer.block_hashes)), range(2)):
                if index >= kind.pieces[piece].first_block(len(offer.token_ids), BLOCK_SIZE):
                    assert machine.bench.receive(lease.frames(index, piece=piece)) in (
                        "ok",
                        "unknown_lease",
                        "duplicate",
                    )
            turn.wait()

    threads = [threading.Thread(target=receive) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number, offer in enumerate(offers):
        answer = table.offer("p", offer)
        assert isinstance(answer, Grant)
        leases.append(Granted(offer, answer, kind.pieces))
        turn.wait()
        if number % 2:
            table.commit("p", leases[-1].commit())
        table.cancel(offer.request_id, 1)
        turn.wait()
        assert machine.ended.count(answer.lease_id) == 1
        machine.manager.release(Owner(OwnerKind.LEASE, str(answer.lease_id)))  # if it was verified
        machine.manager.check_integrity()
    for thread in threads:
        thread.join(20)
    assert machine.manager.num_allocatable == machine.manager.num_blocks
