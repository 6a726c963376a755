"""The receiving side of hand-offs: leases on KV blocks, and the proof every block must pass before it counts.

A lease is made by ``offer`` and ends in exactly one call of the handler: ``on_lease_verified`` (every block proved right;
the blocks are the handler's from then on) or ``on_lease_rejected`` (its blocks are released). What a block must prove:

    epoch        it was written for this process, not for an earlier one under the same address
    lease        it is live; a lease id is never used twice
    index, hash  it is the block that the offer promised at this place: same model, tokens and position
    size         exactly one block
    checksum     over the header and over what lies in *pool memory* after the write;
    or seal      with sealed blocks: decrypted into pool memory, header and payload are those that the lease's peer sealed

A block that fails one of the last three on a live lease ends the lease, and what is in pool memory is never read. The others are
dropped and counted: they speak of leases that are over, or come twice, and must not hurt what is.

Thread-safe. The network thread offers, commits, aborts and reaps; the receiver thread opens and closes writes. The handler is
called without the lock held, on either thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvrelay.common.block_hash import chain_hashes, root_hash
from kvrelay.wire.block_frames import BlockHeader
from kvrelay.wire.errors import BlockRefusedError
from kvrelay.wire.handoff import HandoffState, advance
from kvrelay.wire.messages import Abort, Commit, FailureCode, Grant, Offer, Refuse, Renew
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.seal import TAG_NBYTES, BlockOpener, new_key


class BlockReservations(Protocol):
    """The block manager, as a lease sees it. Thread-safe."""

    def reserve(self, lease_key: str, num_blocks: int, hashes: Sequence[bytes]) -> tuple[list[int], int] | None:
        """Blocks for a lease, of which the leading ``n`` (second value) hold what ``hashes`` name; None without room."""

    def release(self, lease_key: str) -> None:
        """Give the lease's blocks back."""

    def publish(self, lease_key: str, index: int, block_hash: bytes) -> None:
        """The lease's block ``index`` is full and proved."""


