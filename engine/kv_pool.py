"""The paged KV pool: one tensor, block by block contiguous, readable and writable as bytes.

``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``; index 2 is 0 for keys, 1 for values. Heads come before tokens so
that a slice of heads is contiguous per layer.
"""

from __future__ import annotations

import math
import mmap
import threading

import torch

from kvrelay.engine.model_config import ModelConfig


class KvPool:
    """Owns the tensor. Implements :class:`kvrelay.engine.interface.BlockStore`.

    On CPU the byte views are the pool's own memory. On CUDA they are pinned staging buffers, one per open block, reused when
    closed; copies run on a side stream that first waits for what the model's stream has been given.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim)
        # Zeros, not empty: attention reads the unwritten tail of a block under a mask, and NaN survives masks.
        self.tensor = _host_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        self.num_blocks = num_blocks
        self.block_nbytes = self.tensor[0].nbytes
        self._bytes = self.tensor.view(num_blocks, -1).view(torch.uint8)  # [num_blocks, block_nbytes]
        self._host: memoryview | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cpu":
            self._host = memoryview(self._bytes.numpy()).cast("B")
        else:
            self._stream = torch.cuda.Stream(device)
        self._lock = threading.Lock()
        self._free_staging: list[torch.Tensor] = []
        self._open_staging: dict[tuple[int, bool], torch.Tensor] = {}

    def open_read(self, block_id: int) -> memoryview:
        """See BlockStore."""
        if self._host is not None:
            return self._host_view(block_id)
        staging = self._stage(block_id, for_write=False)
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.default_stream(self.tensor.device))
        with torch.cuda.stream(self._stream):
            staging.copy_(self._bytes[block_id], non_blocking=True)
        self._stream.synchronize()
        return memoryview(staging.numpy())

    def close_read(self, block_id: int) -> None:
        """See BlockStore."""
        if self._host is None:
            self._unstage(block_id, for_write=False)

    def open_write(self, block_id: int) -> memoryview:
        """See BlockStore."""
        if self._host is not None:
            return self._host_view(block_id)
        return memoryview(self._stage(block_id, for_write=True).numpy())

    def close_write(self, block_id: int) -> None:
        """See BlockStore."""
        if self._host is not None:
            return
        staging = self._open_staging[(block_id, True)]
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            self._bytes[block_id].copy_(staging, non_blocking=True)
        self._stream.synchronize()
        self._unstage(block_id, for_write=True)

    def _host_view(self, block_id: int) -> memoryview:
        assert self._host is not None
        return self._host[block_id * self.block_nbytes : (block_id + 1) * self.block_nbytes]

    def _stage(self, block_id: int, *, for_write: bool) -> torch.Tensor:
        with self._lock:
            staging = self._open_staging.get((block_id, for_write))
            if staging is None:
                if self._free_staging:
                    staging = self._free_staging.pop()
                else:
                    staging = torch.empty(self.block_nbytes, dtype=torch.uint8, pin_memory=True)
                self._open_staging[(block_id, for_write)] = staging
            return staging

    def _unstage(self, block_id: int, *, for_write: bool) -> None:
        with self._lock:
            self._free_staging.append(self._open_staging.pop((block_id, for_write)))


def _host_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in fresh pages, taken from the system as they are touched.

    Huge pages where the system has them: a block's layers lie far apart, and with 4 KiB pages faulting a pool in took seven
    times as long.
    """
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
