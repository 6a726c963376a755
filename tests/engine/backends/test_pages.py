"""Tensors in large pages: aligned, and freed with the last tensor of a chunk."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kvrelay.engine.backends.cpu.native.pages import LargePages

WHICH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def mapped(tensor: torch.Tensor) -> dict[str, int]:
    """Linux's figures in bytes for the memory of a tensor. Empty if nothing is mapped there."""
    return mapped_at(tensor.data_ptr())


def mapped_at(address: int) -> dict[str, int]:
    found: dict[str, int] = {}
    is_it = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first:
            start, end = (int(part, 16) for part in first.split("-"))
            is_it = start <= address < end
        elif is_it and rest[1:] == ["kB"]:
            found[first[:-1]] = 1024 * int(rest[0])
    return found


def num_present(tensor: torch.Tensor) -> int:
    """The number of a tensor's pages that have memory."""
    first, num_pages = tensor.data_ptr() // mmap.PAGESIZE, tensor.nbytes // mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(8 * first)
        entries = np.frombuffer(file.read(8 * num_pages), dtype=np.uint64)
    assert len(entries) == num_pages
    return int((entries >> np.uint64(63)).sum())


def has_large_pages() -> bool:
    """Whether Linux gives large pages now to who asks for them: it has none when memory is scarce or in pieces."""
    taken = mmap.mmap(-1, 2**26, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    taken.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(taken, dtype=np.uint8)
    before = mapped_at(memory.ctypes.data)["AnonHugePages"]
    memory[:] = 1
    return mapped_at(memory.ctypes.data)["AnonHugePages"] - before > 2**25


def test_tensors_share_no_byte_and_begin_at_a_cache_line() -> None:
    pages = LargePages()
    shapes = [(3, 5), (1,), (2, 48, 7), (2**25,), (2**26 + 1,), (9,)]
    tensors = [pages.empty(shape, torch.bfloat16) for shape in shapes]
    for place, tensor in enumerate(tensors):
        tensor.fill_(place)
    for place, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        assert tensor.shape == shape
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0
        assert (tensor == place).all()


@pytest.mark.skipif(sys.platform != "linux" or not WHICH.exists(), reason="no large pages")
def test_what_is_written_to_lies_in_large_pages() -> None:
    if "[never]" in WHICH.read_text():
        pytest.skip("this machine gives no large pages")
    tensor = LargePages().empty((2**24,), torch.bfloat16)
    assert num_present(tensor) < 8, "nobody has written to it"
    before = mapped(tensor)["AnonHugePages"]  # of other memory, which Linux may count together with this
    tensor.fill_(1)
    assert num_present(tensor) == tensor.nbytes // mmap.PAGESIZE
    large_nbytes = mapped(tensor)["AnonHugePages"] - before
    if large_nbytes <= 2**24 and not has_large_pages():
        pytest.skip("this machine has no large pages left")
    assert large_nbytes > 2**24


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells what is mapped")
def test_a_chunk_goes_with_the_last_tensor_in_it() -> None:
    pages = LargePages()
    first, second = (pages.empty((2**24,), torch.bfloat16) for _ in range(2))
    last = pages.empty((2**24,), torch.bfloat16)  # in the next chunk
    second.fill_(1)
    address = second.data_ptr()
    del first
    assert mapped_at(address)["Rss"] >= 2**25
    del second
    assert mapped_at(address).get("Rss", 0) < 2**25
    assert last.shape == (2**24,)