class WritableStore(Protocol):
    """The pool's bytes, as a lease sees them (see kvrelay.engine.interface.BlockStore)."""

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block."""

    def open_write(self, block_id: int) -> memoryview:
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
    commit: Commit
    block_ids: list[int]
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
    ttl_s: float
    seals_kv: bool = False  # every lease gets a key, and takes sealed blocks only


@dataclass(slots=True, eq=False)
class _Lease:
    lease_id: int
    peer_id: str
    offer: Offer
    block_ids: list[int]
    num_cached: int
    expires_s: float
    opener: BlockOpener | None  # None: blocks come plain
    state: HandoffState = HandoffState.GRANTED
    received: set[int] = field(default_factory=set)
    writing: memoryview | None = None  # the view that the receiver thread is filling
    commit: Commit | None = None
    committed_s: float = 0.0
    failure: tuple[FailureCode, str] | None = None

    @property
    def key(self) -> tuple[str, int]:
        return (self.offer.request_id, self.offer.attempt)

    @property
    def lease_key(self) -> str:
        return str(self.lease_id)

    @property
    def is_complete(self) -> bool:
        return self.num_cached + len(self.received) == len(self.offer.block_hashes)

    def advance(self, state: HandoffState) -> None:
        self.state = advance(self.state, state, f"lease {self.lease_id} of request {self.key}")


class LeaseTable:
    """All leases of one decode worker."""

    def __init__(
        self,
        settings: LeaseSettings,
        blocks: BlockReservations,
        store: WritableStore,
        handler: LeaseHandler,
        metrics: WireMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._blocks = blocks
        self._store = store
        self._handler = handler
        self._metrics = metrics
        self._clock = clock
        self._root_hash = root_hash(settings.fingerprint)
        self._lock = threading.Lock()
        self._leases: dict[int, _Lease] = {}
        self._by_key: dict[tuple[str, int], _Lease] = {}
        self._next_id = 1

    @property
    def seals_kv(self) -> bool:
        """Whether blocks must come sealed."""
        return self._settings.seals_kv

    # -- the network thread ----------------------------------------------------------------------------------------

    def offer(self, peer_id: str, offer: Offer) -> Grant | Refuse:
        """Reserve blocks for what is offered, and for the first token behind it."""
        key = (offer.request_id, offer.attempt)

        def refuse(code: FailureCode, detail: str, retry_after_s: float | None = None) -> Refuse:
            return Refuse(request_id=key[0], attempt=key[1], code=code, detail=detail, retry_after_s=retry_after_s)

        block_size = self._settings.block_size
        unfit = self._unfit(offer)
        if unfit is not None:
            return refuse(*unfit)
        num_full = len(offer.token_ids) // block_size
        num_blocks = len(offer.token_ids) // block_size + 1
        with self._lock:
            if key in self._by_key:
                return refuse(FailureCode.INVALID, f"attempt {key[1]} of request {key[0]} is already leased")
            lease_id = self._next_id
            self._next_id += 1
            reserved = self._blocks.reserve(str(lease_id), num_blocks, offer.block_hashes[:num_full])
            if reserved is None:
                self._metrics.handoffs.labels("refused_no_room").inc()
                return refuse(FailureCode.NO_ROOM, f"no room for {num_blocks} KV blocks", retry_after_s=0.5)
            block_ids, num_cached = reserved
            seal_key = new_key() if self._settings.seals_kv else None
            opener = None if seal_key is None else BlockOpener(seal_key)
            expires_s = self._clock() + self._settings.ttl_s
            lease = _Lease(lease_id, peer_id, offer, block_ids, num_cached, expires_s, opener)
            self._leases[lease_id] = self._by_key[key] = lease
        self._metrics.reused_blocks.inc(num_cached)
        return Grant(
            request_id=key[0],
            attempt=key[1],
            lease_id=lease_id,
            epoch=self._settings.epoch,
            num_cached_blocks=num_cached,
            ttl_s=self._settings.ttl_s,
            seal_key=seal_key,
        )

    def commit(self, peer_id: str, commit: Commit) -> None:
        """The sender has sent everything; the lease is verified now or with the last block."""
        with self._lock:
            lease = self._live(peer_id, commit.lease_id, commit.epoch)
            if lease is None or lease.commit is not None:
                return
            self._touch(lease)
            lease.commit, lease.committed_s = commit, self._clock()
            lease.advance(HandoffState.COMMITTED)
            if commit.chain_hash != lease.offer.block_hashes[-1]:
                self._doom(lease, FailureCode.INTEGRITY, "the commit's chain hash is not that of the offer")
        self._settle(lease)

    def reject(self, peer_id: str, lease_id: int, epoch: int, detail: str) -> None:
        """What the sender said of the lease cannot be right, as whoever knows the model finds."""
        with self._lock:
            lease = self._live(peer_id, lease_id, epoch)
            if lease is None:
                return
            self._doom(lease, FailureCode.INTEGRITY, detail)
        self._settle(lease)

    def renew(self, peer_id: str, renew: Renew) -> None:
        """The sender still computes."""
        with self._lock:
            lease = self._live(peer_id, renew.lease_id, renew.epoch)
            if lease is not None:
                self._touch(lease)

    def abort(self, peer_id: str, abort: Abort) -> None:
        """The sender gives up."""
        if abort.epoch != self._settings.epoch:
            return  # meant for the process before; its lease ids are ours now
        self._end(
            lambda lease: lease.lease_id == abort.lease_id and lease.peer_id == peer_id,
            FailureCode.CANCELLED,
            f"aborted: {abort.reason}",
        )

    def cancel(self, request_id: str, attempt: int) -> None:
        """The gateway takes the request back."""
        self._end(lambda lease: lease.key == (request_id, attempt), FailureCode.CANCELLED, "cancelled by the gateway")

    def abort_peer(self, peer_id: str) -> None:
        """The sender is gone."""
        self._end(lambda lease: lease.peer_id == peer_id, FailureCode.PEER_LOST, f"prefill worker {peer_id} is lost")

    def reap(self) -> None:
        """End the leases whose time is up."""
        now_s = self._clock()
        detail = f"no traffic for {self._settings.ttl_s:g} s"
        self._end(lambda lease: lease.expires_s <= now_s, FailureCode.LEASE_EXPIRED, detail)

    def snapshot(self) -> list[dict[str, Any]]:
        """Every lease, for /debug/kv."""
        now_s = self._clock()
        with self._lock:
            return [
                {
                    "lease_id": lease.lease_id,
                    "request_id": lease.offer.request_id,
                    "attempt": lease.offer.attempt,
                    "state": lease.state.value,
                    "blocks": len(lease.block_ids),
                    "cached": lease.num_cached,
                    "received": len(lease.received),
                    "expires_in_s": round(lease.expires_s - now_s, 3),
                }
                for lease in self._leases.values()
            ]

    # -- the receiver thread ---------------------------------------------------------------------------------------

    def begin_block(self, header: BlockHeader) -> None:
        """Open the pool's block for the payload of ``header``; ``finish_block`` must follow. Raises BlockRefusedError."""
        with self._lock:
            if header.epoch != self._settings.epoch:
                raise self._refused("stale_epoch", f"epoch {header.epoch}; this process is {self._settings.epoch}")
            lease = self._leases.get(header.lease_id)
            if lease is None or lease.state.is_over:
                raise self._refused("unknown_lease", f"lease {header.lease_id} is not live")
            if header.block_index in lease.received or header.block_index < lease.num_cached:
                raise self._refused("duplicate", f"block {header.block_index} of lease {header.lease_id} is there")
            refusal = self._mismatch(lease, header)
            if refusal is None:
                lease.writing = self._store.open_write(lease.block_ids[header.block_index])
                return
            self._doom(lease, FailureCode.INTEGRITY, str(refusal))
        self._settle(lease)
        raise refusal

    def finish_block(self, header: BlockHeader, payload: memoryview | None) -> None:
        """Write what came (None: not one payload frame) into the pool's block and prove it there. Raises BlockRefusedError."""
        with self._lock:
            lease = self._leases[header.lease_id]
            block_id, view = lease.block_ids[header.block_index], lease.writing
        assert view is not None, f"block {header.block_index} of lease {header.lease_id} is finished, but was not begun"
        # Outside of the lock: nobody else may touch this block now.
        refusal = self._land(header, payload, view, lease.opener)
        self._store.close_write(block_id)
        with self._lock:
            lease.writing = None
            if lease.state is HandoffState.ABORTING:
                pass  # the lease ended during the write; it is settled below
            elif refusal is not None:
                self._doom(lease, FailureCode.INTEGRITY, f"{refusal.cause_name}: {refusal}")
            else:
                lease.received.add(header.block_index)
                if lease.state is HandoffState.GRANTED:
                    lease.advance(HandoffState.SHIPPING)
                self._touch(lease)
                self._metrics.blocks_received.inc()
                self._metrics.bytes_received.inc(header.payload_nbytes)
        self._settle(lease)
        if refusal is not None:
            raise refusal

    def count_bad_header(self) -> None:
        """A frame came that is no block at all."""
        self._metrics.refused_blocks.labels("bad_header").inc()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _unfit(self, offer: Offer) -> tuple[FailureCode, str] | None:
        """Why the offer can be granted at no time; None if only room decides."""
        if offer.fingerprint != self._settings.fingerprint:
            self._metrics.handoffs.labels("refused_fingerprint").inc()
            detail = f"fingerprint {offer.fingerprint.hex()} offered, {self._settings.fingerprint.hex()} served"
            return (FailureCode.LAYOUT_MISMATCH, detail)
        try:
            hashes = chain_hashes(self._root_hash, offer.token_ids, self._settings.block_size)
        except OverflowError as error:
            return (FailureCode.INVALID, f"a token id cannot be one: {error}")
        if not hashes:
            return (FailureCode.INVALID, "an offer of no tokens")
        if hashes != offer.block_hashes:
            self._metrics.handoffs.labels("refused_hashes").inc()
            return (FailureCode.INTEGRITY, "the block hashes are not those of the tokens")
        return None

    def _mismatch(self, lease: _Lease, header: BlockHeader) -> BlockRefusedError | None:
        hashes = lease.offer.block_hashes
        if header.is_sealed != (lease.opener is not None):
            came, taken = ("sealed", "plain") if header.is_sealed else ("plain", "sealed")
            return self._refused("wrong_seal", f"a {came} block; lease {header.lease_id} takes {taken} ones only")
        if header.block_index >= len(hashes):
            return self._refused("wrong_block", f"block {header.block_index} of {len(hashes)}")
        if header.block_hash != hashes[header.block_index]:
            return self._refused("wrong_block", f"block {header.block_index} has another block's hash")
        if header.payload_nbytes != self._store.block_nbytes:
            detail = f"{header.payload_nbytes} bytes announced, a block has {self._store.block_nbytes}"
            return self._refused("bad_size", detail)
        return None

    def _land(
        self, header: BlockHeader, payload: memoryview | None, view: memoryview, opener: BlockOpener | None
    ) -> BlockRefusedError | None:
        """Write the payload into ``view`` and prove it; returns why it is refused, if it is."""
        nbytes = 0 if payload is None else len(payload)
        expected_nbytes = header.payload_nbytes + (0 if opener is None else TAG_NBYTES)
        if payload is None or nbytes != expected_nbytes:
            return self._refused("bad_size", f"{nbytes} bytes came, {expected_nbytes} were announced")
        if opener is not None:
            if not opener.open(header, payload, view):
                return self._refused("bad_seal", f"block {header.block_index} of lease {header.lease_id}")
            return None
        view[:] = payload
        # Over the memory that the model will read, not over the frame.
        if header.checksum_of(view) != header.checksum:
            return self._refused("bad_checksum", f"block {header.block_index} of lease {header.lease_id}")
        return None

    def _refused(self, cause: str, detail: str) -> BlockRefusedError:
        self._metrics.refused_blocks.labels(cause).inc()
        return BlockRefusedError(cause, detail)

    def _live(self, peer_id: str, lease_id: int, epoch: int) -> _Lease | None:
        """The lease, if it is live and ``peer_id``'s: nobody speaks for another worker's hand-off."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.state.is_over or lease.peer_id != peer_id or epoch != self._settings.epoch:
            return None
        return lease

    def _touch(self, lease: _Lease) -> None:
        lease.expires_s = self._clock() + self._settings.ttl_s

    def _end(self, concerns: Callable[[_Lease], bool], code: FailureCode, detail: str) -> None:
        with self._lock:
            doomed = [lease for lease in self._leases.values() if not lease.state.is_over and concerns(lease)]
            for lease in doomed:
                self._doom(lease, code, detail)
        for lease in doomed:
            self._settle(lease)

    def _doom(self, lease: _Lease, code: FailureCode, detail: str) -> None:
        lease.failure = (code, detail)
        lease.advance(HandoffState.ABORTING)

    def _settle(self, lease: _Lease) -> None:
        """Bring a lease to its end if it has reached one; exactly one caller gets to tell the handler."""
        verified: VerifiedLease | None = None
        with self._lock:
            if lease.lease_id not in self._leases or lease.writing is not None:
                return
            if lease.state is HandoffState.ABORTING:
                lease.advance(HandoffState.ABORTED)
                self._blocks.release(lease.lease_key)
            elif lease.state is HandoffState.COMMITTED and lease.is_complete:
                lease.advance(HandoffState.VERIFIED)
                for index in range(len(lease.offer.token_ids) // self._settings.block_size):
                    self._blocks.publish(lease.lease_key, index, lease.offer.block_hashes[index])
                assert lease.commit is not None
                verified = VerifiedLease(
                    lease_id=lease.lease_id,
                    lease_key=lease.lease_key,
                    peer_id=lease.peer_id,
                    offer=lease.offer,
                    commit=lease.commit,
                    block_ids=lease.block_ids,
                    transfer_s=self._clock() - lease.committed_s,
                )
            else:
                return
            del self._leases[lease.lease_id], self._by_key[lease.key]
        if verified is not None:
            self._metrics.handoffs.labels("verified").inc()
            self._metrics.transfer_s.observe(verified.transfer_s)
            self._handler.on_lease_verified(verified)
            return
        assert lease.failure is not None
        code, detail = lease.failure
        self._metrics.handoffs.labels(code.value).inc()
        self._handler.on_lease_rejected(lease.lease_id, lease.peer_id, lease.key, code, detail)
