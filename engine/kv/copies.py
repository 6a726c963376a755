"""Copies between a GPU's pool and the host's memory, and digests of blocks: one interface around CUDA, without any decisions.

:mod:`kvrelay.engine.kv.staging` decides when a block is copied and who may use which memory until then. It is tested without a GPU.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import Protocol

import torch

from kvrelay.common.block_digests import STRETCH_NBYTES, num_stretches

logger = logging.getLogger(__name__)

_READ_ONLY = 8  # cudaHostRegisterReadOnly


class Copied(Protocol):
    """A point in the stream after one copy (a CUDA event). Use it on any thread."""

    def query(self) -> bool:
        """Whether the device has passed it. Raises RuntimeError if the copy, or the device, has failed."""

    def synchronize(self) -> None:
        """Wait until the device has passed it. Raises RuntimeError like ``query``."""


@dataclass(frozen=True, slots=True)
class Digests:
    """Digests of a block's stretches (:mod:`kvrelay.common.block_digests`) on their way to the host."""

    copied: Copied  # behind them
    on_host: torch.Tensor  # [num_stretches] int64

    def wait(self) -> bytes:
        """The digests. Raises RuntimeError if the device has failed."""
        self.copied.synchronize()
        return self.on_host.numpy().tobytes()


class CopyDevice(Protocol):
    """One device's copies. They run one after the other, in the order of their launches; the host does not wait for them."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """``[nbytes]`` uint8 of pinned host memory, which the device can copy directly.

        Raises RuntimeError if there is none left.
        """

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Copied:
        """Launch a copy. Do not change either tensor before the returned point has passed. Any thread, one at a time."""

    def can_digest(self, nbytes: int) -> bool:
        """Whether ``digest`` takes so many bytes of a block."""

    def digest(self, blocks: torch.Tensor, block_id: int, nbytes: int) -> Digests:
        """Launch: hash the first ``nbytes`` bytes of a block as they are after the copies so far. Any thread, one at a time.

        ``blocks``: ``[num_blocks, block_nbytes]`` uint8 on the device.
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
    """One side stream of a GPU: its copy engines work while kernels run. Implements :class:`CopyDevice`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        from kvrelay.kernels.rows import digests  # noqa: PLC0415 - Triton takes a second to import, and only a GPU needs it

        self._is_digestible, self._block_digests = digests.is_digestible, digests.block_digests

    def pinned(self, nbytes: int) -> torch.Tensor:
        """See CopyDevice."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Copied:
        """See CopyDevice.

        The stream waits for no kernel, because a block is opened only after the step that computed it has returned.
        """
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return _new_point()

    def can_digest(self, nbytes: int) -> bool:
        """See CopyDevice."""
        return self._is_digestible(nbytes)

    def digest(self, blocks: torch.Tensor, block_id: int, nbytes: int) -> Digests:
        """See CopyDevice."""
        count = num_stretches(nbytes)
        with torch.cuda.stream(self._stream):
            on_host = torch.empty(count, dtype=torch.int64, pin_memory=True)
            made = torch.empty(count, dtype=torch.int64, device=self._device)
            self._block_digests(blocks, block_id, nbytes, STRETCH_NBYTES, made)
            on_host.copy_(made, non_blocking=True)
            return Digests(_new_point(), on_host)

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
        with torch.cuda.device(self._device):
            if getattr(runtime, name)(*args) == runtime.cudaError.success:
                return True
            with contextlib.suppress(RuntimeError):  # CUDA reports the error once more, to the thread's next call
                torch.zeros(1, device=self._device)
            return False

    def hold_steps(self, copied: Copied) -> None:
        """See CopyDevice."""
        assert isinstance(copied, torch.cuda.Event), copied
        torch.cuda.current_stream(self._device).wait_event(copied)


def _new_point() -> Copied:
    """The end of the current stream. Each has an event of its own: recording one again would move it for all who hold it."""
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()
    return copied
