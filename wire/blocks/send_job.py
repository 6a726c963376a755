"""A KV block that is to be sent: its job, its ticket, and the interface of the line that sends it. Opens no socket."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec
import zmq

from kvrelay.common.block_digests import copied, copy_bytes, digests_of
from kvrelay.common.late_bytes import LateBytes
from kvrelay.wire.blocks.frames import BlockHeader
from kvrelay.wire.blocks.seal import BlockSealer

_LOOK_S = 0.02  # period at which a wait for a block's bytes checks the wakeup


class SendTicket:
    """State of one send: queued, then taken by the sender's thread or ZeroMQ, then done. A queued send can be called off.

    ``is_done``: nobody reads the block's memory any more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False
        self._is_over = False
        self.is_unwanted = False  # called off while the sender waits for the bytes
        self._tracker: zmq.MessageTracker | None = None

    @property
    def is_done(self) -> bool:
        """Whether the memory may be written again."""
        return self._is_over or (self._tracker is not None and self._tracker.done)

    @property
    def was_taken(self) -> bool:
        """Whether the sender took the block. A done ticket without this was called off, or ended, in the queue."""
        return self._is_taken

    def take(self) -> bool:
        """Begin to read the memory. False if the block was called off."""
        with self._lock:
            self._is_taken = not self._is_over
            return self._is_taken

    def call_off(self) -> None:
        """Cancel the send. A queued send is done at once, a taken one soon, unless its memory is read already."""
        with self._lock:
            self.is_unwanted = True
            self._is_over = self._is_over or not self._is_taken

    def follow(self, tracker: zmq.MessageTracker) -> None:
        """Let the send last until ``tracker`` says that ZeroMQ no longer reads the memory."""
        self._tracker = tracker

    def end(self) -> None:
        """End the send: nobody will read the memory again."""
        self._is_over = True

    def end_unless_followed(self) -> None:
        """As ``end``, unless ZeroMQ still reads the memory."""
        self._is_over = self._is_over or self._tracker is None


class SendJob(msgspec.Struct, frozen=True):
    """A piece to send: its header, and its payload, which does not change until the ticket is done."""

    ticket: SendTicket
    header: BlockHeader
    payload: memoryview | LateBytes
    sealer: BlockSealer | None

    @property
    def is_memory_scarce(self) -> bool:
        """Whether the bytes should be copied instead of given to ZeroMQ, which may keep them for long."""
        return not isinstance(self.payload, memoryview) and self.payload.is_scarce

    def wait(self, wakeup: Wakeup, look: Callable[[], None]) -> memoryview | None:
        """Wait for the payload and return it. None if ``wakeup`` came first, or the block was called off.

        Called on a sender's thread just before it reads the bytes. The ticket must be taken. While this waits it calls ``look`` now
        and then, so that the line can check its peer. Raises what ``look`` raises.
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

    def begin_copy_to(self, target: memoryview) -> Callable[[], bytes] | None:
        """See LateBytes. Only for a block that is not sealed, and whose ticket is taken."""
        return None if isinstance(self.payload, memoryview) else self.payload.begin_copy_to(target)

    def copy(self, payload: memoryview, target: memoryview) -> bytes:
        """Copy ``payload``, which ``wait`` has returned, to ``target`` of its size. Returns its digests."""
        if (digests := self._made(payload)) is None:
            return copied(payload, target)
        copy_bytes(payload, target)
        return digests

    def digests(self, payload: memoryview) -> bytes:
        """The digests of ``payload``, which ``wait`` has returned."""
        return self._made(payload) or digests_of(payload)

    def _made(self, payload: memoryview) -> bytes | None:
        """The digests that a device has made."""
        return None if isinstance(self.payload, memoryview) else self.payload.digests(len(payload))


class Line(Protocol):
    """A connection to a decode worker's pool. Only the sender's thread calls it."""

    @property
    def is_direct(self) -> bool:
        """Whether a device copies blocks into the line's own memory, if they are not sealed. Constant."""

    def has_room(self) -> bool:
        """Wait until a block would leave at once; False if the wakeup comes first.

        Raises PeerLostError if the other side is gone for good.
        """

    def wait_for(self, jobs: JobQueue) -> None:
        """Wait until ``jobs`` may hold a block or the wakeup has come. Meanwhile watch the other side.

        Raises PeerLostError if the other side is gone for good.
        """

    def ship(self, job: SendJob) -> bool:
        """Send the block, unless it was called off. ``has_room`` must have returned True.

        False if the wakeup came first: nothing more will be sent. Raises PeerLostError if the other side is gone for good.
        """

    def close(self) -> None:
        """Close the connection. Blocks that were sent before may or may not arrive."""


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
        """Descriptor that is readable while a block waits."""
        return self._readable

    def put(self, job: SendJob) -> None:
        """Append a block."""
        with self._lock:
            if not self._jobs:
                os.write(self._writable, b"\0")
            self._jobs.append(job)

    def take(self) -> SendJob | None:
        """Remove and return the oldest block; None if the queue is empty."""
        with self._lock:
            if not self._jobs:
                return None
            if len(self._jobs) == 1:
                os.read(self._readable, 1)
            return self._jobs.popleft()

    def close(self) -> None:
        """Close both descriptors. Nobody may wait or put any more."""
        os.close(self._readable)
        os.close(self._writable)


class Wakeup:
    """Ends all waits of a thread: its descriptor is readable from ``set`` on. Call ``close`` after the thread has ended."""

    def __init__(self) -> None:
        self._readable, self._writable = os.pipe()
        self.is_set = False

    def fileno(self) -> int:
        """Descriptor that a thread adds to its waits."""
        return self._readable

    def set(self) -> None:
        """On any thread, a few times at the most."""
        self.is_set = True
        os.write(self._writable, b"\0")

    def close(self) -> None:
        """Give both descriptors back."""
        os.close(self._readable)
        os.close(self._writable)
