"""The sending end of shared memory: a line (:mod:`kvrelay.wire.blocks.send_job`) through a ring that the sender makes.

``connect`` finds the decode worker's socket, passes the ring and waits for the answer for a bounded time. It runs on the sender's
thread. Any problem raises :class:`NoSharedMemoryError`, and the blocks go over TCP instead. Afterwards each block takes a free
slot, one pass to hash and copy it (or one pass to seal it), and one packet. A device that can reach the ring does both itself. The
pool's memory is free before the packet is sent.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.common.late_bytes import Register
from kvrelay.wire.blocks.seal import TAG_NBYTES
from kvrelay.wire.blocks.send_job import JobQueue, SendJob, Wakeup
from kvrelay.wire.errors import NoSharedMemoryError, PeerLostError
from kvrelay.wire.lines.shared.packets import (
    MAX_ANSWER_NBYTES,
    Greeting,
    pack_block,
    parse_slots,
    refusal_in,
)
from kvrelay.wire.lines.shared.place import SharedPlace
from kvrelay.wire.lines.shared.ring import Ring, RingShape, make_ring
from kvrelay.wire.metrics import WireMetrics

_GONE = "the decode worker's end of the shared memory is gone"
_MAX_COPIES = 4  # by the device at a time, while this thread prepares the next ones
_ANSWER_S = 5.0  # a stopped decode worker gives no answer; its link notices that by itself


@dataclass(frozen=True, slots=True)
class SharedTarget:
    """A decode worker's socket for shared memory, and the size of its blocks."""

    name: str | None  # the socket's name from ``Welcome``; None: it has none
    place: SharedPlace | None  # where this worker looks for the socket; None: ``--shared-memory off``
    block_nbytes: int
    token: str | None = None  # the decode worker's data token
    register: Register | None = None  # lets the device of the pool copy into a ring


@dataclass(frozen=True, slots=True)
class _Copying:
    """A block that a device copies into a slot."""

    job: SendJob
    slot: int
    wait: Callable[[], bytes]  # returns its digests


class SharedLine:
    """A ring and the socket beside it. Implements :class:`kvrelay.wire.blocks.send_job.Line`."""

    def __init__(self, connection: socket.socket, ring: Ring, metrics: WireMetrics, wakeup: Wakeup) -> None:
        """The line owns ``connection`` and ``ring`` from now on. The receiver has accepted the ring."""
        self._blocks_sent = metrics.blocks_sent.labels("shared_memory")
        self._bytes_sent = metrics.bytes_sent.labels("shared_memory")
        self._connection = connection
        self._ring = ring
        self._wakeup = wakeup
        # The slot that came back last is used first, because it is still in the cache.
        self._free = list(range(ring.shape.num_slots))
        self._copying: deque[_Copying] = deque()  # to slots that are neither free nor with the receiver yet
        self._readable = _poll_for(connection, select.POLLIN, wakeup)
        self._writable = _poll_for(connection, select.POLLOUT, wakeup)

    def __str__(self) -> str:
        """For the log."""
        shape, how = self._ring.shape, ", by the device" if self.is_direct else ""
        return f"{shape.num_slots} slots of {shape.slot_nbytes} bytes{how}"

    @property
    def is_direct(self) -> bool:
        """See Line."""
        return self._ring.is_registered

    @classmethod
    def connect(cls, target: SharedTarget, metrics: WireMetrics, wakeup: Wakeup) -> SharedLine:
        """Reach the decode worker and pass it a new ring. Blocks until the answer comes, for some seconds at most.

        Raises NoSharedMemoryError with the reason why blocks must take another way.
        """
        if target.place is None:
            raise NoSharedMemoryError("--shared-memory is off")
        if target.name is None:
            raise NoSharedMemoryError("the decode worker takes none")
        connection = _reach(target.place.address(target.name))
        try:
            ring, descriptor = _ring_for(target)
            try:
                _introduce(connection, Greeting(ring.shape, (target.token or "").encode()), descriptor, wakeup)
            except BaseException:
                ring.close()
                raise
            finally:
                os.close(descriptor)
        except BaseException:
            connection.close()
            raise
        return cls(connection, ring, metrics, wakeup)

    def has_room(self) -> bool:
        """See Line: a slot is free."""
        while not self._wakeup.is_set:
            if self._free:
                return True
            if not self._finish_copies(0):
                break
            if self._wakeup.fileno() not in dict(self._readable.poll()):
                self._take_back()
        return False

    def wait_for(self, jobs: JobQueue) -> None:
        """See Line. Notices the end of the connection. Slots that come back stay in the socket until they are needed."""
        if not self._finish_copies(0):
            return
        poll = _poll_for(self._connection, 0, self._wakeup)
        poll.register(jobs.fileno(), select.POLLIN)
        self._check(poll, None)

    def _look(self) -> None:
        """Check the connection. Raises PeerLostError if it has ended."""
        self._check(_poll_for(self._connection, 0, self._wakeup), 0)

    def _check(self, poll: select.poll, timeout_ms: int | None) -> None:
        if self._connection.fileno() in dict(poll.poll(timeout_ms)):
            raise PeerLostError(f"{_GONE}: the connection has ended")

    def ship(self, job: SendJob) -> bool:
        """See Line. The payload's memory is not read any more when this returns, unless a device copies it."""
        if not job.ticket.take():
            return True
        slot = self._free.pop()
        memory = self._ring.slots[slot]
        copying = None if job.sealer is not None else job.begin_copy_to(memory[: job.header.payload_nbytes])
        if copying is not None:
            self._copying.append(_Copying(job, slot, copying))
            return self._finish_copies(_MAX_COPIES)
        if not self._finish_copies(0):
            return False
        if (payload := job.wait(self._wakeup, self._look)) is None:
            self._free.append(slot)
            return not self._wakeup.is_set
        if job.sealer is None:
            frame = job.header.pack(job.copy(payload, memory[: len(payload)]))
        else:
            frame = job.sealer.seal(job.header, payload, memory[: len(payload) + TAG_NBYTES])
        return self._send(job, slot, frame)

    def _finish_copies(self, num_left: int) -> bool:
        """Wait for the oldest copies by the device and send their packets, until so many are left. False as ``_send``."""
        while len(self._copying) > num_left:
            oldest = self._copying.popleft()
            try:
                digests = oldest.wait()
            except BaseException:
                oldest.job.ticket.end()
                raise
            if not self._send(oldest.job, oldest.slot, oldest.job.header.pack(digests)):
                return False
        return True

    def close(self) -> None:
        """See Line. The receiver still takes the blocks that it was told of; its own mapping keeps the memory."""
        for one in self._copying:
            with contextlib.suppress(RuntimeError):
                one.wait()
            one.job.ticket.end()
        self._connection.close()
        self._ring.close()

    def _take_back(self) -> None:
        """Take the slots that one packet gives back. Raises PeerLostError."""
        try:
            slots = parse_slots(self._connection.recv(MAX_ANSWER_NBYTES))
        except OSError as error:
            raise PeerLostError(f"{_GONE}: {error.strerror}") from error
        if not slots or max(slots) >= self._ring.shape.num_slots or len({*slots}) < len(slots):
            raise PeerLostError(f"{_GONE}: the connection has ended")
        self._free += slots  # called only when the receiver has all slots, so none of these is free already

    def _send(self, job: SendJob, slot: int, frame: bytes) -> bool:
        """End the ticket of a block that is in its slot, and send its packet. Raises PeerLostError.

        False if the wakeup comes before the socket has room.
        """
        packet = pack_block(slot, frame)
        self._blocks_sent.inc()
        self._bytes_sent.inc(job.header.payload_nbytes)
        job.ticket.end()
        while not self._wakeup.is_set:
            try:
                self._connection.send(packet)
                return True
            except BlockingIOError:
                self._writable.poll()
            except OSError as error:
                raise PeerLostError(f"{_GONE}: {error.strerror}") from error
        return False


