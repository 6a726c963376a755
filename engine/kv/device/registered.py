"""Memory of this process that a device's copies reach directly, beside pinned slots: rings that workers of one host share, and the
tier of blocks in the host's memory.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kvrelay.engine.kv.device.copies import CopyDevice

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Range:
    start: int  # an address
    tensor: torch.Tensor  # [nbytes] uint8


class RegisteredMemory:
    """What is registered with one device. Thread-safe."""

    def __init__(self, device: CopyDevice) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._ranges: list[_Range] = []

    def register(self, memory: memoryview) -> Callable[[], None] | None:
        """Let copies reach ``memory``, which begins with a page. None if the device cannot.

        Otherwise the caller calls the result once, before it unmaps the memory and when nobody copies there any more.
        """
        address = _address(memory)
        if not self._device.register(address, memory.nbytes, is_read_only=memory.readonly):
            logger.warning("the device cannot reach memory that is shared with it; its blocks pass pinned memory")
            return None
        # From the address: a tensor over the buffer itself would keep it mapped, and torch warns about memory that is read-only.
        tensor = torch.frombuffer((ctypes.c_uint8 * memory.nbytes).from_address(address), dtype=torch.uint8)
        registered = _Range(address, tensor)
        with self._lock:
            self._ranges.append(registered)

        def end() -> None:
            with self._lock:
                self._ranges.remove(registered)
            self._device.unregister(address)

        return end

    def find(self, memory: memoryview) -> torch.Tensor | None:
        """``memory`` as a tensor, ``[nbytes]`` uint8, if it is part of something registered. Do not use it after that has ended."""
        if not self._ranges:
            return None
        address = _address(memory)
        with self._lock:
            for one in self._ranges:
                if one.start <= address and address + memory.nbytes <= one.start + len(one.tensor):
                    return one.tensor[address - one.start : address - one.start + memory.nbytes]
        return None


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
