"""The decode side of hand-offs: a lease table, its pool and the ends of its leases, on a clock that the test moves.

There are no sockets: a test passes frames by calls. :mod:`tests.wire.rig` adds the sockets and the prefill side.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec
from prometheus_client import CollectorRegistry

from kvrelay.common.block_digests import digests_of
from kvrelay.common.block_hash import HashChain
from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.engine.fake.engine import MemoryStore, fake_card
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.owners import Owner, OwnerKind
from kvrelay.wire.blocks.frames import BlockHeader, parse_header
from kvrelay.wire.blocks.pieces import Piece, whole_block
from kvrelay.wire.blocks.seal import TAG_NBYTES, BlockSealer
from kvrelay.wire.errors import BlockRefusedError
from kvrelay.wire.leases.lease import LeaseSettings, VerifiedLease
from kvrelay.wire.leases.table import LeaseTable
from kvrelay.wire.messages import Commit, FailureCode, Grant, Offer
from kvrelay.wire.metrics import WireMetrics

Key = tuple[str, int]
Frames = tuple[bytes, bytes]  # header, payload
WAIT_S = 10.0  # the longest wait for an event
BLOCK_SIZE = 4
BLOCK_NBYTES = 512
NUM_TOKENS = 10  # two full blocks and a partial one
BAD_PAYLOAD = b"\xee" * BLOCK_NBYTES
EPOCH = 7
TTL_S = 30.0
FINGERPRINT = b"f" * 16
GEOMETRY = fake_card(block_size=BLOCK_SIZE, token_nbytes=BLOCK_NBYTES // BLOCK_SIZE).layout.geometry
TWO_PIECES = (Piece(BLOCK_NBYTES), Piece(BLOCK_NBYTES - 64, group=1))  # the second is smaller
TWO_WITH_WINDOW = (TWO_PIECES[0], replace(TWO_PIECES[1], window=5))


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class LeaseBlocks:
    """A block manager as a lease table's BlockReservations."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager

    def reserve(
        self, lease_key: str, num_blocks: int, hashes: Sequence[bytes], num_tokens: int
    ) -> tuple[list[list[int]], int] | None:
        allocation = self.manager.allocate(
            Owner(OwnerKind.LEASE, lease_key), num_blocks, hashes, num_computed_tokens=num_tokens
        )
        return None if allocation is None else (allocation.block_tables, allocation.num_cached)

    def release(self, lease_key: str) -> None:
        self.manager.release(Owner(OwnerKind.LEASE, lease_key))

    def publish(self, lease_key: str, index: int, block_hash: bytes) -> None:
        self.manager.publish(Owner(OwnerKind.LEASE, lease_key), index, block_hash)


class CountingStore(MemoryStore):
    """A pool that counts open views. It returns a *different* view object each time, as a staging pool may."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, BLOCK_NBYTES)
        self.reads: Counter[int] = Counter()
        self.writes: Counter[int] = Counter()
        self.num_write_opens = 0

    def open_read(self, block_id: int, group: int = 0) -> memoryview:
        self.reads[block_id] += 1
        return super().open_read(block_id)

    def close_read(self, block_id: int) -> None:
        self.reads[block_id] -= 1

    def open_write(self, block_id: int, group: int = 0) -> memoryview:
        self.writes[block_id] += 1
        self.num_write_opens += 1
        return super().open_write(block_id)

    def close_write(self, block_id: int) -> None:
        self.writes[block_id] -= 1


class WatchedLeases(LeaseTable):
    """A lease table that tells the test the fate of every block, and can hold the receiver inside a write."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.seen: queue.Queue[str] = queue.Queue()  # "ok" or the refusal's cause, per block
        self.inside: queue.Queue[int] = queue.Queue()  # block index, once its write is open
        self.may_finish = threading.Event()
        self.may_finish.set()

    def begin_piece(self, header: BlockHeader) -> None:
        try:
            super().begin_piece(header)
        except BlockRefusedError as error:
            self.seen.put(error.cause_name)
            raise
        self.inside.put(header.block_index)

    def write_piece(self, header: BlockHeader, payload: memoryview | None) -> Callable[[], None]:
        self.may_finish.wait(WAIT_S)
        return partial(self._watched, super().write_piece(header, payload))

    def _watched(self, verify: Callable[[], None]) -> None:
        try:
            verify()
        except BlockRefusedError as error:
            self.seen.put(error.cause_name)
            raise
        self.seen.put("ok")

    def count_bad_header(self) -> None:
        super().count_bad_header()
        self.seen.put("bad_header")


@dataclass
class Rejected:
    lease_id: int
    key: Key
    code: FailureCode
    detail: str


class LeaseEnds:
    """The lease table's handler."""

    def __init__(self) -> None:
        self.verified: queue.Queue[VerifiedLease] = queue.Queue()
        self.rejected: queue.Queue[Rejected] = queue.Queue()

    def on_lease_verified(self, lease: VerifiedLease) -> None:
        self.verified.put(lease)

    def on_lease_rejected(self, lease_id: int, peer_id: str, key: Key, code: FailureCode, detail: str) -> None:
        self.rejected.put(Rejected(lease_id, key, code, detail))


