"""The header in front of every KV block's bytes on the data socket.

Little endian, fixed size: magic, version, lease id, epoch, block index, payload size, block hash, and in a plain block's header the
checksum. The checksum is XXH3-64 over the header's other fields and then the payload, so a payload under another block's header
does not pass. It finds accidents of all kinds; it is not a signature. A sealed block (:mod:`kvrelay.wire.blocks.seal`) has a
version of its own and no checksum: its seal covers the header. The payload size is always that of the open block.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable

import msgspec
import xxhash

from kvrelay.common.block_hash import HASH_NBYTES
from kvrelay.wire.errors import BlockRefusedError

_MAGIC = b"KVRB"
_PLAIN, _SEALED = 1, 2  # versions
_FIELDS = struct.Struct(f"<4sHQQIQ{HASH_NBYTES}s")
_CHECKSUM = struct.Struct("<Q")
_PIECE_NBYTES = 256 * 1024  # what is copied is hashed while it is in the cache of its core
_PIECE_BESIDE_OTHERS_NBYTES = 2**20  # each piece waits twice for Python's lock, which costs more than the cache gives
HEADER_NBYTES = _FIELDS.size + _CHECKSUM.size
SEALED_HEADER_NBYTES = _FIELDS.size
# Of Python's C interface; ctypes itself takes no address of memory that is read-only.
_get_buffer = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.c_int)(
    ("PyObject_GetBuffer", ctypes.pythonapi)
)
_release_buffer = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(("PyBuffer_Release", ctypes.pythonapi))
_PY_BUFFER = ctypes.c_size_t * 16  # room for a Py_buffer, whose first member is the address


class BlockHeader(msgspec.Struct, frozen=True):
    """Which block of which lease the payload is."""

    lease_id: int
    epoch: int
    block_index: int  # in the sequence, from 0
    payload_nbytes: int
    block_hash: bytes
    checksum: int = 0
    is_sealed: bool = False

    def _fields(self, version: int) -> bytes:
        numbers = (self.lease_id, self.epoch, self.block_index, self.payload_nbytes)
        return _FIELDS.pack(_MAGIC, version, *numbers, self.block_hash)

    def checksum_of(self, payload: memoryview) -> int:
        """What the checksum must be for this header and ``payload``."""
        hasher = xxhash.xxh3_64(self._fields(_PLAIN))
        hasher.update(payload)
        return hasher.intdigest()

    def pack(self, payload: memoryview) -> bytes:
        """A plain block's header frame, with the checksum for ``payload``."""
        return self._fields(_PLAIN) + _CHECKSUM.pack(self.checksum_of(payload))

    def pack_copying(self, payload: memoryview, target: memoryview, *, is_one_of_several: bool = False) -> bytes:
        """The same, and ``payload`` is copied into ``target``, of the same size, while it is in the cache.

        ``is_one_of_several``: other threads do the same at the same time.
        """
        copy, piece_nbytes = _way_to_copy(is_one_of_several)
        fields = self._fields(_PLAIN)
        hasher = xxhash.xxh3_64(fields)
        for start in range(0, len(payload), piece_nbytes):
            piece = payload[start : start + piece_nbytes]
            hasher.update(piece)
            copy(piece, target[start : start + len(piece)])
        return fields + _CHECKSUM.pack(hasher.intdigest())

    def lands_whole(self, payload: memoryview, target: memoryview, *, is_one_of_several: bool = False) -> bool:
        """Copy a plain block's ``payload`` into ``target``, of the same size; whether what lies *there* has the checksum.

        ``is_one_of_several``: other threads do the same at the same time.
        """
        copy, piece_nbytes = _way_to_copy(is_one_of_several)
        hasher = xxhash.xxh3_64(self._fields(_PLAIN))
        for start in range(0, len(payload), piece_nbytes):
            piece = target[start : start + piece_nbytes]
            copy(payload[start : start + piece_nbytes], piece)
            hasher.update(piece)
        return hasher.intdigest() == self.checksum

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
    return BlockHeader(lease_id, epoch, block_index, payload_nbytes, block_hash, checksum, is_sealed)


def _way_to_copy(is_one_of_several: bool) -> tuple[Callable[[memoryview, memoryview], None], int]:
    """How to copy a block, and in pieces of how many bytes."""
    return (_copy_beside_others, _PIECE_BESIDE_OTHERS_NBYTES) if is_one_of_several else (_copy, _PIECE_NBYTES)


def _copy(source: memoryview, target: memoryview) -> None:
    """Copy bytes, of the same number."""
    target[:] = source


def _copy_beside_others(source: memoryview, target: memoryview) -> None:
    """The same, and other threads may run meanwhile; a memoryview's own copy keeps Python's lock. A tenth slower by itself."""
    assert len(source) == len(target), f"{len(source)} bytes for {len(target)}"
    ctypes.memmove(ctypes.byref(ctypes.c_char.from_buffer(target)), _address_of(source), len(source))


def _address_of(view: memoryview) -> int:
    """Where its bytes lie, for as long as the caller has ``view``."""
    buffer = _PY_BUFFER()
    _get_buffer(view, buffer, 0)
    address = buffer[0]
    _release_buffer(buffer)
    return address