def _ring_for(target: SharedTarget) -> tuple[Ring, int]:
    """A ring, which the pool's device reaches if it can, and its descriptor. Raises NoSharedMemoryError."""
    if target.register is not None:
        ring, descriptor = make_ring(RingShape.of(target.block_nbytes, is_for_device=True))
        ring.register(target.register)
        if ring.is_registered:
            return ring, descriptor
        ring.close()
        os.close(descriptor)
    return make_ring(RingShape.of(target.block_nbytes))


def _reach(address: str) -> socket.socket:
    """Connect to a unix socket. Raises NoSharedMemoryError, for instance between two hosts."""
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:  # no descriptor left, or a system without such sockets
        raise NoSharedMemoryError(f"no socket for it here: {error.strerror}") from error
    connection.setblocking(False)  # do not wait for a full backlog either
    try:
        connection.connect(address)
    except BlockingIOError as error:
        connection.close()
        raise NoSharedMemoryError("too many connect to its socket just now") from error
    except OSError as error:
        connection.close()
        detail = (
            f"its socket cannot be reached from here ({error.strerror}): another host, or another network namespace"
        )
        raise NoSharedMemoryError(detail) from error
    return connection


def _introduce(connection: socket.socket, greeting: Greeting, descriptor: int, wakeup: Wakeup) -> None:
    """Pass the ring and wait for the answer. Raises NoSharedMemoryError unless the decode worker accepts."""
    deadline_s = time.monotonic() + _ANSWER_S
    poll = _poll_for(connection, select.POLLIN, wakeup)
    try:
        socket.send_fds(connection, [greeting.pack()], [descriptor])
        while not (came := dict(poll.poll(max(0, deadline_s - time.monotonic()) * 1000))):
            if time.monotonic() > deadline_s:
                raise NoSharedMemoryError(f"the decode worker does not answer within {_ANSWER_S:g} s")
        if wakeup.fileno() in came:
            raise NoSharedMemoryError("this link was closed meanwhile")
        refusal = refusal_in(connection.recv(MAX_ANSWER_NBYTES))
    except OSError as error:
        raise NoSharedMemoryError(f"the decode worker's socket breaks: {error.strerror}") from error
    if refusal is not None:
        raise NoSharedMemoryError(refusal)


def _poll_for(connection: socket.socket, events: int, wakeup: Wakeup) -> select.poll:
    poll = select.poll()
    poll.register(connection, events)
    poll.register(wakeup.fileno(), select.POLLIN)
    return poll
