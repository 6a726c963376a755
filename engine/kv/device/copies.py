"""Copies between a GPU's pool and the host's memory, and digests of blocks: one interface around CUDA, without any decisions.

:mod:`kvrelay.engine.kv.device.staging` decides when a block is copied and who may use which memory until then. It is tested
without a GPU.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.common.block_digests import STRETCH_NBYTES, num_stretches

logger = logging.getLogger(__name__)

_READ_ONLY = 8  # cudaHostRegisterReadOnly
# Of pinned memory for digests. Most launches take so much, and use it again: to pin memory of another size waits for all kernels.
_MIN_WORDS = 1024


class Copied(Protocol):
    """A point in the stream after a copy, or behind digests (a CUDA event). Use it on any thread."""

    def query(self) -> bool:
        """Whether the device has passed it. Raises RuntimeError if the copy, or the device, has failed."""

    def synchronize(self) -> None:
        """Wait until the device has passed it. Raises RuntimeError like ``query``."""


@dataclass(frozen=True, slots=True)
class Digests:
    """Digests of some blocks' stretches (:mod:`kvrelay.common.block_digests`) on their way to the host."""

    made: Copied  # behind them
    on_host: npt.NDArray[np.int64]  # [num_blocks, num_stretches]

    def wait(self, index: int) -> bytes:
        """Those of one of the blocks. Raises RuntimeError if the device has failed. On any thread."""
        self.made.synchronize()
        return self.on_host[index : index + 1].tobytes()


class CopyDevice(Protocol):
    """One device's copies and digests. They run one after the other, in the order of their launches; the host waits for none.

    Any thread may launch them, one at a time.
    """

    def pinned(self, nbytes: int) -> torch.Tensor:
        """``[nbytes]`` uint8 of pinned host memory, which the device can copy directly.

        Raises RuntimeError if there is none left.
        """

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Copied:
        """Launch a copy. Do not change either tensor before the returned point has passed."""

    def can_digest(self, nbytes: int) -> bool:
        """Whether ``digest`` takes so many bytes of a block."""

    def digest(self, blocks: torch.Tensor, block_ids: Sequence[int], nbytes: int) -> Digests:
        """Launch: hash the first ``nbytes`` bytes of some blocks, side by side, as they are after the copies so far.

        ``blocks``: ``[num_blocks, block_nbytes]`` uint8 on the device. Raises RuntimeError if it cannot be launched.
        """

    def register(self, address: int, nbytes: int, *, is_read_only: bool) -> bool:
        """Let copies reach memory of this process directly. False if the device cannot. ``address``: of a page."""

    def unregister(self, address: int) -> None:
        """End that, before the memory is unmapped. No copy may use it any more."""

    def hold_steps(self, copied: Copied) -> None:
        """Computation that the calling thread launches from now on runs after ``copied``. The host does not wait."""


@dataclass(frozen=True, slots=True)
class StagingPlan:
    """How to stage a pool that the host cannot read."""

    device: CopyDevice
    nbytes: int | None = None  # most pinned memory; None: a default, or four blocks if these are more


class CudaCopies:
    """One side stream of a GPU: its copy engines work while kernels run. Implements :class:`CopyDevice`.

    By its priority digests start between the thread blocks of a step's kernel. Otherwise they would wait until that kernel ends.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._device: torch.device = self._stream.device
        self._hashing: deque[Digests] = deque()  # a kernel may still use their memory, whether or not anybody waits
        from kvrelay.kernels.rows import digests  # noqa: PLC0415 - Triton takes a second to import, and only a GPU needs it

        self._is_digestible, self._block_digests = digests.is_digestible, digests.block_digests

    def pinned(self, nbytes: int) -> torch.Tensor:
        """See CopyDevice."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Copied:
        """See CopyDevice.

        The stream waits for no kernel, because a block is opened only after the step that computed it has returned.
        """
        with self._on_stream():
            target.copy_(source, non_blocking=True)
        return self._new_point()

    def can_digest(self, nbytes: int) -> bool:
        """See CopyDevice."""
        return self._is_digestible(nbytes)

    def digest(self, blocks: torch.Tensor, block_ids: Sequence[int], nbytes: int) -> Digests:
        """See CopyDevice. The kernel itself reads and writes the host's memory: copies of so few bytes take longer."""
        while self._hashing and self._hashing[0].made.query():
            self._hashing.popleft()
        num_blocks, count = len(block_ids), num_stretches(nbytes)
        num_words = num_blocks * (1 + count)
        memory = torch.empty(max(num_words, _MIN_WORDS), dtype=torch.int64, pin_memory=True)
        numbers, digests = memory[:num_blocks], memory[num_blocks:num_words].view(num_blocks, count)
        numbers.numpy()[:] = block_ids
        with self._on_stream():
            self._block_digests(blocks, numbers, nbytes, STRETCH_NBYTES, digests)
        self._hashing.append(Digests(self._new_point(), digests.numpy()))
        return self._hashing[-1]

    def register(self, address: int, nbytes: int, *, is_read_only: bool) -> bool:
        """See CopyDevice."""
        return self._is_done("cudaHostRegister", address, nbytes, _READ_ONLY if is_read_only else 0)

    def unregister(self, address: int) -> None:
        """See CopyDevice."""
        if not self._is_done("cudaHostUnregister", address):
            logger.error("CUDA keeps memory at %#x that was shared with a worker", address)

    def _is_done(self, name: str, *args: int) -> bool:
        """Whether a call of CUDA's runtime succeeds. Its error is cleared."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with contextlib.suppress(RuntimeError):
            torch.cuda.set_device(self._device)
            if getattr(runtime, name)(*args) == runtime.cudaError.success:
                return True
            torch.zeros(1, device=self._device)  # CUDA reports the error once more, to the thread's next call
        return False

    def hold_steps(self, copied: Copied) -> None:
        """See CopyDevice."""
        assert isinstance(copied, torch.cuda.Event), copied
        torch.cuda.current_stream(self._device).wait_event(copied)

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Launch on the side stream. The calling thread keeps the device.

        A new thread has the host's first GPU. When it left the stream, or waited for a point, a rank would take memory there.
        """
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(self._stream):
            yield

    def _new_point(self) -> Copied:
        """The end of the stream. Each has an event of its own: recording one again would move it for all who hold it."""
        point = torch.cuda.Event()  # type: ignore[no-untyped-call]
        point.record(self._stream)
        return point
