"""Broken frames made from valid ones: bits flipped, ends cut, halves joined, lengths changed, parts inserted or repeated.

Atheris (libFuzzer for Python) is not used. It is guided by the lines of Python that run. Frames are decoded in C (msgspec, struct,
xxhash, OpenSSL), so it would see one branch. It is also a dependency of 35 MB and takes over the end of the process. A seeded
mutator, together with messages from the schema (:mod:`.absurd`), reaches the code behind the decoder.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

_LENGTHS = (0, 1, 2, 7, 15, 16, 31, 32, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
_MSGPACK_HEADS = bytes(
    (0xC0, 0xC1, 0xC6, 0xC9, 0xCA, 0xCB, 0xCF, 0xD3, 0xDB, 0xDC, 0xDD, 0xDE, 0xDF, 0x80, 0x90, 0xA0, 0xFF)
)
_MAX_NBYTES = 4096  # of a frame with repeated parts


class Mutator:
    """Makes frames out of frames. All chance comes from ``rng``."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._ways = (
            self._flip,
            self._flip,
            self._set,
            self._cut,
            self._splice,
            self._length,
            self._insert,
            self._repeat,
        )

    def mutate(self, frames: Sequence[bytes]) -> bytes:
        """One of ``frames``, changed in one to three places."""
        rng = self._rng
        frame = bytearray(rng.choice(frames))
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            frame = rng.choice(self._ways)(frame, frames)
        return bytes(frame)

    def _flip(self, frame: bytearray, _: Sequence[bytes]) -> bytearray:
        if frame:
            frame[self._rng.randrange(len(frame))] ^= 1 << self._rng.randrange(8)
        return frame

    def _set(self, frame: bytearray, _: Sequence[bytes]) -> bytearray:
        if frame:
            frame[self._rng.randrange(len(frame))] = self._rng.choice(_MSGPACK_HEADS)
        return frame

    def _cut(self, frame: bytearray, _: Sequence[bytes]) -> bytearray:
        start = self._rng.randrange(len(frame) + 1)
        return frame[start:] if self._rng.random() < 0.2 else frame[:start]

    def _splice(self, frame: bytearray, frames: Sequence[bytes]) -> bytearray:
        other = self._rng.choice(frames)
        return frame[: self._rng.randrange(len(frame) + 1)] + other[self._rng.randrange(len(other) + 1) :]

    def _length(self, frame: bytearray, _: Sequence[bytes]) -> bytearray:
        form = self._rng.choice(("<H", ">H", "<I", ">I", "<Q", ">Q"))
        size = struct.calcsize(form)
        start = self._rng.randrange(len(frame) + 1)
        frame[start : start + size] = struct.pack(form, self._rng.choice(_LENGTHS) % 2 ** (8 * size))
        return frame

    def _insert(self, frame: bytearray, _: Sequence[bytes]) -> bytearray:
        start = self._rng.randrange(len(frame) + 1)
        frame[start:start] = self._rng.randbytes(self._rng.randrange(1, 9))
        return frame

    def _repeat(self, frame: bytearray, _: Sequence[bytes]) -> bytearray:
        start = self._rng.randrange(len(frame) + 1)
        part = frame[start : start + self._rng.randrange(1, 64)]
        frame[start:start] = part * self._rng.choice((1, 2, 50))
        return frame[:_MAX_NBYTES]
