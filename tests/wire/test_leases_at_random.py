"""Any order of events a lease table can see: the books balance after each, and every lease ends exactly once."""

from __future__ import annotations

import threading
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule
from prometheus_client import CollectorRegistry

from kvrelay.common.block_hash import chain_hashes, root_hash
from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.engine.block_manager import BlockManager, Owner, OwnerKind
from kvrelay.engine.fake import MemoryStore
from kvrelay.wire.block_frames import BlockHeader
from kvrelay.wire.errors import BlockRefusedError
from kvrelay.wire.lease import LeaseSettings
from kvrelay.wire.leases import LeaseTable
from kvrelay.wire.messages import Abort, Commit, Grant, Offer, Renew, Timings
from kvrelay.wire.metrics import WireMetrics

from .rig import LeaseBlocks

BLOCK_SIZE, BLOCK_NBYTES, EPOCH, TTL_S, FINGERPRINT = 4, 64, 3, 30.0, b"f" * 16


def content_of(block_hash: bytes) -> bytes:
    return (block_hash * BLOCK_NBYTES)[:BLOCK_NBYTES]


def offer_of(request_id: str, num_tokens: int, first: int = 0) -> Offer:
    token_ids = list(range(first, first + num_tokens))
    return Offer(
        request_id=request_id,
        attempt=1,
        gateway_id="g",
        fingerprint=FINGERPRINT,
        token_ids=token_ids,
        num_prompt_tokens=num_tokens,
        sampling=SamplingParams(max_tokens=1),
        block_hashes=chain_hashes(root_hash(FINGERPRINT), token_ids, BLOCK_SIZE),
    )


def commit_of(lease_id: int, offer: Offer) -> Commit:
    return Commit(
        lease_id=lease_id,
        epoch=EPOCH,
        chain_hash=offer.block_hashes[-1],
        first_token=SampledToken(1),
        num_cached_tokens=0,
        timings=Timings(),
    )


