"""Blocks of a rank on another host: their bytes travel over a link of their own, one block at a time.

    leader   Fetch ─▶                  ─▶ reads them         fills memory ─▶ Put with bytes ─▶            ─▶ launches steps
    rank              copies ─▶ Moved with bytes                                                copies ─▶ Moved

Which step sees which block is as in :mod:`kvrelay.engine.ranks.blocks`. The link also carries the leader's signs of life, because
the other link is not read in the middle of a step.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from kvrelay.engine.kv.device.copies import CopyDevice
from kvrelay.engine.ranks.link import Link
from kvrelay.engine.ranks.messages import SILENT_S, Alive

Bytes = npt.NDArray[np.uint8]


class Fetch(msgspec.Struct, frozen=True, tag=True):
    """Send a block."""

    block_id: int


class Put(msgspec.Struct, frozen=True, tag=True):
    """Copy these bytes into a block."""

    block_id: int
    data: bytes


class Moved(msgspec.Struct, frozen=True, tag=True):
    """The copy is done, with the bytes of a fetched block; or it failed, with the reason."""

    data: bytes = b""
    failed: str | None = None


ToCarrier = Fetch | Put | Alive


class BlockCarrier:
    """The rank's end. One thread calls ``serve``, from the moment that the rank has a leader."""

    def __init__(self, link: Link[ToCarrier]) -> None:
        self._link = link
        self._pool: tuple[torch.Tensor, torch.Tensor, CopyDevice | None] | None = None

    def give(self, blocks: torch.Tensor, device: CopyDevice | None) -> None:
        """Set the pool's bytes, ``[num_blocks, block_nbytes]`` uint8, and the device that copies them; None: they are in this
        host's memory.
        """
        nbytes = blocks.shape[1]
        memory = torch.empty(nbytes, dtype=torch.uint8) if device is None else device.pinned(nbytes)
        self._pool = blocks, memory, device

    def serve(self) -> str:
        """Serve until the leader ends. Returns how that was noticed."""
        try:
            while (message := self._link.receive(SILENT_S)) is not None:
                if not isinstance(message, Alive):
                    self._link.send(self._move(message))
        except (EOFError, OSError) as error:
            return f"the leader is gone: {error}"
        finally:
            self._link.shut()  # threads that wait for a block get an error
        return f"the leader has been silent for {SILENT_S:g} s: it hangs, or its host is gone"

    def _move(self, message: Fetch | Put) -> Moved:
        assert self._pool is not None, f"the leader asks for block {message.block_id} of a rank that has loaded nothing"
        blocks, memory, device = self._pool
        block = blocks[message.block_id]
        try:
            if isinstance(message, Fetch):
                _copy(memory, block, device)
                return Moved(memory.numpy().tobytes())
            memory.numpy()[:] = np.frombuffer(message.data, dtype=np.uint8)
            _copy(block, memory, device)
        except RuntimeError as error:
            return Moved(failed=str(error))
        return Moved()


class CarriedBlocks:
    """The leader's end. Implements :class:`kvrelay.engine.kv.gathered.Part`. Any thread."""

    def __init__(self, link: Link[Moved], block_nbytes: int) -> None:
        """``link``: to the rank's :class:`BlockCarrier`."""
        self._link = link
        self._block_nbytes = block_nbytes
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def reading(self, block_id: int) -> Iterator[Bytes]:
        """See Part."""
        data = self._ask(Fetch(block_id), block_id).data
        yield np.frombuffer(data, dtype=np.uint8)

    @contextlib.contextmanager
    def writing(self, block_id: int) -> Iterator[Bytes]:
        """See Part."""
        memory = np.empty(self._block_nbytes, dtype=np.uint8)
        yield memory
        self._ask(Put(block_id, memory.tobytes()), block_id)

    def _ask(self, message: Fetch | Put, block_id: int) -> Moved:
        with self._lock:
            try:
                self._link.send(message)
                answer = self._link.receive()
            except (EOFError, OSError) as error:
                raise RuntimeError(f"a rank is gone, and its part of block {block_id}: {error}") from error
        if answer is None or answer.failed is not None:
            raise RuntimeError(f"a rank has not copied block {block_id}: {answer and answer.failed}")
        return answer


def _copy(target: torch.Tensor, source: torch.Tensor, device: CopyDevice | None) -> None:
    if device is None:
        target.copy_(source)
    else:
        device.copy(target, source).synchronize()
