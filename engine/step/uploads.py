"""From the host to a GPU: a step's small arrays in one copy, which nobody waits for.

Copies from pageable memory make the host wait, and each costs some microseconds; a step has a dozen arrays of a few kilobytes, and
masks of a bit per token for guided rows. They are packed into pinned memory and copied at once. The memory is used again when its
copy is over, and a step's copies are, before the next but one is packed. Each buffer is as large as the largest upload that it had:
with 64 guided rows of a vocabulary of 128k these are 1 MiB, twenty times.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16  # bytes; of each array's place, so that any type may be read there
_MIN_NBYTES = 2**16
# A step packs up to nine times, and once more with adapters, some of it behind its forward pass, and two steps are under way: with
# fewer buffers, launching one would wait for the other. Logits processors make it a few more: there it may.
_NUM_BUFFERS = 20


@dataclass(frozen=True, slots=True)
class Joined:
    """Arrays, at least one, that go up as one: one behind the other along the first axis. On the host they are copied once."""

    parts: Seq[npt.NDArray[Any]]  # of one type, and of one shape but for the first axis

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all together."""
        return (sum(map(len, self.parts)), *self.parts[0].shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of each."""
        return self.parts[0].dtype

    @property
    def nbytes(self) -> int:
        """Of all together."""
        return sum(part.nbytes for part in self.parts)


class Passed(Protocol):
    """A point that the device has reached or not (a CUDA event)."""

    def record(self) -> None:
        """Behind all that was launched so far."""

    def synchronize(self) -> None:
        """Wait until the device is there."""


class _Buffer:
    def __init__(self, nbytes: int, *, is_pinned: bool, copied: Passed | None) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=is_pinned)
        self.copied = copied


def packed_nbytes(arrays: Seq[npt.NDArray[Any] | Joined]) -> int:
    """Of the memory that they take together."""
    return _starts(arrays)[-1]


def _starts(arrays: Seq[npt.NDArray[Any] | Joined]) -> list[int]:
    """Where each begins in the memory of all, and where the last one ends."""
    aligned = (-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)
    return list(accumulate(aligned, initial=0))


class Uploader:
    """One thread's uploads to one device. On a CPU, where tests run it, it copies as well."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[_Buffer] = []
        self._next = 0

    def upload(self, arrays: Seq[npt.NDArray[Any] | Joined], memory: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Tensors of the arrays' shapes and types, views of one piece of the device's memory.

        ``memory``: that piece, bytes, of :func:`packed_nbytes` at least; None: a new one.
        """
        starts = _starts(arrays)
        nbytes = starts.pop()
        buffer = self._buffer(nbytes)
        packed = buffer.memory.numpy()
        for start, array in zip(starts, arrays, strict=True):
            end = start
            for part in array.parts if isinstance(array, Joined) else (array,):
                begin, end = end, end + part.nbytes
                packed[begin:end] = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        there = torch.empty(nbytes, dtype=torch.uint8, device=self._device) if memory is None else memory[:nbytes]
        there.copy_(buffer.memory[:nbytes], non_blocking=True)
        if buffer.copied is not None:
            buffer.copied.record()
        return [
            there[start : start + array.nbytes].view(torch.from_numpy(np.empty(0, array.dtype)).dtype).view(array.shape)
            for start, array in zip(starts, arrays, strict=True)
        ]

    def _buffer(self, nbytes: int) -> _Buffer:
        """The one that was used longest ago, or a new one; nobody reads it any more."""
        if len(self._buffers) < _NUM_BUFFERS:
            self._buffers.append(self._make(nbytes))
        buffer = self._buffers[self._next]
        if buffer.copied is not None:
            buffer.copied.synchronize()
        if buffer.memory.numel() < nbytes:
            buffer = self._buffers[self._next] = self._make(nbytes)
        self._next = (self._next + 1) % _NUM_BUFFERS
        return buffer

    def _make(self, nbytes: int) -> _Buffer:
        is_cuda = self._device.type == "cuda"
        copied: Passed | None = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        return _Buffer(max(_MIN_NBYTES, 1 << (nbytes - 1).bit_length()), is_pinned=is_cuda, copied=copied)
