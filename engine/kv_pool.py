"""The paged KV pool: one tensor, block by block contiguous, readable and writable as bytes.

``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``; index 2 is 0 for keys, 1 for values. Heads come before tokens
so that a slice of heads is contiguous per layer.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvrelay.engine.model_config import ModelConfig

_MADV_POPULATE_WRITE = 23  # <linux/mman.h>; Python has no name for it


class KvPool:
    """Owns the tensor. Implements :class:`kvrelay.engine.interface.BlockStore`.

    On CPU the byte views are the pool's own memory. On CUDA they are pinned staging buffers, one per open block, reused when
    closed; copies run on a side stream. That stream waits for nothing: a step returns only when its writes are done, so what a
    caller may read is there, and waiting for the *next* step would undo shipping one chunk while the next one computes.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        num_spare: int = 0,
    ) -> None:
        """``num_spare``: blocks behind the last one that the engine keeps for itself; nobody opens or owns them."""
        shape = (num_blocks + num_spare, config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim)
        # Zeros, not empty: attention reads the unwritten tail of a block under a mask, and NaN survives masks.
        self.tensor = (
            _host_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        )
        self.num_blocks = num_blocks
        self.block_nbytes = self.tensor[0].nbytes
        self._bytes = self.tensor.view(len(self.tensor), -1).view(torch.uint8)  # [num_blocks + num_spare, block_nbytes]
        self._host: memoryview | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cpu":
            self._host = self._bytes.numpy().data.cast("B")
        else:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._free_staging: list[torch.Tensor] = []
        self._reads: dict[int, _OpenRead] = {}
        self._writes: dict[int, torch.Tensor] = {}

    def open_read(self, block_id: int) -> memoryview:
        """See BlockStore. Two readers of one block share a view."""
        self._check(block_id)
        if self._host is not None:
            return self._host_view(block_id)
        # Under the lock, so that a second reader does not get the view before the first one's copy is done.
        with self._lock:
            read = self._reads.get(block_id)
            if read is None:
                read = _OpenRead(self._take_staging())
                self._copy(read.staging, self._bytes[block_id])
                self._reads[block_id] = read  # not before: the next reader would take what a failed copy left
            read.num_readers += 1
            return read.staging.numpy().data

    def close_read(self, block_id: int) -> None:
        """See BlockStore."""
        if self._host is not None:
            return
        with self._lock:
            read = self._reads[block_id]
            read.num_readers -= 1
            if read.num_readers == 0:
                self._free_staging.append(self._reads.pop(block_id).staging)

    def open_write(self, block_id: int) -> memoryview:
        """See BlockStore. Raises ValueError if the block is open for writing already."""
        self._check(block_id)
        if self._host is not None:
            return self._host_view(block_id)
        with self._lock:
            if block_id in self._writes:
                raise ValueError(f"block {block_id} is open for writing already")
            self._writes[block_id] = self._take_staging()
            return self._writes[block_id].numpy().data

    def close_write(self, block_id: int) -> None:
        """See BlockStore."""
        if self._host is not None:
            return
        with self._lock:
            staging = self._writes.pop(block_id)
        self._copy(self._bytes[block_id], staging)
        with self._lock:
            self._free_staging.append(staging)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks as they stand, (source, target) each, on the device, in order with its steps. See Engine."""
        for block_id in itertools.chain.from_iterable(pairs):
            self._check(block_id)
        sources, targets = torch.tensor(pairs, device=self._bytes.device).unbind(1)
        self._bytes.index_copy_(0, targets, self._bytes[sources])

    def _check(self, block_id: int) -> None:
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block {block_id} of a pool of {self.num_blocks}")

    def _host_view(self, block_id: int) -> memoryview:
        assert self._host is not None
        return self._host[block_id * self.block_nbytes : (block_id + 1) * self.block_nbytes]

    def _take_staging(self) -> torch.Tensor:
        if self._free_staging:
            return self._free_staging.pop()
        return torch.empty(self.block_nbytes, dtype=torch.uint8, pin_memory=True)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        copied.synchronize()


@dataclass(slots=True)
class _OpenRead:
    staging: torch.Tensor  # [block_nbytes] uint8, pinned
    num_readers: int = 0


def _host_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in memory that is there, not only promised: a page that is taken from the system at its first write costs that
    write, in the middle of somebody's stream, a millisecond; and a limit on memory is met at the start, not under load.

    Huge pages where the system has them: a block's layers lie far apart, and with 4 KiB pages faulting a pool in took seven
    times as long.
    """
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        with contextlib.suppress(OSError):  # older than 5.14: pages come when they are written
            memory.madvise(_MADV_POPULATE_WRITE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
