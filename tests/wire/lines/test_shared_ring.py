"""The memory of a ring: its size is sealed, the receiver cannot write to it, and any other memory is refused."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.wire.blocks.seal import TAG_NBYTES
from kvrelay.wire.errors import GreetingRefusedError, NoSharedMemoryError
from kvrelay.wire.lines.shared.ring import MAX_SLOTS, RingShape, make_ring, map_ring

from ..shared_peer import nothing_left

SHAPE = RingShape.of(512)
F_SEAL_FUTURE_WRITE = 0x10
ALL_SEALS = (fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, F_SEAL_FUTURE_WRITE, fcntl.F_SEAL_SEAL)
SEALS = sum(ALL_SEALS)


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    with nothing_left():
        yield


def memory(nbytes: int, seals: int, flags: int = os.MFD_ALLOW_SEALING, *, has_pages: bool = True) -> int:
    descriptor = os.memfd_create("kvrelay-test", flags)
    os.ftruncate(descriptor, nbytes)
    if has_pages and nbytes:
        os.posix_fallocate(descriptor, 0, nbytes)
    if seals:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@pytest.mark.parametrize("block_nbytes", [1, 512, 128 * 1024, 360 * 1024, 2 * 2**20, 16 * 2**20])
def test_a_ring_has_few_slots_of_whole_pages(block_nbytes: int) -> None:
    shape = RingShape.of(block_nbytes)
    assert shape.slot_nbytes % mmap.PAGESIZE == 0
    assert block_nbytes + TAG_NBYTES <= shape.slot_nbytes < block_nbytes + TAG_NBYTES + mmap.PAGESIZE
    assert 4 <= shape.num_slots <= MAX_SLOTS
    assert shape.nbytes <= max(4 * 2**20, 4 * shape.slot_nbytes)


def test_what_is_written_on_one_side_is_read_on_the_other_and_not_written_there() -> None:
    written, descriptor = make_ring(SHAPE)
    read = map_ring(descriptor, SHAPE)
    os.close(descriptor)
    for index, slot in enumerate(written.slots):
        slot[:] = bytes([index + 1]) * SHAPE.slot_nbytes
    assert [(slot[0], slot[-1]) for slot in read.slots] == [(n + 1, n + 1) for n in range(SHAPE.num_slots)]
    with pytest.raises(TypeError, match="read-only"):
        read.slots[0][0] = 1
    written.close()
    assert read.slots[3][0] == 4, "the memory went with its maker"
    read.close()


def test_nobody_changes_the_size_of_a_ring() -> None:
    """Neither side can resize the ring: a process that reads beyond the end of a mapped file is killed (SIGBUS)."""
    ring, descriptor = make_ring(SHAPE)
    for nbytes in (0, SHAPE.nbytes - 1, SHAPE.nbytes + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, nbytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    ring.close()
    os.close(descriptor)


@pytest.mark.parametrize(
    ("nbytes", "seals", "has_pages", "says"),
    [
        *((SHAPE.nbytes, SEALS & ~seal, True, "must be sealed") for seal in (SEALS, *ALL_SEALS)),
        (SHAPE.nbytes, SEALS, False, "memory with holes"),  # the receiver would have to pay for the missing pages
        *((nbytes, SEALS, True, f"{nbytes} bytes of memory") for nbytes in (0, SHAPE.nbytes - 1, SHAPE.nbytes + 1)),
    ],
)
def test_memory_whose_access_could_fault_is_refused(nbytes: int, seals: int, has_pages: bool, says: str) -> None:
    descriptor = memory(nbytes, seals, has_pages=has_pages)
    with pytest.raises(GreetingRefusedError, match=says) as refused:
        map_ring(descriptor, SHAPE)
    assert refused.value.cause_name == "bad_memory"
    os.close(descriptor)


def test_nobody_makes_holes_in_a_ring() -> None:
    ring, descriptor = make_ring(SHAPE)
    libc = ctypes.CDLL(None, use_errno=True)
    punch_hole_keep_size = 3
    of = (ctypes.c_long(0), ctypes.c_long(SHAPE.nbytes))
    assert libc.fallocate(descriptor, punch_hole_keep_size, *of) == -1
    assert ctypes.get_errno() == errno.EPERM
    ring.close()
    os.close(descriptor)


def test_memory_of_huge_pages_is_refused() -> None:
    """Huge pages may run out at the first access, which kills the process."""
    descriptor = memory(2**24, SEALS, os.MFD_ALLOW_SEALING | os.MFD_HUGETLB, has_pages=False)
    with pytest.raises(GreetingRefusedError, match="huge pages"):
        map_ring(descriptor, RingShape(2**22, 4))
    os.close(descriptor)


def test_what_is_no_memory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(SHAPE.nbytes))
    left, right = socket.socketpair()
    with left, right, (tmp_path / "file").open("rb") as file:
        for descriptor in (left.fileno(), file.fileno()):
            with pytest.raises(GreetingRefusedError, match="no memory"):
                map_ring(descriptor, SHAPE)


def test_a_piece_that_is_held_keeps_the_memory_and_nothing_else() -> None:
    ring, descriptor = make_ring(SHAPE)
    os.close(descriptor)
    held = ring.slots[2][:10]
    ring.close()
    assert bytes(held) == bytes(10)
    del held, ring


def test_a_system_without_memory_to_share_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(NoSharedMemoryError, match="gives no memory to share: Operation not permitted"):
        make_ring(SHAPE)


def test_memory_that_cannot_be_had_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> mmap.mmap:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(NoSharedMemoryError, match="Cannot allocate memory"):
        make_ring(SHAPE)
    descriptor = memory(SHAPE.nbytes, SEALS)
    with pytest.raises(GreetingRefusedError, match="cannot be mapped"):
        map_ring(descriptor, SHAPE)
    os.close(descriptor)
