"""The header in front of a KV block's bytes on the data socket: a frame brings one piece of one block.

Little endian, fixed size: magic, version, lease id, epoch, block index, piece index, payload size, block hash, and in a plain
piece's header the checksum. The checksum is XXH3-64 over the header's other fields and then the payload's digests
(:mod:`kvrelay.common.block_digests`), so a payload under another header does not pass. It finds accidents of all kinds; it is not a
signature. A sealed piece (:mod:`kvrelay.wire.blocks.seal`) has a version of its own and no checksum: its seal covers the header.
The payload size is always that of the open piece.
"""

from __future__ import annotations

import struct

import msgspec
import xxhash

from kvrelay.common.block_hash import HASH_NBYTES
from kvrelay.wire.errors import BlockRefusedError

_MAGIC = b"KVRB"
_PLAIN, _SEALED = 1, 2  # versions
_FIELDS = struct.Struct(f"<4sHQQIHI{HASH_NBYTES}s")
_CHECKSUM = struct.Struct("<Q")
HEADER_NBYTES = _FIELDS.size + _CHECKSUM.size
SEALED_HEADER_NBYTES = _FIELDS.size

Place = tuple[int, int]  # (block index, piece index)


class BlockHeader(msgspec.Struct, frozen=True):
    """The header of a frame: lease, block and piece of its payload."""

    lease_id: int
    epoch: int
    block_index: int  # in the sequence, from 0
    payload_nbytes: int
    block_hash: bytes
    piece_index: int = 0  # of the block's pieces
    checksum: int = 0
    is_sealed: bool = False

    def __str__(self) -> str:
        """For errors."""
        return f"piece {self.piece_index} of block {self.block_index} of lease {self.lease_id}"

    @property
    def place(self) -> Place:
        """Where in its lease the payload belongs."""
        return (self.block_index, self.piece_index)

    def _fields(self, version: int) -> bytes:
        return _FIELDS.pack(
            _MAGIC,
            version,
            self.lease_id,
            self.epoch,
            self.block_index,
            self.piece_index,
            self.payload_nbytes,
            self.block_hash,
        )

    def checksum_of(self, digests: bytes) -> int:
        """What the checksum must be for this header and a payload with these digests."""
        return xxhash.xxh3_64_intdigest(self._fields(_PLAIN) + digests)

    def pack(self, digests: bytes) -> bytes:
        """A plain piece's header frame, with the checksum for a payload with these digests."""
        return self._fields(_PLAIN) + _CHECKSUM.pack(self.checksum_of(digests))

    def pack_sealed(self) -> bytes:
        """A sealed piece's header frame, which is also its associated data."""
        return self._fields(_SEALED)


def parse_header(frame: bytes | memoryview) -> BlockHeader:
    """The header in a frame. Raises BlockRefusedError (``bad_header``) on anything that is not one."""
    if len(frame) not in (HEADER_NBYTES, SEALED_HEADER_NBYTES):
        detail = f"a header of {len(frame)} bytes; it must have {HEADER_NBYTES}, or sealed {SEALED_HEADER_NBYTES}"
        raise BlockRefusedError("bad_header", detail)
    magic, version, lease_id, epoch, block_index, piece_index, payload_nbytes, block_hash = _FIELDS.unpack_from(frame)
    is_sealed = len(frame) == SEALED_HEADER_NBYTES
    expected = _SEALED if is_sealed else _PLAIN
    if magic != _MAGIC or version != expected:
        raise BlockRefusedError("bad_header", f"magic {magic!r} version {version}; expected {_MAGIC!r} {expected}")
    checksum = 0 if is_sealed else _CHECKSUM.unpack_from(frame, _FIELDS.size)[0]
    return BlockHeader(lease_id, epoch, block_index, payload_nbytes, block_hash, piece_index, checksum, is_sealed)
