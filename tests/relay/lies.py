"""What a sender may say of a block that is not so, each way refused under a name of its own."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvrelay.wire.block_frames import BlockHeader
from kvrelay.wire.block_sender import BlockSender
from kvrelay.wire.seal import BlockSealer, new_key
from kvrelay.wire.send_job import SendTicket

Sealer = BlockSealer | None
SendBlock = Callable[[BlockSender, BlockHeader, memoryview, Sealer], SendTicket]
honest: SendBlock = BlockSender.send


class _Raw:
    """Headers packed with a checksum of the sender's choice."""

    def __init__(self, header: BlockHeader, checksum_payload: memoryview) -> None:
        self._packed = header.pack(checksum_payload)

    def pack(self, payload: memoryview) -> bytes:
        return self._packed

    def pack_copying(self, payload: memoryview, target: memoryview, *, is_one_of_several: bool = False) -> bytes:
        target[:] = payload
        return self._packed


class Liar:
    """Replaces ``BlockSender.send``; lies about one block, then tells the truth."""

    def __init__(self, lie: SendBlock) -> None:
        self.lie: SendBlock | None = lie

    def send(self, sender: BlockSender, header: BlockHeader, payload: memoryview, sealer: Sealer) -> SendTicket:
        if self.lie is not None and header.block_index == 1:
            lie, self.lie = self.lie, None
            return lie(sender, header, payload, sealer)
        return honest(sender, header, payload, sealer)


def corrupted(sender: BlockSender, header: BlockHeader, payload: memoryview, sealer: Sealer) -> SendTicket:
    """A bit flips on the way: the checksum is the true payload's."""
    bad = bytearray(payload)
    bad[len(bad) // 2] ^= 1
    return honest(sender, _Raw(header, payload), memoryview(bad), sealer)  # type: ignore[arg-type]


def stale_epoch(sender: BlockSender, header: BlockHeader, payload: memoryview, sealer: Sealer) -> SendTicket:
    """The block was meant for the process that had this address before."""
    return honest(sender, msgspec.structs.replace(header, epoch=header.epoch - 1), payload, sealer)


def swapped_hash(sender: BlockSender, header: BlockHeader, payload: memoryview, sealer: Sealer) -> SendTicket:
    """Another prompt's block, with a checksum that is right for it."""
    return honest(sender, msgspec.structs.replace(header, block_hash=b"x" * 16), payload, sealer)


def swapped_payload(sender: BlockSender, header: BlockHeader, payload: memoryview, sealer: Sealer) -> SendTicket:
    """Another block's bytes under this block's header."""
    return honest(sender, _Raw(header, payload), memoryview(bytes(reversed(payload))), sealer)  # type: ignore[arg-type]


def wrong_size(sender: BlockSender, header: BlockHeader, payload: memoryview, sealer: Sealer) -> SendTicket:
    """Half a block."""
    half = payload[: len(payload) // 2]
    return honest(sender, msgspec.structs.replace(header, payload_nbytes=len(half)), half, sealer)


def out_of_range(sender: BlockSender, header: BlockHeader, payload: memoryview, sealer: Sealer) -> SendTicket:
    """A block behind the last one."""
    return honest(sender, msgspec.structs.replace(header, block_index=1000), payload, sealer)


def unknown_lease(sender: BlockSender, header: BlockHeader, payload: memoryview, sealer: Sealer) -> SendTicket:
    """A block for a lease that does not exist."""
    return honest(sender, msgspec.structs.replace(header, lease_id=header.lease_id + 77), payload, sealer)


class _Tampering:
    """A sealer on whose way to ZeroMQ somebody sits."""

    def __init__(self, sealer: BlockSealer, header: BlockHeader, flip_at: int) -> None:
        self._sealer, self._header, self._flip_at = sealer, header, flip_at

    def claim(self, block_index: int) -> None:
        self._sealer.claim(block_index)

    def seal(self, header: BlockHeader, payload: memoryview, target: memoryview) -> bytes:
        frame = self._sealer.seal(self._header, payload, target)
        target[self._flip_at] ^= 1
        return frame


def tampered_seal(sender: BlockSender, header: BlockHeader, payload: memoryview, sealer: Sealer) -> SendTicket:
    """A bit of the ciphertext flips on the way."""
    assert sealer is not None
    return honest(sender, header, payload, _Tampering(sealer, header, 3))  # type: ignore[arg-type]


def foreign_key(sender: BlockSender, header: BlockHeader, payload: memoryview, sealer: Sealer) -> SendTicket:
    """Somebody who does not know the lease's key."""
    assert sealer is not None
    return honest(sender, header, payload, BlockSealer(new_key()))


def not_sealed(sender: BlockSender, header: BlockHeader, payload: memoryview, sealer: Sealer) -> SendTicket:
    """The right block, but anybody on the way could have read and changed it."""
    assert sealer is not None
    return honest(sender, header, payload, None)


# By the cause that it is counted under; a space behind it tells two apart.
LIES = {
    "bad_checksum": corrupted,
    "stale_epoch": stale_epoch,
    "wrong_block": swapped_hash,
    "bad_checksum ": swapped_payload,
    "bad_size": wrong_size,
    "wrong_block ": out_of_range,
    "unknown_lease": unknown_lease,
}
SEALED_LIES = {
    "bad_seal": tampered_seal,
    "bad_seal ": foreign_key,
    "wrong_seal": not_sealed,
    "wrong_block": swapped_hash,
    "stale_epoch": stale_epoch,
    "unknown_lease": unknown_lease,
}
