"""Memory that two workers on one host share: a small ring of slots. The sender writes it, and the receiver maps it read-only.

A slot takes one block, sealed or not. The sender copies or seals a block from its pool into a free slot. The receiver copies it
into its own pool, verifies it *there*, where the sender has no access, and gives the slot back.

A block is copied twice, and this is still the fast way. The ring has so few slots that the receiver's core finds in the cache what
the sender's core wrote. Pools are not shared. So a peer sees only blocks that were granted to it, and a pool keeps its huge pages.

The memory is a file without a name (``memfd_create``), passed over a unix socket. It is sealed against changes of its size and
against holes. So the receiver's accesses neither fault nor allocate memory; the receiver checks the seals before it maps the file.
The kernel frees the memory when both processes have ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.common.late_bytes import Register
from kvrelay.wire.blocks.seal import TAG_NBYTES
from kvrelay.wire.errors import GreetingRefusedError, NoSharedMemoryError

_F_SEAL_FUTURE_WRITE = 0x10  # <linux/fcntl.h>, since Linux 5.1; Python 3.11 has no constant for it
MAX_SLOTS = 32
_MIN_SLOTS = 4  # the sender fills one, the receiver reads one, and two may be on their way
_ENOUGH_NBYTES = 4 * 2**20  # target size of a ring; more does not stay in a core's share of the cache
_ENOUGH_FOR_DEVICE_NBYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class RingShape:
    """How a ring is divided into slots. Both sides compute the slot size themselves."""

    slot_nbytes: int
    num_slots: int

    @classmethod
    def of(cls, block_nbytes: int, *, is_for_device: bool = False) -> RingShape:
        """The shape for blocks of ``block_nbytes``. A slot also has room for a seal's tag and is a multiple of the page size.

        Copies by a device bypass the cache, and more of them should be on their way.
        """
        enough_nbytes = _ENOUGH_FOR_DEVICE_NBYTES if is_for_device else _ENOUGH_NBYTES
        slot_nbytes = -(-(block_nbytes + TAG_NBYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
        return cls(slot_nbytes, min(MAX_SLOTS, max(_MIN_SLOTS, enough_nbytes // slot_nbytes)))

    @property
    def nbytes(self) -> int:
        """Bytes of all slots together."""
        return self.slot_nbytes * self.num_slots


class Ring:
    """A mapped ring, as one view per slot. ``close`` once, when no thread reads or writes the slots."""

    def __init__(self, memory: mmap.mmap, shape: RingShape) -> None:
        self.shape = shape
        self._memory = memory
        self._view = memoryview(memory)
        size = shape.slot_nbytes
        self._unregister: Callable[[], None] | None = None
        self.slots = [self._view[index * size : (index + 1) * size] for index in range(shape.num_slots)]

    def register(self, register: Register) -> None:
        """Let a device's copies reach the slots, if it can. Call it at most once."""
        self._unregister = register(self._view)

    @property
    def is_registered(self) -> bool:
        """Whether a device's copies reach the slots."""
        return self._unregister is not None

    def close(self) -> None:
        """Unmap the memory. If other code still holds a view of it, it is unmapped when that view is released."""
        if self._unregister is not None:
            self._unregister()
        with contextlib.suppress(BufferError):
            while self.slots:
                self.slots.pop().release()
            self._view.release()
            self._memory.close()


def make_ring(shape: RingShape) -> tuple[Ring, int]:
    """New writable memory, and its descriptor, which the caller passes on and closes. Raises NoSharedMemoryError."""
    try:
        descriptor = os.memfd_create("kvrelay-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise NoSharedMemoryError(f"this system gives no memory to share: {error.strerror}") from error
    try:
        os.ftruncate(descriptor, shape.nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        # Map all pages now; otherwise the first write to each page would delay a block.
        memory = mmap.mmap(descriptor, shape.nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        # This mapping stays writable. No other writable one can be made, and no holes, which a reader would have to fill.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
        return Ring(memory, shape), descriptor
    except OSError as error:
        os.close(descriptor)
        raise NoSharedMemoryError(f"no {shape.nbytes} bytes of memory to share: {error.strerror}") from error


def map_ring(descriptor: int, shape: RingShape) -> Ring:
    """Map a peer's memory read-only. The caller keeps the descriptor. Raises GreetingRefusedError if an access could fault."""
    needed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise GreetingRefusedError("bad_memory", "the descriptor is no memory that can be sealed") from error
    if seals & needed != needed:
        raise GreetingRefusedError("bad_memory", f"seals {seals:#x}; the size must be sealed ({needed:#x})")
    if os.fstatvfs(descriptor).f_bsize != mmap.PAGESIZE:  # pages of hugetlbfs can run out at any access
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
