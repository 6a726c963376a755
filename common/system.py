"""What a process asks of the system that it runs on: cores, memory, descriptors.

*Memory.* ZeroMQ takes the memory of every large frame from ``malloc`` and gives it back a moment later, and so does torch with
what lies between two operations on the CPU. As it comes, glibc returns much of that to the system, and the next piece is faulted in
again, page by page and zeroed: with blocks of 360 KiB that took four tenths of a receiver's CPU time, and on a bad day more of a
prefill step than its matrix products. While a model is loaded it is the other way round: what was read and converted is not needed
again, and up to half as much as a small model would be kept of it.

*Descriptors.* Most systems start processes with a small limit (1,024) that each may raise by itself up to a large one. Every
connection takes one descriptor, strangers' too; when there is none left, honest peers are not let in either, and ZeroMQ's network
thread asks for the waiting connection over and over, at the cost of a core, until a descriptor is free.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

_MEMORY = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_CPU_LIMIT = _CGROUP / "cpu.max"  # microseconds of CPU time, and of the period in which they may be used

# <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT_NBYTES = 256 * 2**20
_RETURNED_NBYTES = 128 * 2**10
_LARGEST_MMAP_THRESHOLD_NBYTES = 32 * 2**20  # glibc takes no more
_ENOUGH = 65_536  # not all that there may be: a connection in its handshake takes some 20 KB, and a crowd's must fit


def available_cores(limit: Path = _CPU_LIMIT) -> int:
    """Cores this process may use. A container's limit on CPU time counts, rounded up: more threads would wait for one another.

    ``limit``: the file of the container's cgroup (version 2); there is none outside of containers.
    """
    if sys.platform != "linux":
        return os.cpu_count() or 1
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # ValueError: "max", no limit
        used, period = limit.read_text().split()
        cores = min(cores, math.ceil(int(used) / int(period)))
    return cores


def available_memory(memory: Path = _MEMORY, cgroup: Path = _CGROUP) -> int | None:
    """Bytes that this process may still take, by the host and by a container's limit; None if the system does not tell.

    Files that are only cached do not count as used. ``cgroup``: the directory of the container's cgroup (version 2).
    """
    found: list[int] = []
    with contextlib.suppress(OSError, StopIteration):
        found.append(next(_numbers(memory, "MemAvailable:")) * 2**10)
    with contextlib.suppress(OSError, ValueError, StopIteration):  # ValueError: "max", no limit
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
        found.append(max(0, limit - used + next(_numbers(cgroup / "memory.stat", "inactive_file"))))
    return min(found, default=None)


def _numbers(path: Path, name: str) -> Iterator[int]:
    """The numbers of the lines that begin with ``name``."""
    for line in path.read_text().splitlines():
        fields = line.split()
        if fields[0] == name:
            yield int(fields[1])


def keep_freed_memory() -> None:
    """Let the allocator keep up to 256 MiB of what is freed from now on, in the whole process. Does nothing without glibc."""
    with contextlib.suppress(AttributeError):  # another C library: no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD_NBYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_NBYTES)


def return_freed_memory() -> None:
    """Let the allocator give back each piece of 128 KiB and more when it is freed, until ``keep_freed_memory``.

    glibc begins with that size, but takes larger ones as it meets them. Does nothing without glibc.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _RETURNED_NBYTES)


def raise_descriptor_limit() -> int:
    """Raise this process's limit to what it may have, at most 65,536; returns the limit that is in force. Never lowers it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _ENOUGH
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)
