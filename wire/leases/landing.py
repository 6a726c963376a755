"""What one received block must prove, and how it gets into the pool. Pure functions: no lease changes here, nothing is counted."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.wire.blocks.frames import BlockHeader
from kvrelay.wire.blocks.seal import TAG_NBYTES, BlockOpener
from kvrelay.wire.errors import BlockRefusedError


def misfit(
    header: BlockHeader, block_hashes: Sequence[bytes], block_nbytes: int, *, is_sealed: bool
) -> BlockRefusedError | None:
    """Why ``header`` is not that of a block that was promised; None if it is. ``is_sealed``: the lease takes sealed ones."""
    if header.is_sealed is not is_sealed:
        came, taken = ("sealed", "plain") if header.is_sealed else ("plain", "sealed")
        return BlockRefusedError("wrong_seal", f"a {came} block; lease {header.lease_id} takes {taken} ones only")
    if header.block_index >= len(block_hashes):
        return BlockRefusedError("wrong_block", f"block {header.block_index} of {len(block_hashes)}")
    if header.block_hash != block_hashes[header.block_index]:
        return BlockRefusedError("wrong_block", f"block {header.block_index} has another block's hash")
    if header.payload_nbytes != block_nbytes:
        detail = f"{header.payload_nbytes} bytes announced, a block has {block_nbytes}"
        return BlockRefusedError("bad_size", detail)
    return None


def land(
    header: BlockHeader,
    payload: memoryview | None,
    view: memoryview,
    opener: BlockOpener | None,
    *,
    is_one_of_several: bool = False,
) -> BlockRefusedError | None:
    """Write ``payload`` into ``view``, the pool's memory, and prove it there; returns why it is refused, if it is.

    ``is_one_of_several``: other threads do the same at the same time.

    After a refusal ``view`` holds anything, also bytes that somebody chose: nothing may be read from it until another ``land``
    into it is not refused.
    """
    nbytes = 0 if payload is None else len(payload)
    expected_nbytes = header.payload_nbytes + (0 if opener is None else TAG_NBYTES)
    if payload is None or nbytes != expected_nbytes:
        return BlockRefusedError("bad_size", f"{nbytes} bytes came, {expected_nbytes} were announced")
    if opener is not None:
        if not opener.open(header, payload, view):
            return BlockRefusedError("bad_seal", f"block {header.block_index} of lease {header.lease_id}")
        return None
    # The checksum is over the memory that the model will read, not over the frame, which may be memory of the peer's.
    if not header.lands_whole(payload, view, is_one_of_several=is_one_of_several):
        return BlockRefusedError("bad_checksum", f"block {header.block_index} of lease {header.lease_id}")
    return None
