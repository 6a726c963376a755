"""A lease on KV blocks, and the interfaces that its table needs. The rules are in :mod:`kvrelay.wire.leases.table`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

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

        None without room. Where a group needs no block for later tokens, the table has an arbitrary number there.
        """

    def release(self, lease_key: str) -> None:
        """Give the lease's blocks back."""

    def publish(self, lease_key: str, index: int, block_hash: bytes) -> None:
        """Make the lease's block ``index`` shareable: it is complete and verified."""


class WritableStore(Protocol):
    """The pool's bytes, as a lease sees them (see kvrelay.engine.step.interface.BlockStore)."""

    def begin_write(self, block_id: int, group: int, payload: memoryview) -> Callable[[], bytes]:
        """Begin to write the block's first bytes. The result waits, and gives the digests of what is in the pool then."""

    def open_write(self, block_id: int, group: int) -> memoryview:
        """A writable view of the block."""

    def close_write(self, block_id: int) -> None:
        """End the write: the view is filled, or the write was given up."""


@dataclass(frozen=True, slots=True)
class VerifiedLease:
    """A verified hand-off: all that the decode worker needs to continue the sequence."""

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
        """The handler owns the blocks from now on."""

    def on_lease_rejected(
        self, lease_id: int, peer_id: str, key: tuple[str, int], code: FailureCode, detail: str
    ) -> None:
        """The blocks are released; nothing was or will be sampled from them."""


@dataclass(frozen=True, slots=True)
class LeaseSettings:
    """The facts that offers and frames are checked against."""

    epoch: int
    fingerprint: bytes
    block_size: int
    pieces: tuple[Piece, ...]  # of each block, by index
    ttl_s: float
    seals_kv: bool = False  # every lease gets a key and takes only sealed blocks


@dataclass(slots=True, eq=False)
class Lease:
    """One lease of a LeaseTable. The table's lock guards it."""

    lease_id: int
    peer_id: str
    offer: Offer
    chain: HashChain  # of its tokens' blocks
    block_tables: list[list[int]]  # by group
    num_cached: int
    pieces: tuple[Piece, ...]
    first_blocks: tuple[int, ...]  # for each piece: the first block that is sent; no layer sees earlier ones
    expires_s: float
    opener: BlockOpener | None  # None: blocks come plain
    state: HandoffState = HandoffState.GRANTED
    received: set[Place] = field(default_factory=set)  # verified pieces
    writing: set[Place] = field(default_factory=set)  # pieces that receiver threads write just now
    num_pieces: dict[int, int] = field(default_factory=dict)  # by block: number of verified pieces
    num_received: int = 0  # blocks whose pieces are all verified
    commit: Commit | None = None
    committed_s: float = 0.0
    has_dropped: bool = False  # whether a frame did not authenticate
    failure: tuple[FailureCode, str] | None = None

    @property
    def key(self) -> tuple[str, int]:
        """(request_id, attempt): the attempt that the lease is for."""
        return self.offer.key

    @property
    def lease_key(self) -> str:
        """The name under which the block manager reserves its blocks."""
        return str(self.lease_id)

    @property
    def is_complete(self) -> bool:
        """Whether every block is here: received, cached, or needed by no layer."""
        return max(self.num_cached, min(self.first_blocks)) + self.num_received == len(self.offer.block_hashes)

    def num_pieces_of(self, block_index: int) -> int:
        """Number of pieces that are sent of a block that is not cached."""
        return sum(first <= block_index for first in self.first_blocks)

    def receive(self, place: Place) -> bool:
        """Record a verified piece. Returns whether its block is complete now."""
        block_index = place[0]
        self.received.add(place)
        self.num_pieces[block_index] = num_pieces = self.num_pieces.get(block_index, 0) + 1
        is_whole = num_pieces == self.num_pieces_of(block_index)
        self.num_received += is_whole
        return is_whole

    @property
    def is_doubted(self) -> bool:
        """Whether the sender has sent everything and a frame was dropped: missing blocks may be lost."""
        return self.has_dropped and self.state is HandoffState.COMMITTED

    def verified(self, now_s: float) -> VerifiedLease:
        """What the handler gets of the lease, which is committed and complete."""
        assert self.commit is not None, f"lease {self.lease_id} is verified without a commit"
        return VerifiedLease(
            lease_id=self.lease_id,
            lease_key=self.lease_key,
            peer_id=self.peer_id,
            offer=self.offer,
            chain=self.chain,
            commit=self.commit,
            block_tables=self.block_tables,
            transfer_s=now_s - self.committed_s,
        )

    def snapshot(self, now_s: float) -> dict[str, Any]:
        """The lease in numbers, for /debug/kv."""
        return {
            "lease_id": self.lease_id,
            "request_id": self.offer.request_id,
            "attempt": self.offer.attempt,
            "state": self.state.value,
            "blocks": len(self.block_tables[0]),
            "cached": self.num_cached,
            "received": self.num_received,
            "expires_in_s": round(self.expires_s - now_s, 3),
        }

    def advance(self, state: HandoffState) -> None:
        """Enter ``state``; see kvrelay.wire.leases.states."""
        self.state = advance(self.state, state, f"lease {self.lease_id} of request {self.key}")
