"""How a worker process's memory allocator treats large pieces that come and go.

ZeroMQ takes the memory of every large frame from ``malloc`` and gives it back a moment later, and so does torch with what lies
between two operations on the CPU. As it comes, glibc returns much of that to the system, and the next piece is faulted in again,
page by page and zeroed: with blocks of 360 KiB that took four tenths of a receiver's CPU time, and on a bad day more of a
prefill step than its matrix products.
"""

from __future__ import annotations

import contextlib
import ctypes

# <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT_NBYTES = 256 * 2**20
_LARGEST_MMAP_THRESHOLD_NBYTES = 32 * 2**20  # glibc takes no more


def keep_freed_memory() -> None:
    """Let the allocator keep up to 256 MiB of freed memory, for the whole process and for good. Does nothing without glibc."""
    with contextlib.suppress(AttributeError):  # another C library: no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD_NBYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_NBYTES)
