"""A lease table without sockets: frames are received by calls, on a clock that the test moves."""

from __future__ import annotations

import msgspec
from prometheus_client import CollectorRegistry

from kvrelay.engine.block_manager import BlockManager
from kvrelay.wire.block_frames import BlockHeader, parse_header
from kvrelay.wire.errors import BlockRefusedError
from kvrelay.wire.lease import LeaseSettings
from kvrelay.wire.leases import LeaseTable
from kvrelay.wire.messages import Commit, Grant, Offer
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.seal import TAG_NBYTES, BlockSealer

from .handoffs import commit_of
from .rig import (
    BLOCK_NBYTES,
    BLOCK_SIZE,
    EPOCH,
    FINGERPRINT,
    TTL_S,
    Clock,
    CountingStore,
    LeaseBlocks,
    LeaseEnds,
    content_of,
    offer_of,
)

Frames = tuple[bytes, bytes]  # header, payload


class LeaseBench:
    """A lease table, its pool, and what became of its leases."""

    def __init__(self, *, seals_kv: bool = False, num_blocks: int = 16) -> None:
        self.clock = Clock()
        self.manager = BlockManager(num_blocks, BLOCK_SIZE, lambda: 0.0)
        self.store = CountingStore(num_blocks)
        self.ends = LeaseEnds()
        self.registry = CollectorRegistry()
        settings = LeaseSettings(EPOCH, FINGERPRINT, BLOCK_SIZE, TTL_S, seals_kv=seals_kv)
        metrics = WireMetrics(self.registry)
        self.table = LeaseTable(settings, LeaseBlocks(self.manager), self.store, self.ends, metrics, self.clock)

    def granted(self, num_tokens: int = 10, request_id: str = "r") -> Granted:
        """A lease; by default of two full blocks and a partial one."""
        offer = offer_of(list(range(num_tokens)), request_id)
        grant = self.table.offer("p", offer)
        assert isinstance(grant, Grant)
        return Granted(offer, grant)

    def receive(self, frames: Frames) -> str:
        """As a receiver's thread does; returns what became of the block."""
        try:
            header = parse_header(frames[0])
            self.table.begin_block(header)
            self.table.finish_block(header, memoryview(frames[1]))
        except BlockRefusedError as error:
            return error.cause_name
        return "ok"

    def refused(self, cause: str) -> float:
        return self.registry.get_sample_value("kvrelay_refused_kv_blocks_total", {"cause": cause}) or 0.0

    def assert_verified(self, granted: Granted) -> None:
        """The lease has just been, and the pool holds what its sender meant."""
        lease = self.ends.verified.get_nowait()
        assert lease.lease_id == granted.grant.lease_id
        for block_id, block_hash in zip(lease.block_ids, granted.offer.block_hashes, strict=False):
            assert bytes(self.store.block(block_id)) == content_of(block_hash)

    def assert_all_free(self) -> None:
        assert self.table.snapshot() == []
        self.manager.check_integrity()
        assert self.manager.num_allocatable == self.manager.num_blocks


class Granted:
    """A lease, as its sender sees it."""

    def __init__(self, offer: Offer, grant: Grant) -> None:
        self.offer = offer
        self.grant = grant

    def frames(self, index: int, payload: bytes | None = None, key: bytes | None = None, **changes: object) -> Frames:
        """Block ``index``, proved or sealed as the lease wants it; with another content, key or header if that is asked for."""
        key = key or self.grant.seal_key
        right = content_of(self.offer.block_hashes[min(index, len(self.offer.block_hashes) - 1)])
        draft = BlockHeader(self.grant.lease_id, self.grant.epoch, index, BLOCK_NBYTES, right[:16])
        header = msgspec.structs.replace(draft, is_sealed=key is not None, **changes)
        if key is None:
            return header.pack(memoryview(right)), right if payload is None else payload
        sealed = bytearray(BLOCK_NBYTES + TAG_NBYTES)
        frame = BlockSealer(key).seal(header, memoryview(right), memoryview(sealed))
        return frame, bytes(sealed) if payload is None else payload

    def commit(self, **changes: object) -> Commit:
        return commit_of(self.offer, self.grant, **changes)
