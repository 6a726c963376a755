"""The sending side of hand-offs: offer, ship granted blocks as they are computed, commit, wait for the verdict.

``open`` makes a transfer. It ends with exactly one of ``on_verified`` and ``on_failed``, or silently after ``abort``. After that
``on_blocks_released`` is called exactly once, when no send in flight reads the blocks any more. Only then may they be reused.

Network thread only; nothing here blocks. The service reports computed blocks with ``blocks_ready``.
"""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.common.kv_geometry import KvGeometry
from kvrelay.common.sampling import SampledToken
from kvrelay.wire.blocks.frames import BlockHeader
from kvrelay.wire.blocks.pieces import pieces_of
from kvrelay.wire.blocks.seal import KEY_NBYTES, BlockSealer
from kvrelay.wire.errors import WireError
from kvrelay.wire.leases.states import HandoffState
from kvrelay.wire.messages import (
    Abort,
    Commit,
    FailureCode,
    Grant,
    Message,
    Offer,
    Refuse,
    Reject,
    Renew,
    Verified,
)
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.transfers.transfer import DecodeLink, Key, ReadableStore, Transfer, TransferHandler, TransferSettings


class TransferTable:
    """All transfers of one prefill worker."""

    def __init__(
        self,
        store: ReadableStore,
        geometry: KvGeometry,
        handler: TransferHandler,
        settings: TransferSettings,
        metrics: WireMetrics,
        clock: Callable[[], float],
    ) -> None:
        """``geometry``: of the blocks in ``store``."""
        self._store = store
        self._pieces = pieces_of(geometry)
        self._block_size = geometry.block_size
        self._handler = handler
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._transfers: dict[Key, Transfer] = {}
        self._by_lease: dict[tuple[DecodeLink, int], Transfer] = {}

    def open(self, key: Key, link: DecodeLink, offer: Offer, block_tables: list[list[int]]) -> None:
        """Offer a request. Computed blocks that are to be sent must stay readable until ``on_blocks_released``.

        ``block_tables``: one for each group, in order. The caller owns them and may append to them on another thread, because a
        group with a window gets blocks as it needs them.

        Raises ValueError if the key is open already, or if a group without a window lacks a block for an offered hash.
        """
        if key in self._transfers:
            raise ValueError(f"a transfer of request {key} is already open")
        for piece in self._pieces:
            if piece.window is None and (count := len(block_tables[piece.group])) != len(offer.block_hashes):
                raise ValueError(f"request {key}: {count} blocks for {len(offer.block_hashes)} offered hashes")
        first_blocks = tuple(piece.first_block(len(offer.token_ids), self._block_size) for piece in self._pieces)
        transfer = Transfer(key, link, offer, block_tables, first_blocks, self._clock())
        self._transfers[key] = transfer
        if not link.control.send(offer):
            self._fail(transfer, FailureCode.PEER_LOST, "the decode worker's link went down before the offer")

    def blocks_ready(self, key: Key, num_blocks: int) -> None:
        """The K/V of the leading ``num_blocks`` blocks are complete; ship what may be shipped."""
        transfer = self._transfers.get(key)
        if transfer is not None and not transfer.state.is_over:
            transfer.num_ready = max(transfer.num_ready, num_blocks)
            self._ship(transfer)

    def commit(self, key: Key, first_token: SampledToken, num_cached_tokens: int, position_offset: int = 0) -> None:
        """Everything is computed; the commit follows the last block. The arguments are those of ``Commit``."""
        transfer = self._transfers.get(key)
        if transfer is not None and not transfer.state.is_over:
            transfer.num_ready = len(transfer.offer.block_hashes)
            transfer.commit = (first_token, num_cached_tokens, position_offset)
            self._ship(transfer)

    def abort(self, key: Key, reason: str) -> None:
        """Give a transfer up, in any state; only ``on_blocks_released`` follows."""
        transfer = self._transfers.get(key)
        if transfer is not None and not transfer.state.is_over:
            if transfer.lease is not None:
                transfer.link.control.send(
                    Abort(lease_id=transfer.lease.lease_id, epoch=transfer.lease.epoch, reason=reason)
                )
            self._end(transfer, "aborted")

    def left_s(self, key: Key) -> float:
        """When a block last left over the link of a transfer whose blocks are not released. Of any transfer: they share a line."""
        return self._transfers[key].link.left_s

    def on_message(self, link: DecodeLink, message: Message) -> None:
        """An answer from a decode worker."""
        match message:
            case Grant():
                self._on_grant(link, message)
            case Refuse():
                transfer = self._transfers.get(message.key)
                if transfer is not None and transfer.link is link and transfer.state is HandoffState.OFFERED:
                    self._fail(transfer, message.code, message.detail, message.retry_after_s)
            case Verified(lease_id=lease_id):
                transfer = self._by_lease.get((link, lease_id))
                if transfer is not None and transfer.state is HandoffState.COMMITTED:
                    self._end(transfer, "verified")
                    self._handler.on_verified(transfer.key)
                    self._release_if_idle(transfer)
            case Reject(lease_id=lease_id):
                transfer = self._by_lease.get((link, lease_id))
                if transfer is not None and not transfer.state.is_over:
                    self._fail(transfer, message.code, message.detail)
            case _:
                raise ValueError(f"{type(message).__name__} is not an answer to a prefill worker")

    def on_link_lost(self, link: DecodeLink) -> None:
        """The decode worker is gone; its data socket must be closed already, which ends all sends in flight."""
        for transfer in [transfer for transfer in self._transfers.values() if transfer.link is link]:
            if not transfer.state.is_over:
                self._fail(transfer, FailureCode.PEER_LOST, "the decode worker is lost")

    def tick(self) -> None:
        """Time passes: renew leases, give up on silent peers, release blocks whose sends are over."""
        now_s = self._clock()
        for transfer in list(self._transfers.values()):
            transfer.close_done(self._store, self._clock())
            waited_s = now_s - max(transfer.since_s, transfer.progress_s)
            if transfer.state is HandoffState.OFFERED and waited_s > self._settings.grant_timeout_s:
                self._fail(transfer, FailureCode.PEER_LOST, f"no answer to the offer for {waited_s:.0f} s")
            elif transfer.state is HandoffState.COMMITTED and waited_s > self._settings.verify_timeout_s:
                if transfer.leads_nowhere(now_s, self._settings.verify_timeout_s):
                    transfer.link.data.give_up()
                detail = f"no verdict on the commit for {waited_s:.0f} s"
                self.abort(transfer.key, detail)
                self._handler.on_failed(transfer.key, FailureCode.PEER_LOST, detail, None)
            elif transfer.lease is not None and not transfer.state.is_over:
                if now_s - transfer.renewed_s > transfer.lease.ttl_s / 3:
                    transfer.renewed_s = now_s
                    transfer.link.control.send(Renew(lease_id=transfer.lease.lease_id, epoch=transfer.lease.epoch))
            elif transfer.state.is_over:
                self._release_if_idle(transfer)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _on_grant(self, link: DecodeLink, grant: Grant) -> None:
        transfer = self._transfers.get(grant.key)
        if transfer is None or transfer.state is not HandoffState.OFFERED or transfer.link is not link:
            # Aborted while the grant was on its way: tell the receiver, so that its lease need not time out.
            link.control.send(Abort(lease_id=grant.lease_id, epoch=grant.epoch, reason="granted too late"))
            return
        unfit = _unfit_key(grant.seal_key, link.seals_kv)
        if unfit is not None:
            # Checked before the first block: a block that must be sealed must never travel plain.
            link.control.send(Abort(lease_id=grant.lease_id, epoch=grant.epoch, reason=unfit))
            self._fail(transfer, FailureCode.LAYOUT_MISMATCH, unfit)
            return
        now_s = self._clock()
        transfer.advance(HandoffState.GRANTED, now_s)
        transfer.lease, transfer.renewed_s = grant, now_s
        transfer.sealer = None if grant.seal_key is None else BlockSealer(grant.seal_key)
        transfer.next_block = grant.num_cached_blocks
        self._by_lease[(link, grant.lease_id)] = transfer
        self._ship(transfer)

    def _ship(self, transfer: Transfer) -> None:
        grant = transfer.lease
        if grant is None:
            return
        while transfer.next_block < transfer.num_ready:
            for piece_index in range(len(self._pieces)):
                if transfer.first_blocks[piece_index] <= transfer.next_block:
                    try:
                        self._ship_piece(transfer, grant, piece_index)
                    except WireError as error:  # the connection is dead; the control link will notice it next
                        self._fail(transfer, FailureCode.PEER_LOST, str(error))
                        return
            transfer.next_block += 1
        if transfer.commit is not None and transfer.state in (HandoffState.GRANTED, HandoffState.SHIPPING):
            first_token, num_cached_tokens, position_offset = transfer.commit
            transfer.advance(HandoffState.COMMITTED, self._clock())
            transfer.link.control.send(
                Commit(
                    lease_id=grant.lease_id,
                    epoch=grant.epoch,
                    chain_hash=transfer.offer.block_hashes[-1],
                    first_token=first_token,
                    num_cached_tokens=num_cached_tokens,
                    position_offset=position_offset,
                )
            )

    def _ship_piece(self, transfer: Transfer, grant: Grant, piece_index: int) -> None:
        """Of the next block. Raises WireError, and nothing is shipped."""
        piece, index = self._pieces[piece_index], transfer.next_block
        block_id = transfer.block_tables[piece.group][index]
        payload = self._store.open_read(block_id, piece.group)
        header = BlockHeader(
            lease_id=grant.lease_id,
            epoch=grant.epoch,
            block_index=index,
            payload_nbytes=piece.nbytes,
            block_hash=transfer.offer.block_hashes[index],
            piece_index=piece_index,
        )
        try:
            ticket = transfer.link.data.send(header, payload, transfer.sealer)
        except WireError:
            self._store.close_read(block_id)
            raise
        transfer.tickets.append((block_id, ticket))
        if transfer.state is HandoffState.GRANTED:
            transfer.advance(HandoffState.SHIPPING, self._clock())

    def _fail(self, transfer: Transfer, code: FailureCode, detail: str, retry_after_s: float | None = None) -> None:
        self._end(transfer, code.value)
        self._handler.on_failed(transfer.key, code, detail, retry_after_s)

    def _end(self, transfer: Transfer, outcome: str) -> None:
        """The transfer is over. Its blocks are released by the next ``tick`` that finds no send in flight."""
        new_state = HandoffState.VERIFIED if outcome == "verified" else HandoffState.ABORTING
        transfer.advance(new_state, self._clock())
        self._metrics.handoffs.labels(outcome).inc()
        if transfer.lease is not None:
            del self._by_lease[(transfer.link, transfer.lease.lease_id)]
        if outcome != "verified":
            for _, ticket in transfer.tickets:
                ticket.call_off()  # blocks that are still queued need not be sent

    def _release_if_idle(self, transfer: Transfer) -> None:
        transfer.close_done(self._store, self._clock())
        if not transfer.tickets and self._transfers.get(transfer.key) is transfer:
            if transfer.state is HandoffState.ABORTING:
                transfer.advance(HandoffState.ABORTED, self._clock())
            del self._transfers[transfer.key]
            self._handler.on_blocks_released(transfer.key)


def _unfit_key(seal_key: bytes | None, seals_kv: bool) -> str | None:
    """Why a grant's key breaks the agreement of Hello; None if it keeps it."""
    if (seal_key is not None) is not seals_kv:
        return f"agreed on {'sealed' if seals_kv else 'plain'} KV blocks, but granted {'no' if seals_kv else 'a'} key"
    if seal_key is not None and len(seal_key) != KEY_NBYTES:
        return f"granted a key of {len(seal_key)} bytes; it must have {KEY_NBYTES}"
    return None