class LeaseBench:
    """A lease table, its pool, and the ends of its leases."""

    def __init__(
        self,
        num_blocks: int = 16,
        *,
        seals_kv: bool = False,
        pieces: tuple[Piece, ...] = whole_block(BLOCK_NBYTES),
    ) -> None:
        self.clock = Clock()
        self.pieces = pieces
        windows = tuple({piece.group: piece.window for piece in pieces}.values())
        self.manager = BlockManager(num_blocks * len(windows), BLOCK_SIZE, lambda: 0.0, windows=windows)
        self.store = self.new_store(num_blocks * len(windows))
        self.ends = LeaseEnds()
        self.registry = CollectorRegistry()
        self.metrics = WireMetrics(self.registry)
        settings = LeaseSettings(EPOCH, FINGERPRINT, BLOCK_SIZE, pieces, TTL_S, seals_kv)
        blocks = LeaseBlocks(self.manager)
        self.table = WatchedLeases(settings, blocks, self.store, self.ends, self.metrics, self.clock)

    def new_store(self, num_blocks: int) -> CountingStore:
        return CountingStore(num_blocks)

    def leased(self, num_tokens: int = NUM_TOKENS, request_id: str = "r") -> Granted:
        """A lease without a transfer: the test plays the sender."""
        offer = offer_of(list(range(num_tokens)), request_id)
        grant = self.table.offer("p", offer)
        assert isinstance(grant, Grant)
        return Granted(offer, grant, self.pieces)

    def receive(self, frames: Frames) -> str:
        """Receive a block as a receiver's thread does. Returns "ok" or the refusal's cause."""
        try:
            header = parse_header(frames[0])
            self.table.begin_piece(header)
            self.table.write_piece(header, memoryview(frames[1]))()
        except BlockRefusedError as error:
            return error.cause_name
        return "ok"

    def counted(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"kvrelay_{name}_total", labels) or 0.0

    def refused(self, cause: str) -> float:
        return self.counted("refused_kv_blocks", cause=cause)

    def handoffs(self, outcome: str) -> float:
        return self.counted("handoffs", outcome=outcome)

    def assert_verified(self, granted: Granted) -> None:
        """Wait until this lease is verified, and check that the pool holds the offered blocks."""
        lease = self.ends.verified.get(timeout=WAIT_S)
        assert lease.lease_id == granted.grant.lease_id
        self.assert_holds(lease)

    def assert_holds(self, lease: VerifiedLease) -> None:
        """Check that the pool holds the offered blocks."""
        num_tokens = len(lease.offer.token_ids)
        for piece in self.pieces:
            for index in range(piece.first_block(num_tokens, BLOCK_SIZE), len(lease.offer.block_hashes)):
                found = bytes(self.store.block(lease.block_tables[piece.group][index]))[: piece.nbytes]
                assert found == content_of(lease.offer.block_hashes[index])[: piece.nbytes]

    def assert_all_free(self) -> None:
        """Check that there is no lease, no open view and no held block."""
        assert self.table.snapshot() == []
        self.assert_books()
        assert self.manager.num_allocatable == self.manager.num_blocks

    def assert_books(self) -> None:
        self.manager.check_integrity()
        assert not +self.store.writes, f"open writes: {+self.store.writes}"


class Granted:
    """A lease, as its sender sees it."""

    def __init__(self, offer: Offer, grant: Grant, pieces: tuple[Piece, ...] = whole_block(BLOCK_NBYTES)) -> None:
        self.offer = offer
        self.grant = grant
        self.pieces = pieces

    def frames(
        self, index: int, payload: bytes | None = None, key: bytes | None = None, *, piece: int = 0, **changes: object
    ) -> Frames:
        """The frames of a piece of block ``index``, with a checksum or sealed as granted. Arguments change parts of them."""
        key = key or self.grant.seal_key
        whole = content_of(self.offer.block_hashes[min(index, len(self.offer.block_hashes) - 1)])
        part = self.pieces[piece]
        right = whole[: part.nbytes]
        draft = BlockHeader(self.grant.lease_id, self.grant.epoch, index, part.nbytes, whole[:16], piece)
        header = msgspec.structs.replace(draft, is_sealed=key is not None, **changes)
        if key is None:
            return header.pack(digests_of(memoryview(right))), right if payload is None else payload
        sealed = bytearray(len(right) + TAG_NBYTES)
        frame = BlockSealer(key).seal(header, memoryview(right), memoryview(sealed))
        return frame, bytes(sealed) if payload is None else payload

    def header(self, index: int, **changes: object) -> BlockHeader:
        """The header of ``frames``."""
        return parse_header(self.frames(index, **changes)[0])  # type: ignore[arg-type]

    def commit(self, **changes: object) -> Commit:
        commit = Commit(
            lease_id=self.grant.lease_id,
            epoch=self.grant.epoch,
            chain_hash=self.offer.block_hashes[-1],
            first_token=SampledToken(1),
            num_cached_tokens=0,
        )
        return msgspec.structs.replace(commit, **changes)


def offer_of(token_ids: list[int], request_id: str = "r", attempt: int = 1) -> Offer:
    """A correct offer for these tokens."""
    return Offer(
        request_id=request_id,
        attempt=attempt,
        gateway_id="g",
        fingerprint=FINGERPRINT,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling=SamplingParams(max_tokens=8),
        block_hashes=HashChain(FINGERPRINT, BLOCK_SIZE).hashes_of_all(token_ids),
    )


def content_of(block_hash: bytes) -> bytes:
    return block_hash * (BLOCK_NBYTES // len(block_hash))


def until(is_so: Callable[[], object], what: str) -> None:
    """Wait until ``is_so`` holds; fail with ``what`` after ``WAIT_S``."""
    deadline_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.001)
