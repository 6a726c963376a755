"""Blocks of a rank whose pool its leader cannot access. They go through shared memory, one at a time, with a link of their own.

    leader   Fetch ─▶            ─▶ reads the memory         fills the memory ─▶ Put ─▶            ─▶ launches steps
    rank              copies ─▶ Moved                                                   copies ─▶ Moved

A step launched after ``Moved`` sees the block that was put. A block that a step computed can be fetched when the leader's part of
the step has returned. Copies run beside steps.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from kvrelay.engine.kv.device.copies import CopyDevice
from kvrelay.engine.ranks.link import Link

Bytes = npt.NDArray[np.uint8]


class Fetch(msgspec.Struct, frozen=True, tag=True):
    """Copy a block into the shared memory."""

    block_id: int


class Put(msgspec.Struct, frozen=True, tag=True):
    """Copy the shared memory into a block."""

    block_id: int


class Moved(msgspec.Struct, frozen=True, tag=True):
    """The copy is done, or failed, with the reason."""

    failed: str | None = None


ToBlocks = Fetch | Put


class BlockServer:
    """The rank's end. One thread calls ``serve``."""

    def __init__(self, link: Link[ToBlocks], blocks: torch.Tensor, memory: int, device: CopyDevice) -> None:
        """``blocks``: the pool's bytes, ``[num_blocks, block_nbytes]`` uint8, on ``device``. ``memory``: a descriptor."""
        self._link = link
        self._blocks = blocks
        self._device = device
        os.ftruncate(memory, blocks.shape[1])
        self._memory = torch.from_numpy(shared_bytes(memory, blocks.shape[1]))

    def serve(self) -> None:
        """Serve until the leader ends."""
        try:
            while (message := self._link.receive()) is not None:
                self._link.send(Moved(self._move(message)))
        except (EOFError, OSError):
            pass
        finally:
            self._link.shut()  # threads that wait for a block get an error

    def _move(self, message: ToBlocks) -> str | None:
        block = self._blocks[message.block_id]
        target, source = (self._memory, block) if isinstance(message, Fetch) else (block, self._memory)
        try:
            self._device.copy(target, source).synchronize()
        except RuntimeError as error:
            return str(error)
        return None


class BlocksOfRank:
    """The leader's end. Implements :class:`kvrelay.engine.kv.gathered.Part`. Any thread."""

    def __init__(self, link: Link[Moved], memory: int, block_nbytes: int) -> None:
        """``memory``: descriptor of the memory shared with the rank's :class:`BlockServer`."""
        self._link = link
        self._memory = shared_bytes(memory, block_nbytes)
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def reading(self, block_id: int) -> Iterator[Bytes]:
        """See Part."""
        with self._lock:
            self._ask(Fetch(block_id))
            yield self._memory

    @contextlib.contextmanager
    def writing(self, block_id: int) -> Iterator[Bytes]:
        """See Part."""
        with self._lock:
            yield self._memory
            self._ask(Put(block_id))

    def _ask(self, message: ToBlocks) -> None:
        try:
            self._link.send(message)
            answer = self._link.receive()
        except (EOFError, OSError) as error:
            raise RuntimeError(f"a rank is gone, and its part of block {message.block_id}: {error}") from error
        if answer is None or answer.failed is not None:
            raise RuntimeError(f"a rank has not copied block {message.block_id}: {answer}")


class OwnBlocks:
    """The leader's own part on a GPU. Implements :class:`kvrelay.engine.kv.gathered.Part`. Any thread."""

    def __init__(self, blocks: torch.Tensor, device: CopyDevice) -> None:
        """``blocks``: as for a BlockServer."""
        self._blocks = blocks
        self._device = device
        self._memory = torch.empty(blocks.shape[1], dtype=torch.uint8)
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def reading(self, block_id: int) -> Iterator[Bytes]:
        """See Part."""
        with self._lock:
            self._device.copy(self._memory, self._blocks[block_id]).synchronize()
            yield self._memory.numpy()

    @contextlib.contextmanager
    def writing(self, block_id: int) -> Iterator[Bytes]:
        """See Part."""
        with self._lock:
            yield self._memory.numpy()
            self._device.copy(self._blocks[block_id], self._memory).synchronize()


def shared_bytes(descriptor: int, nbytes: int) -> Bytes:
    """Memory that a rank and its leader share."""
    return np.frombuffer(mmap.mmap(descriptor, nbytes), dtype=np.uint8)
