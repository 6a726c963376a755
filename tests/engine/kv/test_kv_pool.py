"""The pool's bytes on the CPU: views of the right memory instead of copies."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.common.block_digests import digests_of
from kvrelay.engine.config.model import load_config
from kvrelay.engine.kv.device.copies import CudaCopies, StagingPlan
from kvrelay.engine.kv.device.staged_read import StagedRead
from kvrelay.engine.kv.geometry import geometry_of
from kvrelay.engine.kv.pool import KvPool


@pytest.fixture
def pool(llama: tuple[Path, Any]) -> KvPool:
    return KvPool(geometry_of(load_config(llama[0]), 8, torch.bfloat16), 6, torch.device("cpu"))


def test_views_are_the_pools_own_memory(pool: KvPool) -> None:
    view = pool.open_write(4)
    assert (view.format, view.nbytes, view.readonly) == ("B", pool.block_nbytes, False)
    view[:] = bytes(range(256)) * (pool.block_nbytes // 256)
    pool.close_write(4)
    assert bytes(pool.tensor[4].view(torch.uint8).flatten().tolist()) == bytes(view)
    assert not pool.tensor[3].any()
    assert not pool.tensor[5].any()
    pool.tensor[4, 2, 1, 1, 7, 15] = 1.0
    read = pool.open_read(4)
    assert bytes(read[-2:]) == b"\x80\x3f"
    pool.close_read(4)


def test_many_blocks_are_copied_at_once_as_they_were_before(pool: KvPool) -> None:
    before = torch.randn(pool.tensor.shape).to(pool.tensor.dtype)
    pool.tensor.copy_(before)
    pool.copy_blocks([(1, 4), (1, 5), (0, 1)])
    assert torch.equal(pool.tensor, before[[0, 0, 2, 3, 1, 1]])
    with pytest.raises(ValueError, match="block 6 of a pool of 6"):
        pool.copy_blocks([(1, 4), (2, 6)])
    assert torch.equal(pool.tensor[4], before[1])


@pytest.mark.parametrize("block_id", [-1, 6])
def test_blocks_outside_the_pool_are_refused(pool: KvPool, block_id: int) -> None:
    with pytest.raises(ValueError, match=f"block {block_id} of a pool of 6"):
        pool.open_read(block_id)
    with pytest.raises(ValueError, match=f"block {block_id} of a pool of 6"):
        pool.open_write(block_id)


class Reader:
    is_done = False


def gpu_pool(directory: Path, num_blocks: int) -> KvPool:
    geometry, device = geometry_of(load_config(directory), 8, torch.bfloat16), torch.device("cuda")
    nbytes = 5 * geometry.block_nbytes
    return KvPool(geometry, num_blocks, device, staging=StagingPlan(CudaCopies(device), nbytes))


def test_a_pool_that_the_host_cannot_read_is_not_opened_without_staging(llama: tuple[Path, Any]) -> None:
    pool = KvPool(geometry_of(load_config(llama[0]), 8, torch.bfloat16), 6, torch.device("meta"))
    with pytest.raises(AssertionError, match="a pool on meta without a staging plan"):
        pool.open_read(1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_bytes_travel_through_staging(llama: tuple[Path, Any]) -> None:
    pool = gpu_pool(llama[0], 64)
    for block_id in range(32):
        pool.tensor[block_id] = torch.randn(pool.tensor[1].shape, device="cuda")
    torch.cuda.current_stream().synchronize()
    reads = [pool.open_read(block_id) for block_id in range(32)]
    for block_id, read in enumerate(reads):
        assert isinstance(read, StagedRead)
        view = read.wait(Reader(), 10.0)
        assert view is not None
        pool.open_write(32 + block_id)[:] = view
        pool.close_read(block_id)
        pool.close_write(32 + block_id)
    pool.order_steps()
    assert torch.equal(pool.tensor[:32], pool.tensor[32:])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_the_device_hashes_blocks_and_reaches_memory_that_two_workers_share(llama: tuple[Path, Any]) -> None:
    """The memory is mapped as both ends of a ring map it: writable, and read-only. Two blocks go and are hashed at a time."""
    pool = gpu_pool(llama[0], 4)
    pool.tensor[:2] = torch.randn(pool.tensor[:2].shape, device="cuda")
    torch.cuda.current_stream().synchronize()
    expected = [digests_of(one.numpy().data) for one in pool.blocks[:2].cpu()]
    assert pool.register is not None
    slot_nbytes = -(-pool.block_nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    slots = [slice(start, start + pool.block_nbytes) for start in (0, slot_nbytes)]
    descriptor = os.memfd_create("ring")
    os.ftruncate(descriptor, 2 * slot_nbytes)
    sent = memoryview(mmap.mmap(descriptor, 2 * slot_nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
    came = memoryview(
        mmap.mmap(descriptor, 2 * slot_nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
    )
    os.close(descriptor)
    ends = [pool.register(sent), pool.register(came)]
    assert None not in ends
    copies = [pool.open_read(block_id).begin_copy_to(sent[slot]) for block_id, slot in enumerate(slots)]  # type: ignore[union-attr]
    assert [copy() for copy in copies] == expected  # type: ignore[misc]
    for block_id in range(2):
        pool.close_read(block_id)
    writes = [pool.begin_write(2 + number, 0, came[slot]) for number, slot in enumerate(slots)]
    assert [write() for write in writes] == expected
    assert torch.equal(pool.tensor[:2], pool.tensor[2:])
    for end in ends:
        end()  # type: ignore[misc]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_what_is_computed_runs_behind_the_blocks_that_came(llama: tuple[Path, Any]) -> None:
    pool = gpu_pool(llama[0], 600)
    content = bytes(range(256)) * (pool.block_nbytes // 256)
    for block_id in range(600):
        pool.open_write(block_id)[:] = content
        pool.close_write(block_id)
    pool.order_steps()
    seen = pool.tensor.view(torch.uint8).view(600, -1).clone()
    expected = torch.frombuffer(bytearray(content), dtype=torch.uint8).cuda()
    assert torch.equal(seen, expected.expand(600, -1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_blocks_are_copied_in_order_with_what_is_computed(llama: tuple[Path, Any]) -> None:
    pool = gpu_pool(llama[0], 6)
    pool.tensor[1] = torch.randn(pool.tensor[1].shape, device="cuda")
    pool.copy_blocks([(1, 4), (1, 5)])
    pool.tensor[1] = 0.0
    assert torch.equal(pool.tensor[4], pool.tensor[5])
    assert pool.tensor[4].any()
