"""Copies between a GPU's pool and pinned memory, behind one interface: the very calls to CUDA, and nothing that decides anything.

When a block is copied, and who may touch which memory until then, is :mod:`kvrelay.engine.kv.staging`, which is tested without a
GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class Copied(Protocol):
    """The point behind one copy (a CUDA event). Any thread."""

    def query(self) -> bool:
        """Whether the device has passed it. Raises RuntimeError if the copy, or the device, has failed."""

    def synchronize(self) -> None:
        """Wait until the device has passed it. Raises RuntimeError as ``query``."""


class CopyDevice(Protocol):
    """One device's copies. All run one behind the other, in the order of their launches; the host waits for none of them."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """``[nbytes]`` uint8 of host memory that the device copies from and to by itself. Raises RuntimeError without room."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Copied:
        """Launch a copy. Both tensors belong to it until the point that this returns has passed. Any thread, one at a time."""

    def hold_steps(self, copied: Copied) -> None:
        """What the calling thread launches to compute from now on begins behind ``copied``. The host does not wait."""


@dataclass(frozen=True, slots=True)
class StagingPlan:
    """What a pool that the host cannot read is staged with."""

    device: CopyDevice
    nbytes: int | None = None  # of pinned memory, at most; None: a default, or four blocks if these are more


class CudaCopies:
    """One side stream of a GPU: its copy engines work while kernels run. Implements :class:`CopyDevice`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pinned(self, nbytes: int) -> torch.Tensor:
        """See CopyDevice."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Copied:
        """See CopyDevice. The stream waits for no kernel: blocks are opened when the step that computed them has returned."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            # A new one for each copy: an event that is recorded again means another point to all who hold it.
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        return copied

    def hold_steps(self, copied: Copied) -> None:
        """See CopyDevice."""
        assert isinstance(copied, torch.cuda.Event), copied
        torch.cuda.current_stream(self._device).wait_event(copied)
