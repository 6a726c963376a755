"""Copies between a GPU's pool and pinned memory: one interface around the CUDA calls, without any decisions.

:mod:`kvrelay.engine.kv.staging` decides when a block is copied and who may use which memory until then. It is tested without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class Copied(Protocol):
    """A point in the stream after one copy (a CUDA event). Use it on any thread."""

    def query(self) -> bool:
        """Whether the device has passed it. Raises RuntimeError if the copy, or the device, has failed."""

    def synchronize(self) -> None:
        """Wait until the device has passed it. Raises RuntimeError like ``query``."""


class CopyDevice(Protocol):
    """One device's copies. They run one after the other, in the order of their launches; the host does not wait for them."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """``[nbytes]`` uint8 of pinned host memory, which the device can copy directly.

        Raises RuntimeError if there is none left.
        """

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Copied:
        """Launch a copy. Do not change either tensor before the returned point has passed. Any thread, one at a time."""

    def hold_steps(self, copied: Copied) -> None:
        """Computation that the calling thread launches from now on runs after ``copied``. The host does not wait."""


@dataclass(frozen=True, slots=True)
class StagingPlan:
    """How to stage a pool that the host cannot read."""

    device: CopyDevice
    nbytes: int | None = None  # most pinned memory; None: a default, or four blocks if these are more


class CudaCopies:
    """One side stream of a GPU: its copy engines work while kernels run. Implements :class:`CopyDevice`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pinned(self, nbytes: int) -> torch.Tensor:
        """See CopyDevice."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Copied:
        """See CopyDevice.

        The stream waits for no kernel, because a block is opened only after the step that computed it has returned.
        """
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            # One event per copy: recording an event again would move it for everyone who holds it.
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        return copied

    def hold_steps(self, copied: Copied) -> None:
        """See CopyDevice."""
        assert isinstance(copied, torch.cuda.Event), copied
        torch.cuda.current_stream(self._device).wait_event(copied)
