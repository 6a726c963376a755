"""The paged KV pool: one tensor, contiguous block by block, which can be read and written as bytes.

A block holds a group's layers one after the other, and each layer the keys of all heads, then their values
(:mod:`kvrelay.engine.kv.views`). Heads come before tokens, so that a slice of heads is contiguous in a layer. Blocks are physical
ones of any group; a smaller group does not need all of a block.

If all keys and values have one size, the tensor has the shape ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``;
in the third dimension 0 is keys and 1 is values, which latents lack. Otherwise it is ``[num_blocks, 1, 1, 1, block_size, n]``.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvrelay.common.block_digests import landed
from kvrelay.common.kv_geometry import KvGeometry
from kvrelay.common.late_bytes import Register
from kvrelay.engine.kv.device.copies import Copied, StagingPlan
from kvrelay.engine.kv.device.staged_read import StagedRead
from kvrelay.engine.kv.device.staging import Staging
from kvrelay.engine.kv.host_memory import allocated
from kvrelay.engine.step.uploads import Uploader


class KvPool:
    """Owns the tensor. Implements :class:`kvrelay.engine.step.interface.BlockStore`.

    On a CPU the byte views are the pool's own memory. With a staging plan, as on CUDA, they are pinned memory, and blocks are
    copied beside the computation (:mod:`kvrelay.engine.kv.device.staging`).
    """

    def __init__(
        self,
        geometry: KvGeometry,
        num_blocks: int,
        device: torch.device,
        *,
        num_spare: int = 0,
        staging: StagingPlan | None = None,
        shared_memory: int | None = None,
    ) -> None:
        """``num_blocks``: physical ones, of all groups together. ``shared_memory``: descriptor of the memory to use on a CPU, which
        is resized to fit; None: own memory.
        ``num_spare``: extra blocks at the end for the engine itself, which are never opened or owned.
        ``staging``: how blocks get to the host and back; without it, blocks can only be opened on a CPU. Raises ModelError if its
        memory is too small, or cannot be allocated.
        """
        (dtype_name,) = {one.dtype for one in geometry.groups}
        dtype: torch.dtype = getattr(torch, dtype_name)
        shape = (num_blocks + num_spare, *_block_shape(geometry, dtype.itemsize))
        # Zeros: attention reads the unwritten tail of a block under a mask, and NaN would survive the mask.
        self.tensor = (
            _host_zeros(shape, dtype, shared_memory)
            if device.type == "cpu"
            else torch.zeros(shape, dtype=dtype, device=device)
        )
        self.geometry = geometry
        self.num_blocks = num_blocks
        self.block_nbytes = self.tensor[0].nbytes
        self._bytes = self.tensor.view(len(self.tensor), -1).view(torch.uint8)  # [num_blocks + num_spare, block_nbytes]
        self._uploader = Uploader(device)  # uploads block numbers; for the model thread only
        self._group_nbytes = [geometry.block_size * group.token_nbytes for group in geometry.groups]
        self._host: memoryview | None = None
        self._staging: Staging | None = None
        if staging is not None:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # the zeros must be written before the first copies
            self._staging = Staging(self._bytes[:num_blocks], staging, self._group_nbytes)
        elif device.type == "cpu":
            self._host = self._bytes.numpy().data.cast("B")

    def open_read(self, block_id: int, group: int = 0) -> memoryview | StagedRead:
        """See BlockStore. Two readers of one block share a view."""
        self._check(block_id)
        if self._host is None:
            return self._staged.open_read(block_id, self._group_nbytes[group])
        return self._host_view(block_id)

    def close_read(self, block_id: int) -> None:
        """See BlockStore."""
        if self._host is None:
            self._staged.close_read(block_id)

    def begin_write(self, block_id: int, group: int, payload: memoryview) -> Callable[[], bytes]:
        """See BlockStore."""
        self._check(block_id)
        if self._host is None:
            return self._staged.begin_write(block_id, payload)
        digests = landed(payload, self._host_view(block_id)[: len(payload)])
        return lambda: digests

    def open_write(self, block_id: int, group: int = 0) -> memoryview:
        """See BlockStore. With staging it raises ValueError if the block is open for writing already."""
        self._check(block_id)
        return self._staged.open_write(block_id) if self._host is None else self._host_view(block_id)

    def close_write(self, block_id: int) -> None:
        """See BlockStore."""
        if self._host is None:
            self._staged.close_write(block_id)

    def order_steps(self) -> Copied | None:
        """Call before a step is launched, on its thread: the step then runs after the blocks that arrived (:class:`Staging`)."""
        return None if self._staging is None else self._staging.order_steps()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, as (source, target), on the device, in order with its steps, without waiting. See Engine."""
        for block_id in itertools.chain.from_iterable(pairs):
            self._check(block_id)
        self.order_steps()
        sources, targets = self._uploader.upload(tuple(np.array(pairs, dtype=np.int64).T))
        self._bytes.index_copy_(0, targets, self._bytes[sources])

    def _check(self, block_id: int) -> None:
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block {block_id} of a pool of {self.num_blocks}")

    def _host_view(self, block_id: int) -> memoryview:
        assert self._host is not None
        return self._host[block_id * self.block_nbytes : (block_id + 1) * self.block_nbytes]

    @property
    def register(self) -> Register | None:
        """See BlockStore."""
        registered = None if self._staging is None else self._staging.registered
        return None if registered is None else registered.register

    @property
    def blocks(self) -> torch.Tensor:
        """The pool's memory, ``[num_blocks, block_nbytes]`` uint8."""
        return self._bytes[: self.num_blocks]

    @property
    def _staged(self) -> Staging:
        assert self._staging is not None, (
            f"a pool on {self.tensor.device} without a staging plan: its blocks cannot be opened"
        )
        return self._staging


def _block_shape(geometry: KvGeometry, itemsize: int) -> tuple[int, ...]:
    """The shape of one block, in elements of the pool."""
    group, block_size = geometry.groups[0], geometry.block_size
    sizes = {(one.num_kv_heads, one.key_size, one.value_size) for one in geometry.groups}
    if len(sizes) > 1 or group.value_size not in (0, group.key_size):
        return (1, 1, 1, block_size, geometry.physical_nbytes // itemsize // block_size)
    num_layers = max(len(one.layers) for one in geometry.groups)
    return (num_layers, 2 if group.value_size else 1, group.num_kv_heads, block_size, group.key_size)


def _host_zeros(shape: tuple[int, ...], dtype: torch.dtype, shared_memory: int | None) -> torch.Tensor:
    """Zeros in memory that is really allocated."""
    nbytes = math.prod(shape) * dtype.itemsize
    if shared_memory is not None:
        os.ftruncate(shared_memory, nbytes)
    return torch.frombuffer(allocated(nbytes, shared_memory), dtype=dtype).view(shape)
