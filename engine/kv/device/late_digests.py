"""Digests of blocks in a device's pool, launched for several blocks at a time.

They are asked for when a block's copy is launched. When the first of those who asked waits, they are launched for all blocks of
this size that are asked for by then. A kernel's launch takes the host longer than a copy's, and the device hashes blocks side by
side. Not for blocks that the host hashes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvrelay.engine.kv.device.copies import CopyDevice, Digests


@dataclass(slots=True, eq=False)
class _Asked:
    block_id: int
    made: Digests | None = None  # of several blocks; None: not launched yet
    index: int = 0  # of this block


class LateDigests:
    """What is asked for and not launched yet, of one pool."""

    def __init__(self, device: CopyDevice, blocks: torch.Tensor, lock: AbstractContextManager[Any]) -> None:
        """``blocks``: ``[num_blocks, block_nbytes]`` uint8, on ``device``. ``lock``: held by all who launch something there."""
        self._device = device
        self._blocks = blocks
        self._lock = lock
        self._asked: dict[int, list[_Asked]] = {}  # by bytes of a block

    def ask(self, block_id: int, nbytes: int) -> Callable[[], bytes]:
        """Ask for the digests of a block's first ``nbytes`` bytes, as they are after all copies launched so far.

        The caller holds the lock. The result waits for the digests. Until then the block must not change. Call the result once, on
        any thread, without the lock. It raises RuntimeError if they cannot be made.
        """
        asked = _Asked(block_id)
        self._asked.setdefault(nbytes, []).append(asked)
        return partial(self._wait, asked, nbytes)

    def ask_behind(self, target: torch.Tensor, source: torch.Tensor, block_id: int) -> Callable[[], bytes]:
        """Launch a copy to or from a block, and ask for the block's digests. The result is as that of ``ask``.

        Both tensors must stay until it returns or raises: only it waits for the copy.
        """
        copied = self._device.copy(target, source)
        digests = self.ask(block_id, len(target))

        def wait() -> bytes:
            try:
                return digests()
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    copied.synchronize()
                raise

        return wait

    def _wait(self, asked: _Asked, nbytes: int) -> bytes:
        with self._lock:
            if asked.made is None:
                self._launch(asked, nbytes)
        assert asked.made is not None
        return asked.made.wait(asked.index)

    def _launch(self, asked: _Asked, nbytes: int) -> None:
        together = self._asked[nbytes]
        try:
            made = self._device.digest(self._blocks, [one.block_id for one in together], nbytes)
        except BaseException:
            together.remove(asked)  # the others try it themselves
            raise
        for index, one in enumerate(together):
            one.made, one.index = made, index
        together.clear()
