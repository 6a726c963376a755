"""The digests of a KV block that its checksum is made of: XXH3-64 of each stretch, 8 bytes little endian, one behind the other.

Stretches let a device hash a block with many threads at once (:mod:`kvrelay.kernels.rows.digests`). These functions do it on the
host, a stretch at a time: what was just copied is hashed while it is in the core's cache.
"""

from __future__ import annotations

import functools
import struct

import xxhash

STRETCH_NBYTES = 64 * 1024


def num_stretches(nbytes: int) -> int:
    """How many stretches ``nbytes`` have. The last one takes what is left, and is less than two stretches long."""
    return max(1, nbytes // STRETCH_NBYTES)


def digests_of(memory: memoryview) -> bytes:
    """The digests of the bytes in ``memory``."""
    return _packed([xxhash.xxh3_64_intdigest(memory[part]) for part in _stretches(len(memory))])


def copied(source: memoryview, target: memoryview) -> bytes:
    """Copy ``source`` to ``target``, of the same size. Returns the digests of ``source``."""
    digests = []
    for part in _stretches(len(source)):
        stretch = source[part]
        digests.append(xxhash.xxh3_64_intdigest(stretch))
        target[part] = stretch
    return _packed(digests)


def landed(source: memoryview, target: memoryview) -> bytes:
    """Copy ``source`` to ``target``, of the same size. Returns the digests of what is in ``target`` then."""
    digests = []
    for part in _stretches(len(source)):
        stretch = target[part]
        stretch[:] = source[part]
        digests.append(xxhash.xxh3_64_intdigest(stretch))
    return _packed(digests)


def copy_bytes(source: memoryview, target: memoryview) -> None:
    """Copy ``source`` to ``target``, of the same size, without Python's lock, which an assignment of views holds."""
    import numpy as np  # noqa: PLC0415 - called beside a device only, and other processes do without numpy

    np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


@functools.lru_cache(maxsize=16)  # blocks have few sizes, and cutting one took a tenth of the time
def _stretches(nbytes: int) -> tuple[slice, ...]:
    last = num_stretches(nbytes) - 1
    starts = [number * STRETCH_NBYTES for number in range(last + 1)]
    return tuple(slice(start, end) for start, end in zip(starts, [*starts[1:], nbytes], strict=True))


def _packed(digests: list[int]) -> bytes:
    return struct.pack(f"<{len(digests)}Q", *digests)
