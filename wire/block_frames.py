"""The header in front of every KV block's bytes on the data socket.

Little endian, fixed size: magic, version, lease id, epoch, block index, payload size, block hash, and in a plain block's header the
checksum. The checksum is XXH3-64 over the header's other fields and then the payload, so a payload under another block's header
does not pass. It finds accidents of all kinds; it is not a signature. A sealed block (:mod:`kvrelay.wire.seal`) has a
version of its own and no checksum: its seal covers the header. The payload size is always that of the open block.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from kvrelay.common.block_hash import HASH_NBYTES
from kvrelay.wire.errors import BlockRefusedError

_MAGIC = b"KVRB"
_PLAIN, _SEALED = 1, 2  # versions
_FIELDS = struct.Struct(f"<4sHxxQQIxxxxQ{HASH_NBYTES}s")
_CHECKSUM = struct.Struct("<Q")
HEADER_NBYTES = _FIELDS.size + _CHECKSUM.size
SEALED_HEADER_NBYTES = _FIELDS.size


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """Which block of which lease the payload is."""

    lease_id: int
    epoch: int
    block_index: int  # in the sequence, from 0
    payload_nbytes: int
    block_hash: bytes
    checksum: int = 0
    is_sealed: bool = False

    def _fields(self, version: int) -> bytes:
        return _FIELDS.pack(
            _MAGIC, version, self.lease_id, self.epoch, self.block_index, self.payload_nbytes, self.block_hash
        )

    def checksum_of(self, payload: memoryview) -> int:
        """What the checksum must be for this header and ``payload``."""
        hasher = xxhash.xxh3_64(self._fields(_PLAIN))
        hasher.update(payload)
        return hasher.intdigest()

    def pack(self, payload: memoryview) -> bytes:
        """A plain block's header frame, with the checksum for ``payload``."""
        return self._fields(_PLAIN) + _CHECKSUM.pack(self.checksum_of(payload))

    def pack_sealed(self) -> bytes:
        """A sealed block's header frame, which is also its associated data."""
        return self._fields(_SEALED)


def parse_header(frame: bytes | memoryview) -> BlockHeader:
    """The header in a frame. Raises BlockRefusedError (``bad_header``) on anything that is not one."""
    if len(frame) not in (HEADER_NBYTES, SEALED_HEADER_NBYTES):
        detail = f"a header of {len(frame)} bytes; it must have {HEADER_NBYTES}, or sealed {SEALED_HEADER_NBYTES}"
        raise BlockRefusedError("bad_header", detail)
    magic, version, lease_id, epoch, block_index, payload_nbytes, block_hash = _FIELDS.unpack_from(frame)
    is_sealed = len(frame) == SEALED_HEADER_NBYTES
    expected = _SEALED if is_sealed else _PLAIN
    if magic != _MAGIC or version != expected:
        raise BlockRefusedError("bad_header", f"magic {magic!r} version {version}; expected {_MAGIC!r} {expected}")
    checksum = 0 if is_sealed else _CHECKSUM.unpack_from(frame, _FIELDS.size)[0]
    header = BlockHeader(lease_id, epoch, block_index, payload_nbytes, block_hash, checksum, is_sealed)
    if header._fields(expected) != bytes(frame[: _FIELDS.size]):
        raise BlockRefusedError("bad_header", "bytes between the fields are not 0")
    return header