class LeaseMachine(RuleBasedStateMachine):
    """Two receivers (each with one write open at most), any number of leases from two peers, a pool that runs out."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.manager = BlockManager(12, BLOCK_SIZE, lambda: 0.0)
        self.store = MemoryStore(12, BLOCK_NBYTES)
        self.offers: dict[int, Offer] = {}
        self.peers: dict[int, str] = {}
        self.ended: list[int] = []
        self.blocks_of: dict[int, list[int]] = {}  # verified
        self.open: dict[int, BlockHeader] = {}  # by receiver
        self.table = LeaseTable(
            LeaseSettings(epoch=EPOCH, fingerprint=FINGERPRINT, block_size=BLOCK_SIZE, ttl_s=TTL_S),
            LeaseBlocks(self.manager),
            self.store,
            self,
            WireMetrics(CollectorRegistry()),
            lambda: self.now_s,
        )

    def on_lease_verified(self, lease: Any) -> None:
        self.ended.append(lease.lease_id)
        self.blocks_of[lease.lease_id] = lease.block_ids

    def on_lease_rejected(self, lease_id: int, *why: Any) -> None:
        self.ended.append(lease_id)

    @rule(target=leases, num_tokens=st.integers(1, 14), request=st.integers(0, 3), peer=st.sampled_from("pq"))
    def offer(self, num_tokens: int, request: int, peer: str) -> Any:
        offer = offer_of(str(request), num_tokens)
        answer = self.table.offer(peer, offer)
        if not isinstance(answer, Grant):
            return multiple()
        assert answer.lease_id not in self.offers
        self.offers[answer.lease_id] = offer
        self.peers[answer.lease_id] = peer
        return answer.lease_id

    @rule(
        lease_id=leases,
        index=st.integers(0, 4),
        epoch=st.sampled_from([EPOCH, EPOCH, EPOCH, 2]),
        skew=st.booleans(),
        receiver=st.integers(0, 1),
    )
    def begin(self, lease_id: int, index: int, epoch: int, skew: bool, receiver: int) -> None:
        if receiver in self.open:
            return
        hashes = self.offers[lease_id].block_hashes
        wrong = skew and index == 4
        block_hash = b"?" * 16 if wrong else hashes[min(index, len(hashes) - 1)]
        draft = BlockHeader(lease_id, epoch, index, BLOCK_NBYTES, block_hash)
        header = BlockHeader(
            lease_id, epoch, index, BLOCK_NBYTES, block_hash, draft.checksum_of(memoryview(content_of(block_hash)))
        )
        elsewhere = [(other.lease_id, other.block_index) for other in self.open.values()]
        try:
            self.table.begin_block(header)
            assert (lease_id, index) not in elsewhere, "two writers at one block"
            self.open[receiver] = header
        except BlockRefusedError as refusal:
            if (lease_id, index) in elsewhere and refusal.cause_name != "stale_epoch":
                assert refusal.cause_name in ("duplicate", "unknown_lease"), refusal  # noqa: PT017

    @rule(fault=st.sampled_from(["none", "none", "none", "bytes", "size"]), receiver=st.integers(0, 1))
    def finish(self, fault: str, receiver: int) -> None:
        if receiver not in self.open:
            return
        header = self.open.pop(receiver)
        content = memoryview(content_of(b"x" * 16 if fault == "bytes" else header.block_hash))
        try:
            self.table.finish_block(header, content[:-1] if fault == "size" else content)
            assert fault == "none"
        except BlockRefusedError:
            assert fault != "none"

    @rule(lease_id=leases)
    def commit(self, lease_id: int) -> None:
        self.table.commit(self.peers[lease_id], commit_of(lease_id, self.offers[lease_id]))

    @rule(lease_id=leases)
    def ship_the_rest(self, lease_id: int) -> None:
        for index in range(len(self.offers[lease_id].block_hashes)):
            self.begin(lease_id, index, EPOCH, False, index % 2)
            self.finish("none", index % 2)

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
        self.now_s += step_s
        self.table.reap()

    @rule(lease_id=leases)
    def let_go(self, lease_id: int) -> None:
        """The sequence that a verified lease became ends."""
        if self.blocks_of.pop(lease_id, None) is not None:
            self.manager.release(Owner(OwnerKind.LEASE, str(lease_id)))

    @invariant()
    def the_books_balance(self) -> None:
        self.manager.check_integrity()
        live = {entry["lease_id"] for entry in self.table.snapshot()}
        assert len(set(self.ended)) == len(self.ended), f"told twice: {self.ended}"
        assert live | set(self.ended) == set(self.offers)
        assert not live & set(self.ended)
        held = live | set(self.blocks_of)
        assert all(
            bool(self.manager.owned_blocks(Owner(OwnerKind.LEASE, str(lease_id)))) == (lease_id in held)
            for lease_id in self.offers
        )

    @invariant()
    def verified_memory_is_right(self) -> None:
        for lease_id, block_ids in self.blocks_of.items():
            for block_id, block_hash in zip(block_ids, self.offers[lease_id].block_hashes, strict=False):
                assert bytes(self.store.block(block_id)) == content_of(block_hash)

    @invariant()
    def an_open_write_has_its_block_to_itself(self) -> None:
        for header in self.open.values():
            block_id = self.manager.owned_blocks(Owner(OwnerKind.LEASE, str(header.lease_id)))[header.block_index]
            for lease_id, block_ids in self.blocks_of.items():
                assert block_id not in block_ids, lease_id


TestLeasesAtRandom = LeaseMachine.TestCase
TestLeasesAtRandom.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None
)


def test_threads_at_once() -> None:
    """Two receiver threads are sent the same blocks while the network thread commits and cancels: each lease ends exactly once."""
    machine = LeaseMachine()
    table = machine.table
    offers = [offer_of(str(request), 7, first=request) for request in range(300)]
    turn = threading.Barrier(3, timeout=20)
    ids: list[int] = []

    def receive() -> None:
        for offer in offers:
            turn.wait()
            lease_id = ids[-1]
            for index, block_hash in enumerate(offer.block_hashes):
                draft = BlockHeader(lease_id, EPOCH, index, BLOCK_NBYTES, block_hash)
                checksum = draft.checksum_of(memoryview(content_of(block_hash)))
                header = BlockHeader(lease_id, EPOCH, index, BLOCK_NBYTES, block_hash, checksum)
                try:
                    table.begin_block(header)
                    table.finish_block(header, memoryview(content_of(block_hash)))
                except BlockRefusedError as error:
                    assert error.cause_name in ("unknown_lease", "duplicate"), error  # noqa: PT017
            turn.wait()

    threads = [threading.Thread(target=receive) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number, offer in enumerate(offers):
        answer = table.offer("p", offer)
        assert isinstance(answer, Grant)
        ids.append(answer.lease_id)
        turn.wait()
        if number % 2:
            table.commit("p", commit_of(answer.lease_id, offer))
        table.cancel(offer.request_id, 1)
        turn.wait()
        assert machine.ended.count(answer.lease_id) == 1
        machine.manager.release(Owner(OwnerKind.LEASE, str(answer.lease_id)))  # if it was verified
        machine.manager.check_integrity()
    for thread in threads:
        thread.join(20)
    assert machine.manager.num_allocatable == machine.manager.num_blocks
