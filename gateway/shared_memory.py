"""The memory that the processes of one gateway share: how many connections each has, and what of the API keys' limits is used.

The parent makes it (an anonymous file), its children map it by the same descriptor, and it is gone with the last of them. It holds
fixed columns of numbers::

    connections   a number for each process: its open connections, plus one; 0 while it accepts none
    key ids       16 bytes for each key: a hash of its name; zeros where there is no key yet
    buckets       two doubles for each key: the filling of its token bucket, and when that was (the system's monotonic clock)
    running       for each process, a number for each key: requests of that key that run there

What is one process's own is written by it alone, and set to zero by the parent when the process has died. Buckets, and the
decision whether one more request may run, need a lock: that of the file's byte at the key's place (``fcntl``), which the kernel
releases when its holder dies. It is held for microseconds, once a request. A process that was stopped while it holds one must not
stop the others: they wait a few milliseconds for it, then go on without, and the limit may be missed by a request.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import math
import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

from kvrelay.gateway.key_limits import KeyCounts, OwnCounts

logger = logging.getLogger(__name__)

_MAX_KEYS = 16_384
_NUMBER = struct.Struct("=I")
_BUCKET = struct.Struct("=dd")
_ID_BYTES = 16
_LOCK_TRIES = 50
_LOCK_PAUSE_S = 1e-4


class SharedMemory:
    """One process's mapping of it, parent or child. ``close`` ends the mapping and closes the descriptor."""

    def __init__(self, descriptor: int, num_processes: int) -> None:
        """Owns ``descriptor`` from now on."""
        self.descriptor = descriptor
        self._num_processes = num_processes
        self._ids_at = _NUMBER.size * num_processes
        self._buckets_at = self._ids_at + _ID_BYTES * _MAX_KEYS
        self._running_at = self._buckets_at + _BUCKET.size * _MAX_KEYS
        self._num_bytes = self._running_at + _NUMBER.size * _MAX_KEYS * num_processes
        os.ftruncate(descriptor, self._num_bytes)  # only the first time is there anything to do
        self._memory = mmap.mmap(descriptor, self._num_bytes)

    @classmethod
    def create(cls, num_processes: int) -> SharedMemory:
        """A new one, all zeros."""
        return cls(os.memfd_create("kvrelay-gateway"), num_processes)

    def close(self) -> None:
        """Unmap it."""
        self._memory.close()
        os.close(self.descriptor)

    def forget(self, index: int) -> None:
        """The process ``index`` has died: it has no connections and runs no requests. Called by the parent."""
        self.set_connections(index, None)
        num_bytes = _NUMBER.size * _MAX_KEYS
        start = self._running_at + num_bytes * index
        self._memory[start : start + num_bytes] = bytes(num_bytes)

    def connections(self, index: int) -> int | None:
        """Of the process ``index``; None while it accepts none."""
        (number,) = _NUMBER.unpack_from(self._memory, _NUMBER.size * index)
        return number - 1 if number else None

    def set_connections(self, index: int, number: int | None) -> None:
        """Called by that process, with None by the parent, too."""
        _NUMBER.pack_into(self._memory, _NUMBER.size * index, 0 if number is None else number + 1)

    def fewest_connections(self) -> int | None:
        """Of the processes that accept any; None if there is none."""
        numbers = (self.connections(index) for index in range(self._num_processes))
        return min((number for number in numbers if number is not None), default=None)

    def key_counts(self, name: str, index: int) -> KeyCounts:
        """The counts of the key ``name``, for the process ``index``. Beyond 16,384 keys they are that process's own."""
        place = self._place_of(hashlib.blake2b(name.encode(), digest_size=_ID_BYTES).digest())
        if place is None:
            logger.warning("more than %d API keys: the limits of %s hold for each process by itself", _MAX_KEYS, name)
            return OwnCounts()
        return _SharedCounts(self, place, index)

    @contextlib.contextmanager
    def locked(self, place: int) -> Iterator[None]:
        """Nobody else is at the key at ``place``, unless somebody stopped there."""
        is_held = False
        for _ in range(_LOCK_TRIES):
            with contextlib.suppress(BlockingIOError, PermissionError):
                fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
                is_held = True
                break
            time.sleep(_LOCK_PAUSE_S)
        try:
            yield
        finally:
            if is_held:
                fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1, place)

    def bucket(self, place: int) -> tuple[float, float]:
        """Filling, and when that was."""
        filling, filled_s = _BUCKET.unpack_from(self._memory, self._buckets_at + _BUCKET.size * place)
        return filling, filled_s

    def set_bucket(self, place: int, filling: float, filled_s: float) -> None:
        """Within ``locked``."""
        _BUCKET.pack_into(self._memory, self._buckets_at + _BUCKET.size * place, filling, filled_s)

    def num_running(self, place: int) -> int:
        """In all processes."""
        return sum(
            _NUMBER.unpack_from(self._memory, self._running_of(place, index))[0] for index in range(self._num_processes)
        )

    def add_running(self, place: int, index: int, change: int) -> None:
        """In the process ``index``; called by it."""
        at = self._running_of(place, index)
        (number,) = _NUMBER.unpack_from(self._memory, at)
        _NUMBER.pack_into(self._memory, at, number + change)

    def _running_of(self, place: int, index: int) -> int:
        return self._running_at + _NUMBER.size * (_MAX_KEYS * index + place)

    def _place_of(self, key_id: bytes) -> int | None:
        """Where the key is, from now on and for all processes; None if there is no room. Keys are never taken out."""
        first = int.from_bytes(key_id[:8]) % _MAX_KEYS
        with self.locked(_MAX_KEYS):
            for step in range(_MAX_KEYS):
                place = (first + step) % _MAX_KEYS
                at = self._ids_at + _ID_BYTES * place
                known = self._memory[at : at + _ID_BYTES]
                if known == key_id:
                    return place
                if known == bytes(_ID_BYTES):
                    self.set_bucket(place, math.inf, 0.0)  # it starts full
                    self._memory[at : at + _ID_BYTES] = key_id
                    return place
        return None


class _SharedCounts:
    """The counts of one key, as one process sees them. Implements KeyCounts."""

    def __init__(self, memory: SharedMemory, place: int, index: int) -> None:
        self._memory = memory
        self._place = place
        self._index = index

    def locked(self) -> AbstractContextManager[None]:
        """No other process is at this key."""
        return self._memory.locked(self._place)

    def num_running(self) -> int:
        """In all processes."""
        return self._memory.num_running(self._place)

    def add_running(self, change: int) -> None:
        """In this one."""
        self._memory.add_running(self._place, self._index, change)

    def bucket(self) -> tuple[float, float]:
        """Of all processes."""
        return self._memory.bucket(self._place)

    def set_bucket(self, filling: float, filled_s: float) -> None:
        """For all processes."""
        self._memory.set_bucket(self._place, filling, filled_s)
