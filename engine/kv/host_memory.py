"""Large pieces of the host's memory, for a pool or for the tier below one."""

from __future__ import annotations

import contextlib
import mmap
import sys

from kvrelay.common.errors import ModelError
from kvrelay.common.system import available_memory

_MADV_POPULATE_WRITE = 23  # <linux/mman.h>; Python has no name for it


def allocated(nbytes: int, descriptor: int | None = None) -> mmap.mmap:
    """Zeros in memory that is really allocated. ``descriptor``: of memory of that size to map; None: own memory.

    Otherwise the first write to each page would take a millisecond in the middle of a stream, and a memory limit would be met under
    load instead of at the start. Uses huge pages if the system has them. A block's layers are far apart, and faulting a pool in
    with 4 KiB pages took seven times as long. Raises OSError if the memory cannot be mapped.
    """
    memory = mmap.mmap(-1 if descriptor is None else descriptor, nbytes)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        with contextlib.suppress(OSError):  # kernels before 5.14: pages are allocated when they are written
            memory.madvise(_MADV_POPULATE_WRITE)
    return memory


def require_memory(host_kv_mb: int) -> None:
    """Raise ModelError if the host, or the container, has not so much memory left now.

    The system would let the process take it, and end it when the pages are written.
    """
    available = available_memory()
    if available is not None and host_kv_mb * 2**20 > available:
        raise ModelError(
            f"--host-kv-mb is {host_kv_mb}, and {available // 2**20} MiB of memory are left here: lower it, or give the worker "
            "more memory"
        )
