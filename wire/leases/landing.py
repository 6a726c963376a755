"""Verification of a received piece of a block, and its way into the pool. Pure functions: no lease or counter changes here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvrelay.wire.blocks.frames import BlockHeader
from kvrelay.wire.blocks.pieces import Piece
from kvrelay.wire.blocks.seal import TAG_NBYTES, BlockOpener
from kvrelay.wire.errors import BlockRefusedError
from kvrelay.wire.leases.lease import WritableStore


def misfit(
    header: BlockHeader,
    block_hashes: Sequence[bytes],
    pieces: Sequence[Piece],
    first_blocks: Sequence[int],
    *,
    is_sealed: bool,
) -> BlockRefusedError | None:
    """Why ``header`` belongs to no piece that the lease expects; None if it belongs to one.

    ``block_hashes``, ``pieces``, ``first_blocks``: of the lease. ``is_sealed``: whether the lease takes sealed pieces.
    """
    if header.is_sealed is not is_sealed:
        came, taken = ("sealed", "plain") if header.is_sealed else ("plain", "sealed")
        return BlockRefusedError("wrong_seal", f"a {came} block; lease {header.lease_id} takes {taken} ones only")
    if header.block_index >= len(block_hashes) or header.block_hash != block_hashes[header.block_index]:
        detail = f"block {header.block_index} with another hash than that of {len(block_hashes)} offered ones"
        return BlockRefusedError("wrong_block", detail)
    piece = pieces[header.piece_index] if header.piece_index < len(pieces) else None
    if piece is None:
        detail = f"piece {header.piece_index} of {len(pieces)}"
        return BlockRefusedError("wrong_piece", detail)
    if header.block_index < (first := first_blocks[header.piece_index]):
        detail = f"piece {header.piece_index} of block {header.block_index}, which nobody sees: it comes from block {first} on"
        return BlockRefusedError("wrong_piece", detail)
    if header.payload_nbytes != piece.nbytes:
        detail = f"{header.payload_nbytes} bytes announced, the piece has {piece.nbytes}"
        return BlockRefusedError("bad_size", detail)
    return None


def begin_landing(
    header: BlockHeader,
    payload: memoryview | None,
    store: WritableStore,
    block_id: int,
    group: int,
    opener: BlockOpener | None,
) -> Callable[[], BlockRefusedError | None]:
    """Begin to write ``payload`` into its block of the pool. The result verifies it there, and must be called.

    That returns the reason of a refusal, or None. After a refusal the block may hold any bytes, also bytes that an attacker chose.
    Nothing may read them before a later landing in the same block succeeds.
    """
    nbytes = 0 if payload is None else len(payload)
    expected_nbytes = header.payload_nbytes + (0 if opener is None else TAG_NBYTES)
    if payload is None or nbytes != expected_nbytes:
        refusal = BlockRefusedError("bad_size", f"{nbytes} bytes came, {expected_nbytes} were announced")
        return lambda: refusal
    if opener is None:
        # The checksum is over the memory that the model will read, not over the frame, which may be memory of the peer's.
        written = store.begin_write(block_id, group, payload)
        return lambda: (
            None if header.checksum == header.checksum_of(written()) else BlockRefusedError("bad_checksum", str(header))
        )
    view = store.open_write(block_id, group)[: header.payload_nbytes]
    is_right = opener.open(header, payload, view)
    store.close_write(block_id)
    return lambda: None if is_right else BlockRefusedError("bad_seal", str(header))
