"""The block manager as the lease table uses it: reserves, publishes and releases blocks under a lease's key."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.owners import Owner, OwnerKind


def lease_owner(lease_key: str) -> Owner:
    """The owner of a lease's blocks."""
    return Owner(OwnerKind.LEASE, lease_key)


class LeasedBlocks:
    """The lease table's view of the block manager."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks

    def reserve(
        self, lease_key: str, num_blocks: int, hashes: Sequence[bytes], num_tokens: int
    ) -> tuple[list[list[int]], int] | None:
        owner, spare = lease_owner(lease_key), self._blocks.num_promised
        allocation = self._blocks.allocate(owner, num_blocks, hashes, spare=spare, num_computed_tokens=num_tokens)
        return None if allocation is None else (allocation.block_tables, allocation.num_cached)

    def release(self, lease_key: str) -> None:
        self._blocks.release(lease_owner(lease_key))

    def publish(self, lease_key: str, index: int, block_hash: bytes) -> None:
        self._blocks.publish(lease_owner(lease_key), index, block_hash)
