"""The pools of :mod:`handoff`, without an engine: memory, and reservations for one hand-off at a time."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

from kvrelay.common.block_digests import landed
from kvrelay.common.kv_geometry import GroupKind, KvGeometry, KvGroup


@dataclass(frozen=True, slots=True)
class Sizes:
    """The blocks that a round moves."""

    block_nbytes: int
    num_blocks: int

    @property
    def nbytes(self) -> int:
        """Bytes of a round."""
        return self.block_nbytes * self.num_blocks


def geometry_of(sizes: Sizes, block_size: int) -> KvGeometry:
    """The geometry of one group with these blocks."""
    token_nbytes = sizes.block_nbytes // block_size
    group = KvGroup(
        kind=GroupKind.FULL, layers=(0,), num_kv_heads=1, key_size=token_nbytes, value_size=0, dtype="uint8"
    )
    return KvGeometry(groups=(group,), block_size=block_size)


class Pool:
    """A pool's bytes, in the form that the tables on both sides use."""

    def __init__(self, sizes: Sizes) -> None:
        self.block_nbytes = sizes.block_nbytes
        memory = mmap.mmap(-1, sizes.nbytes)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = memoryview(memory)
        self.clear()

    register = None

    def open_read(self, block_id: int, group: int = 0) -> memoryview:
        """The block's bytes."""
        return self.bytes[block_id * self.block_nbytes : (block_id + 1) * self.block_nbytes]

    def close_read(self, block_id: int) -> None:
        """Nothing to do in host memory."""

    def begin_write(self, block_id: int, group: int, payload: memoryview) -> Callable[[], bytes]:
        """Write a block. The result gives the digests of what is there."""
        digests = landed(payload, self.open_read(block_id)[: len(payload)])
        return lambda: digests

    def open_write(self, block_id: int, group: int = 0) -> memoryview:
        """The block's bytes."""
        return self.open_read(block_id)

    def close_write(self, block_id: int) -> None:
        """Nothing to do in host memory."""

    def clear(self) -> None:
        """Fill the pool with zeros, which also allocates every page before the measurement."""
        self.bytes[:] = bytes(len(self.bytes))

    def digest(self) -> str:
        """The digest of all bytes."""
        return xxhash.xxh3_128_hexdigest(self.bytes)


class WholePool:
    """Reservations that give every lease the whole pool: one hand-off at a time, nothing cached."""

    def __init__(self, num_blocks: int) -> None:
        self._block_ids = list(range(num_blocks))

    def reserve(
        self, lease_key: str, num_blocks: int, hashes: Sequence[bytes], num_tokens: int
    ) -> tuple[list[list[int]], int]:
        """The whole pool."""
        return [self._block_ids], 0

    def release(self, lease_key: str) -> None:
        """Nothing to do."""

    def publish(self, lease_key: str, index: int, block_hash: bytes) -> None:
        """Nothing to do."""
