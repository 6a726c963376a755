"""What a lease on KV blocks is, and what its table needs from others. The rules are in :mod:`kvrelay.wire.leases.table`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvrelay.common.block_hash import HashChain
from kvrelay.wire.blocks.frames import Place
from kvrelay.wire.blocks.pieces import Piece
from kvrelay.wire.blocks.seal import BlockOpener
from kvrelay.wire.leases.states import HandoffState, advance
from kvrelay.wire.messages import Commit, FailureCode, Offer


class BlockReservations(Protocol):
    """The block manager, as a lease sees it. Thread-safe."""

    def reserve(
        self, lease_key: str, num_blocks: int, hashes: Sequence[bytes], num_tokens: int
    ) -> tuple[list[list[int]], int] | None:
        """Blocks for a lease of ``num_tokens`` tokens, by group; the leading ``n`` (second value) hold what ``hashes`` name.

        None without room. Where a group needs no block for what comes behind those tokens, there is any number.
        """

    def release(self, lease_key: str) -> None:
        """Give the lease's blocks back."""

    def publish(self, lease_key: str, index: int, block_hash: bytes) -> None:
        """The lease's block ``index`` is full and proved."""


class WritableStore(Protocol):
    """The pool's bytes, as a lease sees them (see kvrelay.engine.step.interface.BlockStore)."""

    def open_write(self, block_id: int, group: int) -> memoryview:
        """A writable view of the block."""

    def close_write(self, block_id: int) -> None:
        """The view is filled, or given up."""


@dataclass(frozen=True, slots=True)
class VerifiedLease:
    """All that the decode worker needs to go on with the sequence."""

    lease_id: int
    lease_key: str  # under which the blocks are reserved
    peer_id: str
    offer: Offer
    chain: HashChain  # of its tokens' blocks
    commit: Commit
    block_tables: list[list[int]]  # by group
    transfer_s: float  # commit received until the last block was verified


class LeaseHandler(Protocol):
    """Hears how leases end. Called on the network or the receiver thread, never with a lock held."""

    def on_lease_verified(self, lease: VerifiedLease) -> None:
        """The blocks are the handler's now."""

    def on_lease_rejected(
        self, lease_id: int, peer_id: str, key: tuple[str, int], code: FailureCode, detail: str
    ) -> None:
        """The blocks are released; nothing was or will be sampled from them."""


@dataclass(frozen=True, slots=True)
class LeaseSettings:
    """What leases are checked against."""

    epoch: int
    fingerprint: bytes
    block_size: int
    pieces: tuple[Piece, ...]  # of each block, by index
    ttl_s: float
    seals_kv: bool = False  # every lease gets a key, and takes sealed blocks only


@dataclass(slots=True, eq=False)
class Lease:
    """One lease of a LeaseTable, and under its lock."""

    lease_id: int
    peer_id: str
    offer: Offer
    chain: HashChain  # of its tokens' blocks
    block_tables: list[list[int]]  # by group
    num_cached: int
    pieces: tuple[Piece, ...]
    first_blocks: tuple[int, ...]  # of each piece, the first block whose piece comes: nobody sees those before
    expires_s: float
    opener: BlockOpener | None  # None: blocks come plain
    state: HandoffState = HandoffState.GRANTED
    received: set[Place] = field(default_factory=set)  # pieces that are proved
    writing: set[Place] = field(default_factory=set)  # pieces that receivers are filling
    num_pieces: dict[int, int] = field(default_factory=dict)  # by block, how many are proved
    num_received: int = 0  # blocks of which every piece is proved
    commit: Commit | None = None
    committed_s: float = 0.0
    has_dropped: bool = False  # a frame that did not authenticate
    failure: tuple[FailureCode, str] | None = None

    @property
    def key(self) -> tuple[str, int]:
        """The attempt that it is for."""
        return (self.offer.request_id, self.offer.attempt)

    @property
    def lease_key(self) -> str:
        """The name under which its blocks are reserved."""
        return str(self.lease_id)

    @property
    def is_complete(self) -> bool:
        """Whether every block is here: received, cached, or seen by nobody."""
        return max(self.num_cached, min(self.first_blocks)) + self.num_received == len(self.offer.block_hashes)

    def num_pieces_of(self, block_index: int) -> int:
        """How many pieces of a block come, if it is not cached."""
        return sum(first <= block_index for first in self.first_blocks)

    def receive(self, place: Place) -> bool:
        """A piece is proved; returns whether its block is by that."""
        block_index = place[0]
        self.received.add(place)
        self.num_pieces[block_index] = num_pieces = self.num_pieces.get(block_index, 0) + 1
        is_whole = num_pieces == self.num_pieces_of(block_index)
        self.num_received += is_whole
        return is_whole

    @property
    def is_doubted(self) -> bool:
        """Whether everything was sent, and something else came: blocks that are missing may be lost."""
        return self.has_dropped and self.state is HandoffState.COMMITTED

    def advance(self, state: HandoffState) -> None:
        """Enter ``state``; see kvrelay.wire.leases.states."""
        self.state = advance(self.state, state, f"lease {self.lease_id} of request {self.key}")
