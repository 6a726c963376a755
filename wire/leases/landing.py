"""Verification of a received piece of a block, and its way into the pool. Pure functions: no lease or counter changes here."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.wire.blocks.frames import BlockHeader
from kvrelay.wire.blocks.pieces import Piece
from kvrelay.wire.blocks.seal import TAG_NBYTES, BlockOpener
from kvrelay.wire.errors import BlockRefusedError


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


def land(
    header: BlockHeader,
    payload: memoryview | None,
    view: memoryview,
    opener: BlockOpener | None,
) -> BlockRefusedError | None:
    """Write ``payload`` into ``view``, the piece's memory in the pool, and verify it there.

    Returns the reason of a refusal, or None. After a refusal ``view`` may hold any bytes, also bytes that an attacker chose.
    Nothing may read them before a later ``land`` into the same memory succeeds.
    """
    nbytes = 0 if payload is None else len(payload)
    expected_nbytes = header.payload_nbytes + (0 if opener is None else TAG_NBYTES)
    if payload is None or nbytes != expected_nbytes:
        return BlockRefusedError("bad_size", f"{nbytes} bytes came, {expected_nbytes} were announced")
    if opener is not None:
        if not opener.open(header, payload, view):
            return BlockRefusedError("bad_seal", str(header))
        return None
    # The checksum is over the memory that the model will read, not over the frame, which may be memory of the peer's.
    if not header.lands_whole(payload, view):
        return BlockRefusedError("bad_checksum", str(header))
    return None
