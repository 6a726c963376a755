"""The sending side of hand-offs: offer, ship granted blocks as they are computed, commit, wait for the verdict.

``open`` makes a transfer. It ends with exactly one of ``on_verified`` and ``on_failed``, or silently after ``abort``. After that
``on_blocks_released`` is called exactly once, when no send in flight reads the blocks any more. Only then may they be reused.

Network thread only; nothing here blocks. The service reports computed blocks with ``blocks_ready``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvrelay.common.kv_geometry import KvGeometry
from kvrelay.common.late_bytes import LateBytes
from kvrelay.common.sampling import SampledToken
from kvrelay.wire.blocks.frames import BlockHeader
from kvrelay.wire.blocks.pieces import pieces_of
from kvrelay.wire.blocks.seal import KEY_NBYTES, BlockSealer
from kvrelay.wire.blocks.send_job import SendTicket
from kvrelay.wire.errors import WireError
from kvrelay.wire.leases.states import HandoffState, advance
from kvrelay.wire.lines.block_sender import BlockSender
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

Key = tuple[str, int]

_U64 = 2**64


class MessageSender(Protocol):
    """A control link (kvrelay.wire.control.client.ControlClient)."""

    def send(self, message: Message) -> bool:
        """Queue a message; False if the link is down."""


@dataclass(slots=True, eq=False)
class DecodeLink:
    """Both connections to one start of one decode worker."""

    control: MessageSender
    data: BlockSender
    seals_kv: bool = False  # whether all blocks must be sealed, as agreed at Hello
    left_s: float = -math.inf  # when a block of any transfer last left


class ReadableStore(Protocol):
    """The pool's bytes, as a transfer sees them (see kvrelay.engine.step.interface.BlockStore)."""

    def open_read(self, block_id: int, group: int) -> memoryview | LateBytes:
        """Open a block for reading: its bytes, or a handle for bytes that are on their way from a device."""

    def close_read(self, block_id: int) -> None:
        """The bytes are no longer read."""


class TransferHandler(Protocol):
    """Hears how transfers end."""

    def on_verified(self, key: Key) -> None:
        """The decode worker owns the sequence."""

    def on_failed(self, key: Key, code: FailureCode, detail: str, retry_after_s: float | None) -> None:
        """The transfer is over, and the decode worker has nothing of it."""

    def on_blocks_released(self, key: Key) -> None:
        """No send in flight reads the blocks."""


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """Bounds on a silent peer. In seconds."""

    grant_timeout_s: float = 10.0  # longest wait for the answer to an offer
    verify_timeout_s: float = 30.0  # longest wait for the verdict after the commit, while no block leaves


@dataclass(slots=True, eq=False)
class _Transfer:
    key: Key
    link: DecodeLink
    offer: Offer
    block_tables: list[list[int]]  # by group
    first_blocks: tuple[int, ...]  # for each piece: the first block that is sent
    since_s: float  # of the state
    state: HandoffState = HandoffState.OFFERED
    lease: Grant | None = None
    sealer: BlockSealer | None = None
    renewed_s: float = 0.0
    progress_s: float = 0.0  # when a block last left
    num_ready: int = 0
    next_block: int = 0  # the first block that is neither sent nor cached at the receiver
    commit: tuple[SampledToken, int, int] | None = None  # what ``TransferTable.commit`` was told
    tickets: list[tuple[int, SendTicket]] = field(default_factory=list)

    def advance(self, state: HandoffState, now_s: float) -> None:
        self.state = advance(self.state, state, f"transfer of request {self.key}")
        self.since_s = now_s


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
        self._transfers: dict[Key, _Transfer] = {}
        self._by_lease: dict[tuple[DecodeLink, int], _Transfer] = {}

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
        transfer = _Transfer(key, link, offer, block_tables, first_blocks, self._clock())
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
            case Refuse(request_id=request_id, attempt=attempt):
                transfer = self._transfers.get((request_id, attempt))
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
            self._close_done(transfer)
            waited_s = now_s - max(transfer.since_s, transfer.progress_s)
            if transfer.state is HandoffState.OFFERED and waited_s > self._settings.grant_timeout_s:
                self._fail(transfer, FailureCode.PEER_LOST, f"no answer to the offer for {waited_s:.0f} s")
            elif transfer.state is HandoffState.COMMITTED and waited_s > self._settings.verify_timeout_s:
                if self._leads_nowhere(transfer, now_s):
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
        transfer = self._transfers.get((grant.request_id, grant.attempt))
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

    def _ship(self, transfer: _Transfer) -> None:
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

    def _ship_piece(self, transfer: _Transfer, grant: Grant, piece_index: int) -> None:
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

    def _fail(self, transfer: _Transfer, code: FailureCode, detail: str, retry_after_s: float | None = None) -> None:
        self._end(transfer, code.value)
        self._handler.on_failed(transfer.key, code, detail, retry_after_s)

    def _end(self, transfer: _Transfer, outcome: str) -> None:
        """The transfer is over. Its blocks are released by the next ``tick`` that finds no send in flight."""
        new_state = HandoffState.VERIFIED if outcome == "verified" else HandoffState.ABORTING
        transfer.advance(new_state, self._clock())
        self._metrics.handoffs.labels(outcome).inc()
        if transfer.lease is not None:
            del self._by_lease[(transfer.link, transfer.lease.lease_id)]
        if outcome != "verified":
            for _, ticket in transfer.tickets:
                ticket.call_off()  # blocks that are still queued need not be sent

    def _leads_nowhere(self, transfer: _Transfer, now_s: float) -> bool:
        """Whether a missing verdict means that the data connection is broken for all transfers.

        The control link works, else it would be down. The data connection is broken if all blocks of this transfer have left, or
        if no block of any transfer leaves. If blocks of others leave, this transfer only waits behind them.
        """
        assert transfer.lease is not None, "a commit follows a grant"
        has_sent = transfer.next_block > transfer.lease.num_cached_blocks
        is_still = now_s - transfer.link.left_s > self._settings.verify_timeout_s
        return has_sent and (not transfer.tickets or is_still)

    def _close_done(self, transfer: _Transfer) -> None:
        """Close the reads that are over."""
        pending: list[tuple[int, SendTicket]] = []
        has_left = False
        for block_id, ticket in transfer.tickets:
            if ticket.is_done:
                self._store.close_read(block_id)
                has_left = has_left or ticket.was_taken  # a block that was called off in the queue never leaves
            else:
                pending.append((block_id, ticket))
        if has_left:
            transfer.progress_s = transfer.link.left_s = self._clock()
        transfer.tickets = pending

    def _release_if_idle(self, transfer: _Transfer) -> None:
        self._close_done(transfer)
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


def absurdity(message: Message) -> str | None:
    """Why ``message`` has impossible numbers; None if they are possible. They index blocks and go into block headers."""
    if not isinstance(message, Grant | Refuse | Verified | Reject):
        return f"{type(message).__name__} is not an answer to a prefill worker"
    if isinstance(message, Grant):
        if not (0 <= message.lease_id < _U64 and 0 <= message.epoch < _U64):
            return f"granted lease {message.lease_id} of epoch {message.epoch}; both must be 0 to {_U64 - 1}"
        if message.num_cached_blocks < 0:
            return f"granted a lease with {message.num_cached_blocks} cached blocks; it must be 0 at least"
    return None
