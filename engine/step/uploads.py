"""Uploads a step's small arrays to a GPU in one copy, without waiting.

Copies from pageable memory make the host wait, and each copy costs some microseconds. A step has a dozen arrays of a few kilobytes,
and masks with a bit per token for guided rows. They are packed into pinned memory and copied at once. The memory is reused when its
copy is over; a step's copies are over before the next but one is packed. Each buffer is as large as the largest upload that it had:
with 64 guided rows and a vocabulary of 128k, 1 MiB, twenty times.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16  # bytes; arrays start at multiples, so that any type can be read
_MIN_NBYTES = 2**16
# A step packs up to nine times, and once more with adapters, partly after its forward pass, and two steps are under way.
# With fewer buffers,
# launching one would wait for the other. Logits processors need a few more, and may wait.
_NUM_BUFFERS = 20


@dataclass(frozen=True, slots=True)
class Joined:
    """At least one array that is uploaded as one, concatenated along the first axis. The host copies it once."""

    parts: Seq[npt.NDArray[Any]]  # of one type, with equal shapes except for the first axis

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the concatenation."""
        return (sum(map(len, self.parts)), *self.parts[0].shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of each."""
        return self.parts[0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the concatenation."""
        return sum(part.nbytes for part in self.parts)


class Passed(Protocol):
    """A point in the device's stream (a CUDA event)."""

    def record(self) -> None:
        """Put the point after everything launched so far."""

    def synchronize(self) -> None:
        """Wait until the device has reached it."""


class _Buffer:
    def __init__(self, nbytes: int, *, is_pinned: bool, copied: Passed | None) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=is_pinned)
        self.copied = copied


def packed_nbytes(arrays: Seq[npt.NDArray[Any] | Joined]) -> int:
    """Bytes of memory that the arrays take together."""
    return _starts(arrays)[-1]


def _starts(arrays: Seq[npt.NDArray[Any] | Joined]) -> list[int]:
    """The start of each array in the common memory, and the end of the last one."""
    aligned = (-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)
    return list(accumulate(aligned, initial=0))


class Uploader:
    """One thread's uploads to one device. On a CPU, where tests use it, it also copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[_Buffer] = []
        self._next = 0

    def upload(self, arrays: Seq[npt.NDArray[Any] | Joined], memory: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Tensors with the arrays' shapes and types, which are views of one piece of the device's memory.

        ``memory``: that piece, of at least :func:`packed_nbytes` bytes; None: a new one.
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
        """The least recently used buffer, once it is no longer read; or a new one."""
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
