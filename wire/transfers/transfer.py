"""One hand-off, as its sender knows it: both connections, the state, and the sends in flight."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from kvrelay.common.late_bytes import LateBytes
from kvrelay.common.sampling import SampledToken
from kvrelay.wire.blocks.seal import BlockSealer
from kvrelay.wire.blocks.send_job import SendTicket
from kvrelay.wire.leases.states import HandoffState, advance
from kvrelay.wire.lines.block_sender import BlockSender
from kvrelay.wire.messages import FailureCode, Grant, Message, Offer, Refuse, Reject, Verified

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
class Transfer:
    """One hand-off, as its sender knows it."""

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
        """Enter ``state``. Raises ValueError if there is no such transition."""
        self.state = advance(self.state, state, f"transfer of request {self.key}")
        self.since_s = now_s

    def leads_nowhere(self, now_s: float, timeout_s: float) -> bool:
        """Whether a missing verdict means that the data connection is broken for all transfers.

        The control link works, else it would be down. The data connection is broken if all blocks of this transfer have left, or
        if no block of any transfer leaves for ``timeout_s``. If blocks of others leave, this transfer only waits behind them.
        """
        assert self.lease is not None, "a commit follows a grant"
        has_sent = self.next_block > self.lease.num_cached_blocks
        is_still = now_s - self.link.left_s > timeout_s
        return has_sent and (not self.tickets or is_still)

    def close_done(self, store: ReadableStore, now_s: float) -> None:
        """Close the reads that are over."""
        pending: list[tuple[int, SendTicket]] = []
        has_left = False
        for block_id, ticket in self.tickets:
            if ticket.is_done:
                store.close_read(block_id)
                has_left = has_left or ticket.was_taken  # a block that was called off in the queue never leaves
            else:
                pending.append((block_id, ticket))
        if has_left:
            self.progress_s = self.link.left_s = now_s
        self.tickets = pending


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
