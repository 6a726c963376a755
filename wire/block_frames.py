"""The header in front of every KV block's bytes on the data socket.

Little endian, fixed size: magic, version, lease id, epoch, block index, payload size, block hash, checksum. The checksum is
XXH3-64 over the header's other fields and then the payload, so a payload under another block's header does not pass. It
finds accidents of all kinds; it is not a signature (the data socket is sealed where peers are not trusted).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from kvrelay.common.block_hash import HASH_NBYTES
from kvrelay.wire.errors import BlockRefusedError

_MAGIC = b"KVRB"
_VERSION = 1
_FIELDS = struct.Struct(f"<4sHxxQQIxxxxQ{HASH_NBYTES}s")
_CHECKSUM = struct.Struct("<Q")
HEADER_NBYTES = _FIELDS.size + _CHECKSUM.size


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """Which block of which lease the payload is."""

    lease_id: int
    epoch: int
    block_index: int  # in the sequence, from 0
    payload_nbytes: int
    block_hash: bytes
    checksum: int = 0

    def _fields(self) -> bytes:
        return _FIELDS.pack(
            _MAGIC, _VERSION, self.lease_id, self.epoch, self.block_index, self.payload_nbytes, self.block_hash
        )

    def checksum_of(self, payload: memoryview) -> int:
        """What the checksum must be for this header and ``payload``."""
        hasher = xxhash.xxh3_64(self._fields())
        hasher.update(payload)
        return hasher.intdigest()

    def pack(self, payload: memoryview) -> bytes:
        """The header's bytes, with the checksum for ``payload``."""
        return self._fields() + _CHECKSUM.pack(self.checksum_of(payload))


def parse_header(frame: bytes | memoryview) -> BlockHeader:
    """The header in a frame. Raises BlockRefusedError (``bad_header``) on anything that is not one."""
    if len(frame) != HEADER_NBYTES:
        raise BlockRefusedError("bad_header", f"a header of {len(frame)} bytes; it must have {HEADER_NBYTES}")
    magic, version, lease_id, epoch, block_index, payload_nbytes, block_hash = _FIELDS.unpack_from(frame)
    if magic != _MAGIC or version != _VERSION:
        raise BlockRefusedError("bad_header", f"magic {magic!r} version {version}; expected {_MAGIC!r} {_VERSION}")
    (checksum,) = _CHECKSUM.unpack_from(frame, _FIELDS.size)
    return BlockHeader(lease_id, epoch, block_index, payload_nbytes, block_hash, checksum)
