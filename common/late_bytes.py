"""A KV block's bytes on their way from a device to the host. An engine makes them, and a sender waits for them."""

from __future__ import annotations

from typing import Protocol


class Reader(Protocol):
    """Who reads a block's bytes, for as long as it is not done."""

    @property
    def is_done(self) -> bool:
        """Whether the memory may be written again."""


class LateBytes(Protocol):
    """A block's bytes on their way to the host's memory. Implemented by :class:`kvrelay.engine.kv.staging.StagedRead`."""

    @property
    def nbytes(self) -> int:
        """How many there will be: those of a block."""

    def wait(self, reader: Reader, timeout_s: float) -> memoryview | None:
        """The bytes, stable until ``reader`` is done, or the read is closed; None if there is no memory for them in time.

        On the thread that reads them, before the read is closed; never on the network thread. Raises RuntimeError if the copy
        failed: nothing may be sent then.
        """

    @property
    def is_scarce(self) -> bool:
        """Behind ``wait``: whether others may soon lack such memory. Who may read for long should copy the bytes instead."""
