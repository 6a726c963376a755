"""The receiving side of hand-offs: leases on KV blocks, and the checks that each received piece of a block must pass.

``offer`` makes a lease. It ends in exactly one call of the handler: ``on_lease_verified`` (every block is verified, and the handler
owns the blocks from then on) or ``on_lease_rejected`` (its blocks are released). Each frame is checked for:

    epoch        the frame was written for this process, not for an earlier one under the same address
    lease        the lease is live; a lease id is never used twice
    index, hash  the block is the one that the offer promised at this place: same model, tokens and position
    piece        the sender has this piece, and the window of the piece's group reaches the block; a block is verified when all
                 pieces that are sent of it are verified
    size         exactly that piece
    checksum     over the header and over the bytes in *pool memory* after the write;
    or seal      of sealed blocks: decryption into pool memory shows that the lease's peer sealed this header and payload

A frame of another epoch, of a lease that is over, or for a piece that is verified already, is dropped and counted.

*With* seals every other frame that fails a check is dropped and counted, too. Anybody may have sent it, so it must not hurt the
lease. It may have overwritten its piece's memory. Nothing reads that memory until a frame for this piece has authenticated, and
that frame overwrites it. A frame for a piece that another thread is writing waits for the result, because it may be the genuine
frame. A committed lease that had a frame dropped ends one second after its last genuine piece, because the missing piece may never
come. A dropped frame with another lease's id, or with an unknown one, does not shorten this lease's time.

*Without* seals a frame that fails a check ends the lease. Whoever reaches the port could also send frames that pass.

Thread-safe. The network thread offers, commits, aborts and reaps. Receiver threads, at least one for TCP and one for shared memory,
begin and finish pieces. A piece has one writer at a time. A lease ends when its last writer has left. The handler is called without
the lock held, on any of these threads.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from kvrelay.common.block_hash import HashChain
from kvrelay.wire.blocks.frames import BlockHeader, Place
from kvrelay.wire.blocks.seal import BlockOpener, new_key
from kvrelay.wire.errors import BlockRefusedError
from kvrelay.wire.leases.landing import begin_landing, misfit
from kvrelay.wire.leases.lease import (
    BlockReservations,
    Lease,
    LeaseHandler,
    LeaseSettings,
    VerifiedLease,
    WritableStore,
)
from kvrelay.wire.leases.states import HandoffState
from kvrelay.wire.messages import Abort, Commit, FailureCode, Grant, Offer, Refuse, Renew
from kvrelay.wire.metrics import WireMetrics

_LEASE_ID_BITS = 64  # random, so that a stranger cannot guess the id of a lease
_DOUBT_S = 1.0  # time that a committed lease has after a frame was dropped


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
        self._lock = threading.RLock()
        self._verdict = threading.Condition(self._lock)  # notified when the write of a piece ends
        self._leases: dict[int, Lease] = {}

    @property
    def seals_kv(self) -> bool:
        """Whether blocks must come sealed."""
        return self._settings.seals_kv

    # -- the network thread ----------------------------------------------------------------------------------------

    def offer(self, peer_id: str, offer: Offer) -> Grant | Refuse:
        """Reserve blocks for the offered tokens, and for the first token after them."""
        key = offer.key

        def refuse(code: FailureCode, detail: str, retry_after_s: float | None = None) -> Refuse:
            return Refuse(request_id=key[0], attempt=key[1], code=code, detail=detail, retry_after_s=retry_after_s)

        block_size = self._settings.block_size
        chain = HashChain(
            self._settings.fingerprint,
            block_size,
            cache_salt=offer.cache_salt,
            adapter=offer.adapter,
            images=offer.images,
        )
        unfit = self._unfit(offer, chain)
        if unfit is not None:
            return refuse(*unfit)
        num_tokens = len(offer.token_ids)
        num_full, num_blocks = num_tokens // block_size, num_tokens // block_size + 1
        with self._lock:
            if any(lease.key == key for lease in self._leases.values()):
                return refuse(FailureCode.INVALID, f"attempt {key[1]} of request {key[0]} is already leased")
            lease_id = secrets.randbits(_LEASE_ID_BITS)
            reserved = self._blocks.reserve(str(lease_id), num_blocks, offer.block_hashes[:num_full], num_tokens)
            if reserved is None:
                self._metrics.handoffs.labels("refused_no_room").inc()
                return refuse(FailureCode.NO_ROOM, f"no room for {num_blocks} KV blocks", retry_after_s=0.5)
            tables, num_cached = reserved
            seal_key = new_key() if self._settings.seals_kv else None
            opener = None if seal_key is None else BlockOpener(seal_key)
            expires_s = self._clock() + self._settings.ttl_s
            pieces = self._settings.pieces
            firsts = tuple(piece.first_block(num_tokens, block_size) for piece in pieces)
            lease = Lease(lease_id, peer_id, offer, chain, tables, num_cached, pieces, firsts, expires_s, opener)
            self._leases[lease_id] = lease
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
        """The sender has sent everything. The lease is verified now, or with its last block."""
        with self._lock:
            lease = self._live(peer_id, commit)
            if lease is None or lease.commit is not None:
                return
            lease.commit, lease.committed_s = commit, self._clock()
            lease.advance(HandoffState.COMMITTED)
            self._touch(lease)
            if commit.chain_hash != lease.offer.block_hashes[-1]:
                self._doom(lease, FailureCode.INTEGRITY, "the commit's chain hash is not that of the offer")
        self._settle(lease)

    def reject(self, peer_id: str, commit: Commit, detail: str) -> None:
        """End the lease, because the model's service found that the sender's commit cannot be right."""
        self._end(lambda lease: lease is self._live(peer_id, commit), FailureCode.INTEGRITY, detail)

    def renew(self, peer_id: str, renew: Renew) -> None:
        """The sender still computes: extend the lease."""
        with self._lock:
            lease = self._live(peer_id, renew)
            if lease is not None:
                self._touch(lease)

    def abort(self, peer_id: str, abort: Abort) -> None:
        """The sender gives up: end the lease."""
        detail = f"aborted: {abort.reason}"
        self._end(lambda lease: lease is self._live(peer_id, abort), FailureCode.CANCELLED, detail)

    def cancel(
        self,
        request_id: str,
        attempt: int,
        code: FailureCode = FailureCode.CANCELLED,
        detail: str = "cancelled by the gateway",
    ) -> None:
        """End the lease, because no client waits for the request any more."""
        self._end(lambda lease: lease.key == (request_id, attempt), code, detail)

    def abort_peer(self, peer_id: str) -> None:
        """The sender is lost: end all its leases."""
        self._end(lambda lease: lease.peer_id == peer_id, FailureCode.PEER_LOST, f"prefill worker {peer_id} is lost")

    def reap(self) -> None:
        """End the leases whose time is over. Call it regularly."""
        now_s = self._clock()
        self._end(
            lambda lease: lease.expires_s <= now_s and lease.is_doubted,
            FailureCode.INTEGRITY,
            "frames came that did not authenticate, and blocks are missing",
        )
        detail = f"no traffic for {self._settings.ttl_s:g} s"
        self._end(lambda lease: lease.expires_s <= now_s, FailureCode.LEASE_EXPIRED, detail)

    def snapshot(self) -> list[dict[str, Any]]:
        """Every lease, for /debug/kv."""
        now_s = self._clock()
        with self._lock:
            return [lease.snapshot(now_s) for lease in self._leases.values()]

    # -- the receiver threads --------------------------------------------------------------------------------------

    def begin_piece(self, header: BlockHeader) -> None:
        """Reserve the place of ``header``'s piece in the pool. ``write_piece`` must follow. Raises BlockRefusedError.

        On a lease with seals this waits while another thread writes the piece.
        """
        place = header.place
        with self._lock:
            if header.epoch != self._settings.epoch:
                raise self._refused("stale_epoch", f"epoch {header.epoch}; this process is {self._settings.epoch}")
            lease = self._leases.get(header.lease_id)
            if lease is None or lease.state.is_over:
                raise self._refused("unknown_lease", f"lease {header.lease_id} is not live")
            if place in lease.received or header.block_index < lease.num_cached:
                raise self._refused("duplicate", f"{header} is there")
            is_sealed = lease.opener is not None
            refusal = misfit(header, lease.offer.block_hashes, lease.pieces, lease.first_blocks, is_sealed=is_sealed)
            if refusal is None:
                if is_sealed:
                    self._verdict.wait_for(lambda: place not in lease.writing)
                    if lease.state.is_over:
                        raise self._refused("unknown_lease", f"lease {header.lease_id} is not live")
                if place in lease.received or place in lease.writing:
                    raise self._refused("duplicate", f"{header} came already")
                lease.writing.add(place)
                return
            self._counted(refusal)
            self._doubt(lease, refusal)
        self._settle(lease)
        raise refusal

    def write_piece(self, header: BlockHeader, payload: memoryview | None) -> Callable[[], None]:
        """Begin to write the payload (None: not exactly one frame came) into its place.

        Call the result, on the same thread: it verifies the piece there, and raises BlockRefusedError. A thread may begin several
        plain pieces first. ``payload`` must not change until then.
        """
        place = header.place
        with self._lock:
            lease = self._leases[header.lease_id]
            assert place in lease.writing, f"{header} is written, but was not begun"
            group = lease.pieces[header.piece_index].group
            block_id = lease.block_tables[group][header.block_index]
        # Without the lock: no other thread may touch this piece now, and a write may take a while.
        try:
            verify = begin_landing(header, payload, self._store, block_id, group, lease.opener)
        except BaseException:  # the pool failed and this thread dies: other threads must not wait for it
            self._leave(lease, place)
            raise
        return partial(self._finish_piece, lease, header, verify)

    def _finish_piece(self, lease: Lease, header: BlockHeader, verify: Callable[[], BlockRefusedError | None]) -> None:
        place = header.place
        try:
            refusal = verify()
        except BaseException:  # as above
            self._leave(lease, place)
            raise
        if refusal is not None:
            self._counted(refusal)
        with self._lock:
            self._leave(lease, place)
            if lease.state is HandoffState.ABORTING:
                pass  # the lease ended during the write; it is settled below
            elif refusal is not None:
                self._doubt(lease, refusal)
            else:
                self._metrics.blocks_received.inc(lease.receive(place))
                if lease.state is HandoffState.GRANTED:
                    lease.advance(HandoffState.SHIPPING)
                self._touch(lease)
                self._metrics.bytes_received.inc(header.payload_nbytes)
        self._settle(lease)
        if refusal is not None:
            raise refusal

    def count_bad_header(self) -> None:
        """Count a frame without a valid block header."""
        self._metrics.refused_blocks.labels("bad_header").inc()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _unfit(self, offer: Offer, chain: HashChain) -> tuple[FailureCode, str] | None:
        """Why the offer can never be granted; None if it only needs free blocks."""
        if offer.fingerprint != self._settings.fingerprint:
            self._metrics.handoffs.labels("refused_fingerprint").inc()
            detail = f"fingerprint {offer.fingerprint.hex()} offered, {self._settings.fingerprint.hex()} served"
            return (FailureCode.LAYOUT_MISMATCH, detail)
        try:
            hashes = chain.hashes_of_all(offer.token_ids)
        except OverflowError as error:
            return (FailureCode.INVALID, f"a token id cannot be one: {error}")
        if not hashes:
            return (FailureCode.INVALID, "an offer of no tokens")
        if hashes != offer.block_hashes:
            self._metrics.handoffs.labels("refused_hashes").inc()
            return (FailureCode.INTEGRITY, "the block hashes are not those of the tokens")
        return None

    def _refused(self, cause: str, detail: str) -> BlockRefusedError:
        return self._counted(BlockRefusedError(cause, detail))

    def _counted(self, refusal: BlockRefusedError) -> BlockRefusedError:
        self._metrics.refused_blocks.labels(refusal.cause_name).inc()
        return refusal

    def _live(self, peer_id: str, about: Commit | Renew | Abort) -> Lease | None:
        """The lease, if it is live and belongs to ``peer_id``. A worker cannot act on another worker's lease."""
        lease = self._leases.get(about.lease_id)
        if lease is None or lease.state.is_over or lease.peer_id != peer_id or about.epoch != self._settings.epoch:
            return None
        return lease

    def _touch(self, lease: Lease) -> None:
        ttl_s = self._settings.ttl_s
        lease.expires_s = self._clock() + (min(_DOUBT_S, ttl_s) if lease.is_doubted else ttl_s)

    def _leave(self, lease: Lease, place: Place) -> None:
        """End the write of a piece."""
        with self._lock:
            lease.writing.remove(place)
            self._verdict.notify_all()

    def _doubt(self, lease: Lease, refusal: BlockRefusedError) -> None:
        """A frame failed a check. Without seals this ends the lease. With seals the frame is dropped."""
        if lease.opener is None:
            self._doom(lease, FailureCode.INTEGRITY, f"{refusal.cause_name}: {refusal}")
            return
        lease.has_dropped = True
        if lease.is_doubted:  # further bad frames do not extend its time
            lease.expires_s = min(lease.expires_s, self._clock() + _DOUBT_S)

    def _end(self, concerns: Callable[[Lease], bool], code: FailureCode, detail: str) -> None:
        with self._lock:
            doomed = [lease for lease in self._leases.values() if not lease.state.is_over and concerns(lease)]
            for lease in doomed:
                self._doom(lease, code, detail)
        for lease in doomed:
            self._settle(lease)

    def _doom(self, lease: Lease, code: FailureCode, detail: str) -> None:
        lease.failure = (code, detail)
        lease.advance(HandoffState.ABORTING)

    def _settle(self, lease: Lease) -> None:
        """Finish a lease that has reached its end. Exactly one caller tells the handler."""
        verified: VerifiedLease | None = None
        with self._lock:
            if lease.lease_id not in self._leases or lease.writing:
                return
            if lease.state is HandoffState.ABORTING:
                lease.advance(HandoffState.ABORTED)
                self._blocks.release(lease.lease_key)
            elif lease.state is HandoffState.COMMITTED and lease.is_complete:
                lease.advance(HandoffState.VERIFIED)
                for index in range(len(lease.offer.token_ids) // self._settings.block_size):
                    self._blocks.publish(lease.lease_key, index, lease.offer.block_hashes[index])
                verified = lease.verified(self._clock())
            else:
                return
            del self._leases[lease.lease_id]
        if verified is not None:
            self._metrics.handoffs.labels("verified").inc()
            self._metrics.transfer_s.observe(verified.transfer_s)
            self._handler.on_lease_verified(verified)
            return
        assert lease.failure is not None
        code, detail = lease.failure
        self._metrics.handoffs.labels(code.value).inc()
        self._handler.on_lease_rejected(lease.lease_id, lease.peer_id, lease.key, code, detail)
