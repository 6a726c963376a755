"""A KV block's bytes on their way from a device to the host. An engine makes them, and a sender waits for them.

``Register`` lets a device's copies reach memory that two workers share. Call it with memory that begins with a page. It returns
what the caller calls once, when nothing is copied there any more and before the memory is unmapped; None if the device cannot reach
the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

Register = Callable[[memoryview], Callable[[], None] | None]


class Reader(Protocol):
    """Who reads a block's bytes, for as long as it is not done."""

    @property
    def is_done(self) -> bool:
        """Whether the memory may be written again."""


class LateBytes(Protocol):
    """A block's bytes on their way to the host's memory.

    Implemented by :class:`kvrelay.engine.kv.device.staged_read.StagedRead`.
    """

    def begin(self) -> None:
        """Begin to bring them, for a later ``wait``. Never waits."""

    def begin_copy_to(self, target: memoryview) -> Callable[[], bytes] | None:
        """Let the device copy them to ``target``, which has the size of what the block's group uses; None: call ``wait``.

        The result waits for the copy, and returns the digests (:mod:`kvrelay.common.block_digests`). Do not use ``target`` before.
        Both raise RuntimeError if the copy failed.
        """

    def wait(self, reader: Reader, timeout_s: float) -> memoryview | None:
        """The bytes, stable until ``reader`` is done, or the read is closed; None if there is no memory for them in time.

        On the thread that reads them, before the read is closed; never on the network thread. Raises RuntimeError if the copy
        failed: nothing may be sent then.
        """

    def digests(self, nbytes: int) -> bytes | None:
        """The digests, which the device makes now; None if it makes none.

        ``nbytes``: what the block's group uses of it, from its start. Waits for them. Raises RuntimeError if the device failed.
        """

    @property
    def is_scarce(self) -> bool:
        """Behind ``wait``: whether others may soon lack such memory. Who may read for long should copy the bytes instead."""
