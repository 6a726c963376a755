"""The memory between two workers on one host: a small ring of slots, written by the sender, mapped read-only by the receiver.

A slot takes one block, sealed or not. The sender copies or seals a block from its pool into a free slot, the receiver writes it
from there into its own pool and proves it *there*, where the sender cannot reach, then gives the slot back. So a block is copied
twice, and that is the fast way: the ring has few slots, and what one core writes there the other still finds in the cache. Pools
themselves are not shared. A peer sees the blocks that were granted to it, for as long as they lie in a slot, and nothing else, and
a pool keeps its huge pages.

The memory is a file without a name (``memfd_create``), passed over a unix socket. Sealed against a change of its size and
against holes, so that an access of the receiver's neither faults nor takes memory; the receiver checks that before it maps it. It
is gone with the last of both processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from dataclasses import dataclass

from kvrelay.wire.blocks.seal import TAG_NBYTES
from kvrelay.wire.errors import GreetingRefusedError, NoSharedMemoryError

_F_SEAL_FUTURE_WRITE = 0x10  # <linux/fcntl.h>, since 5.1; Python 3.11 has no name for it
MAX_SLOTS = 32
_MIN_SLOTS = 4  # the sender fills one, the receiver reads one, and two may be on their way
_ENOUGH_NBYTES = 4 * 2**20  # of a ring; more does not stay in a core's share of the cache


@dataclass(frozen=True, slots=True)
class RingShape:
    """How a ring is divided. Both sides compute the size of a slot by themselves."""

    slot_nbytes: int
    num_slots: int

    @classmethod
    def of(cls, block_nbytes: int) -> RingShape:
        """For blocks of this size."""
        slot_nbytes = -(-(block_nbytes + TAG_NBYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
        return cls(slot_nbytes, min(MAX_SLOTS, max(_MIN_SLOTS, _ENOUGH_NBYTES // slot_nbytes)))

    @property
    def nbytes(self) -> int:
        """Of all slots."""
        return self.slot_nbytes * self.num_slots


class Ring:
    """Mapped memory, as its slots. ``close`` once, when nothing reads or writes them."""

    def __init__(self, memory: mmap.mmap, shape: RingShape) -> None:
        self.shape = shape
        self._memory = memory
        self._view = memoryview(memory)
        size = shape.slot_nbytes
        self.slots = [self._view[index * size : (index + 1) * size] for index in range(shape.num_slots)]

    def close(self) -> None:
        """Unmap it. If somebody holds a piece of it still, that happens when they let go."""
        with contextlib.suppress(BufferError):
            while self.slots:
                self.slots.pop().release()
            self._view.release()
            self._memory.close()


def make_ring(shape: RingShape) -> tuple[Ring, int]:
    """New memory, writable, and the descriptor to pass on, which the caller closes. Raises NoSharedMemoryError."""
    try:
        descriptor = os.memfd_create("kvrelay-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise NoSharedMemoryError(f"this system gives no memory to share: {error.strerror}") from error
    try:
        os.ftruncate(descriptor, shape.nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        # All of it now: pages that come with their first write would cost that block.
        memory = mmap.mmap(descriptor, shape.nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        # This mapping stays writable. Nobody makes another, or holes in the memory that a reader would have to fill.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
        return Ring(memory, shape), descriptor
    except OSError as error:
        os.close(descriptor)
        raise NoSharedMemoryError(f"no {shape.nbytes} bytes of memory to share: {error.strerror}") from error


def map_ring(descriptor: int, shape: RingShape) -> Ring:
    """A peer's memory, read-only. The descriptor stays the caller's. Raises GreetingRefusedError if an access to it could fault."""
    needed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise GreetingRefusedError("bad_memory", "the descriptor is no memory that can be sealed") from error
    if seals & needed != needed:
        raise GreetingRefusedError("bad_memory", f"seals {seals:#x}; the size must be sealed ({needed:#x})")
    if os.fstatvfs(descriptor).f_bsize != mmap.PAGESIZE:  # those of hugetlbfs can run out, at any access
        raise GreetingRefusedError("bad_memory", "memory of huge pages, which can fault; pages must be ordinary ones")
    if (nbytes := os.fstat(descriptor).st_size) != shape.nbytes:
        raise GreetingRefusedError(
            "bad_memory", f"{nbytes} bytes of memory; {shape.num_slots} slots have {shape.nbytes}"
        )
    if os.fstat(descriptor).st_blocks * 512 < shape.nbytes:
        raise GreetingRefusedError("bad_memory", "memory with holes, which its reader would have to fill")
    try:
        memory = mmap.mmap(descriptor, shape.nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
    except OSError as error:
        raise GreetingRefusedError("bad_memory", f"the memory cannot be mapped: {error.strerror}") from error
    return Ring(memory, shape)
