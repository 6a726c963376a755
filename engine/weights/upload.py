"""Copies tensors of a mapped file to a GPU.

A copy straight from the file passes memory of the driver's own: one thread fills it, and the device waits meanwhile. Here all of
torch's threads copy a piece of the file into pinned memory, while the device takes the piece before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle

import torch

from kvrelay.engine.step.uploads import Passed

_NBYTES = 2**25  # of a piece


@dataclass(frozen=True, slots=True)
class Pinned:
    """Memory that a piece passes."""

    memory: torch.Tensor  # [bytes] uint8
    copied: Passed  # behind the last copy from it


class TensorUpload:
    """One thread's copies of large tensors to a GPU. Holds two pieces of pinned memory."""

    def __init__(self, device: torch.device, pinned: Callable[[], Pinned] | None = None) -> None:
        """``pinned``: makes the memory; None: 32 MiB each."""
        self._device = device
        make = _pinned if pinned is None else pinned
        self._buffers = cycle([make(), make()])

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy on the device. Whatever is launched there later finds it."""
        there = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        buffer = next(self._buffers)
        nbytes = buffer.memory.numel()
        for piece, place in zip(pieces(tensor, nbytes), pieces(there, nbytes), strict=True):
            buffer.copied.synchronize()
            passing = buffer.memory[: piece.nbytes].view(piece.dtype).view(piece.shape)
            passing.copy_(piece)
            place.copy_(passing, non_blocking=True)
            buffer.copied.record()
            buffer = next(self._buffers)
        return there


def pieces(tensor: torch.Tensor, max_nbytes: int) -> Iterator[torch.Tensor]:
    """Views of at most ``max_nbytes`` bytes that make up the tensor. Those of a contiguous tensor are contiguous.

    ``max_nbytes``: at least an element.
    """
    if tensor.numel() == 0:
        return
    if tensor.nbytes <= max_nbytes:
        yield tensor
    elif len(tensor) == 1:
        yield from pieces(tensor[0], max_nbytes)
    else:
        num_rows = max(1, max_nbytes // (tensor.nbytes // len(tensor)))
        for part in torch.split(tensor, num_rows):
            yield from pieces(part, max_nbytes)


def _pinned() -> Pinned:
    copied: Passed = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return Pinned(torch.empty(_NBYTES, dtype=torch.uint8, pin_memory=True), copied)
