"""One KV block on its way out: what a block sender is given, and what its line does with it. No socket is opened here."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec
import zmq

from kvrelay.common.late_bytes import LateBytes
from kvrelay.wire.blocks.frames import BlockHeader
from kvrelay.wire.blocks.seal import BlockSealer

_LOOK_S = 0.02  # how often a wait for a block's bytes looks for the wakeup


class SendTicket:
    """One block on its way: queued, then taken by the sender's thread and ZeroMQ, then done. Queued, it can be called off.

    ``is_done``: nobody reads the block's memory any more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False
        self._is_over = False
        self.is_unwanted = False  # called off while somebody waits to read the memory
        self._tracker: zmq.MessageTracker | None = None

    @property
    def is_done(self) -> bool:
        """Whether the memory may be written again."""
        return self._is_over or (self._tracker is not None and self._tracker.done)

    def take(self) -> bool:
        """The memory is read from now on; False if the block was called off."""
        with self._lock:
            self._is_taken = not self._is_over
            return self._is_taken

    def call_off(self) -> None:
        """Nobody wants the block any more: done at once, unless it is taken already; then soon, if nobody reads it yet."""
        with self._lock:
            self.is_unwanted = True
            self._is_over = self._is_over or not self._is_taken

    def follow(self, tracker: zmq.MessageTracker) -> None:
        """ZeroMQ reads the memory until ``tracker`` says otherwise."""
        self._tracker = tracker

    def end(self) -> None:
        """The memory was read for the last time, or never will be."""
        self._is_over = True

    def end_unless_followed(self) -> None:
        """The same, unless ZeroMQ reads it."""
        self._is_over = self._is_over or self._tracker is None


class SendJob(msgspec.Struct, frozen=True):
    """A piece that waits to be sent: the head of a payload, which does not change until the ticket is done."""

    ticket: SendTicket
    header: BlockHeader
    payload: memoryview | LateBytes
    sealer: BlockSealer | None

    @property
    def is_memory_scarce(self) -> bool:
        """Whether the bytes, once they are there, should be copied rather than given to ZeroMQ, which may keep them for long."""
        return not isinstance(self.payload, memoryview) and self.payload.is_scarce

    def bytes(self, wakeup: Wakeup, look: Callable[[], None]) -> memoryview | None:
        """What to send, once it is there; the ticket must be taken. None if ``wakeup`` came first, or the block was called off.

        On a sender's thread, just before it reads them: meanwhile later blocks are on their way. ``look`` is called now and then
        while this waits, for the line to see whether its peer is there; what it raises comes out.
        """
        if isinstance(self.payload, memoryview):
            return self.payload[: self.header.payload_nbytes]
        while not wakeup.is_set:
            if self.ticket.is_unwanted:
                self.ticket.end()
                return None
            if (view := self.payload.wait(self.ticket, _LOOK_S)) is not None:
                return view[: self.header.payload_nbytes]
            look()
        return None


class Line(Protocol):
    """A connection to a decode worker's pool. Only the sender's thread calls it."""

    def has_room(self) -> bool:
        """Wait until a block would leave at once; False if the wakeup comes first.

        Raises PeerLostError if the other side is gone for good.
        """

    def wait_for(self, jobs: JobQueue) -> None:
        """Return when a block may wait, or the wakeup has come; meanwhile watch the other side.

        Raises PeerLostError if the other side is gone for good.
        """

    def ship(self, job: SendJob) -> bool:
        """Take the block and send it, or leave it if it was called off. There is room for it.

        False if the wakeup came first: nothing more will be sent. Raises PeerLostError if the other side is gone for good.
        """

    def close(self) -> None:
        """Close the connection. What was given away meanwhile may arrive or not."""


class JobQueue:
    """Blocks that wait for the line, first in, first out. Thread-safe. Its descriptor can be read while a block waits.

    Not bounded here: what can be queued is bounded by the pool that the payloads lie in.
    """

    def __init__(self) -> None:
        """Raises OSError without a descriptor left."""
        self._jobs: deque[SendJob] = deque()
        self._lock = threading.Lock()
        self._readable, self._writable = os.pipe()

    def fileno(self) -> int:
        """What a line waits for, beside what else it watches."""
        return self._readable

    def put(self, job: SendJob) -> None:
        """One more block."""
        with self._lock:
            if not self._jobs:
                os.write(self._writable, b"\0")
            self._jobs.append(job)

    def take(self) -> SendJob | None:
        """The block that has waited longest; None: none waits."""
        with self._lock:
            if not self._jobs:
                return None
            if len(self._jobs) == 1:
                os.read(self._readable, 1)
            return self._jobs.popleft()

    def close(self) -> None:
        """Give both descriptors back. Nobody waits or puts any more."""
        os.close(self._readable)
        os.close(self._writable)


class Wakeup:
    """Ends the waits of a thread, for good: a descriptor that can be read from ``set`` on. ``close`` it behind the thread."""

    def __init__(self) -> None:
        self._readable, self._writable = os.pipe()
        self.is_set = False

    def fileno(self) -> int:
        """What to wait for, beside what the thread waits for anyway."""
        return self._readable

    def set(self) -> None:
        """On any thread, a few times at the most."""
        self.is_set = True
        os.write(self._writable, b"\0")

    def close(self) -> None:
        """Give both descriptors back."""
        os.close(self._readable)
        os.close(self._writable)
