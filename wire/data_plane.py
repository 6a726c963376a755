"""The data sockets: KV blocks as raw frames, from the sender's pool into the receiver's pool, over TCP.

A block is one multipart message: header (:mod:`kvrelay.wire.block_frames`), payload. The sending side is a line of
:mod:`kvrelay.wire.block_sender`. It gives ZeroMQ the pool's memory itself, or what a sealer made of it; a ticket says when the
pool's memory is no longer read. It works on few blocks at a time: what it has just read for the checksum is still in the cache
when the kernel copies it. The receiver is a thread: it takes the header, asks the lease table whether the block has a
place, and gives it the payload. What has no place is dropped, so one bad frame never blocks the good ones behind it.

Between workers on one host there is a faster way beside this one: :mod:`kvrelay.wire.shared_ring`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque

import zmq

from kvrelay.common.logs import RareWarnings
from kvrelay.wire.addresses import SocketFile
from kvrelay.wire.authentication import PeerGate, show_token
from kvrelay.wire.block_frames import HEADER_NBYTES, parse_header
from kvrelay.wire.errors import BlockRefusedError, WireError
from kvrelay.wire.leases import LeaseTable
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.seal import TAG_NBYTES
from kvrelay.wire.send_job import SendJob, Wakeup
from kvrelay.wire.sockets import bound_strangers, close_dead_connections

logger = logging.getLogger(__name__)

_SEND_AHEAD_MESSAGES = 32  # proved or sealed, and not yet in the kernel
_READ_AHEAD_MESSAGES = 32  # per sender
_DEAD_AFTER_S = 10.0  # of a connection without traffic whose other machine is gone


class TcpLine:
    """One connection to a decode worker's data socket. Implements :class:`kvrelay.wire.send_job.Line`."""

    def __init__(
        self,
        address: str,
        *,
        metrics: WireMetrics,
        context: zmq.Context[zmq.Socket[bytes]],
        wakeup: Wakeup,
        token: str | None = None,
    ) -> None:
        """``token``: what the decode worker lets data connections in by; None: it lets everybody in."""
        self._blocks_sent = metrics.blocks_sent.labels("tcp")
        self._bytes_sent = metrics.bytes_sent.labels("tcp")
        self._wakeup = wakeup
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _SEND_AHEAD_MESSAGES)
        close_dead_connections(self._socket, _DEAD_AFTER_S)
        if token is not None:
            show_token(self._socket, token)
        self._socket.connect(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLOUT)
        self._poller.register(wakeup.fileno(), zmq.POLLIN)
        self._buffers = _SealBuffers()

    def ship(self, job: SendJob) -> bool:
        """See Line. ZeroMQ reads the payload's memory until the job's ticket is done."""
        # Waits for room before the payload is read, not between reading and sending it.
        if not self._has_room():
            return False
        if not job.ticket.take():
            return True
        header, payload = self._prepared(job)
        while not self._sent(job, header, payload):
            if not self._has_room():
                return False
        return True

    def close(self) -> None:
        """See Line."""
        self._socket.close()

    def _has_room(self) -> bool:
        """Wait until ZeroMQ takes a message; False if the wakeup comes first."""
        # A poll costs as much as all the rest here, so it is only done to wait.
        has_room = int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT
        return not self._wakeup.is_set and bool(has_room or self._wakeup.fileno() not in dict(self._poller.poll()))

    def _prepared(self, job: SendJob) -> tuple[bytes, memoryview]:
        """Header and payload frame, proved or sealed."""
        if job.sealer is None:
            return job.header.pack(job.payload), job.payload
        payload = self._buffers.take(len(job.payload) + TAG_NBYTES)
        header = job.sealer.seal(job.header, job.payload, payload)
        job.ticket.end()  # ZeroMQ reads the buffer, nobody the pool
        return header, payload

    def _sent(self, job: SendJob, header: bytes, payload: memoryview) -> bool:
        """Give both frames to ZeroMQ; False if it takes none, because the connection broke since it said that it had room."""
        try:
            self._socket.send(header, zmq.SNDMORE | zmq.DONTWAIT)
        except zmq.Again:
            return False
        # Never copied, however small: the ticket must mean the same for every block.
        frame = zmq.Frame(payload, track=True, copy=False, copy_threshold=0)
        tracker = self._socket.send(frame, zmq.DONTWAIT, copy=False)
        assert tracker is not None
        if job.sealer is None:
            job.ticket.follow(tracker)
        else:
            self._buffers.give(payload, tracker)
        self._blocks_sent.inc()
        self._bytes_sent.inc(len(job.payload))
        return True


class _SealBuffers:
    """Memory for sealed payloads, used again when ZeroMQ has read it. Fresh memory would be faulted in for every block."""

    def __init__(self) -> None:
        self._in_use: deque[tuple[memoryview, zmq.MessageTracker]] = deque()

    def take(self, nbytes: int) -> memoryview:
        """A buffer of ``nbytes``; ``give`` brings it back."""
        if self._in_use and self._in_use[0][1].done:
            buffer, _ = self._in_use.popleft()
            if len(buffer) == nbytes:
                return buffer
        return memoryview(bytearray(nbytes))

    def give(self, buffer: memoryview, tracker: zmq.MessageTracker) -> None:
        """The buffer is free when ``tracker`` is done."""
        self._in_use.append((buffer, tracker))


class BlockReceiver:
    """The thread that receives blocks. ``start`` once, ``stop`` once."""

    def __init__(
        self,
        address: str,
        leases: LeaseTable,
        block_nbytes: int,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        gate: PeerGate | None = None,
    ) -> None:
        """Listens from now on. ``gate``: who may connect, once it is started (not here); None: everybody."""
        self._leases = leases
        self._context = context
        self._block_nbytes = block_nbytes
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # What is read ahead lies in memory beside the pool, and soon not in the cache: keep it to a few blocks. TCP holds the
        # senders back.
        self._socket.setsockopt(zmq.RCVHWM, _READ_AHEAD_MESSAGES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max(block_nbytes, HEADER_NBYTES) + 1024)
        close_dead_connections(self._socket, _DEAD_AFTER_S)
        bound_strangers(self._socket)
        if gate is not None:
            gate.guard_data(self._socket)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise WireError(
                f"cannot listen for KV blocks on {address}: {error}; choose another --data-address"
            ) from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._file = SocketFile(self.address)
        self._wakeup_address = f"inproc://block-receiver-{id(self)}"
        self._wakeup = context.socket(zmq.PAIR)
        self._wakeup.bind(self._wakeup_address)
        self._thread = threading.Thread(target=self._run, name="block-receiver", daemon=True)
        self._is_stopped = False
        self._warnings = RareWarnings(logger)  # a flood of bad frames must not become a flood of logs

    def start(self) -> None:
        """Start receiving. A process that does so for long should keep freed memory (:mod:`kvrelay.common.memory`)."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether blocks are being received."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the thread and close the sockets."""
        self._is_stopped = True
        if self._thread.ident is not None:
            while self._thread.is_alive():
                with contextlib.suppress(zmq.Again):  # the thread listens not yet, or not any more
                    self._wakeup.send(b"", zmq.DONTWAIT)
                self._thread.join(0.05)
        else:
            self._socket.close()
        self._wakeup.close()
        self._file.remove()

    def _run(self) -> None:
        wakeup = self._context.socket(zmq.PAIR)
        wakeup.connect(self._wakeup_address)
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(wakeup, zmq.POLLIN)
        try:
            while not self._is_stopped:
                has_message = int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN
                if has_message or wakeup not in dict(poller.poll()):
                    self._receive_one()
        finally:
            wakeup.close()
            self._socket.close()

    def _receive_one(self) -> None:
        self._socket.recv()  # the sender's routing id
        if not self._socket.getsockopt(zmq.RCVMORE):
            return
        try:
            header = parse_header(self._socket.recv())
            if not self._socket.getsockopt(zmq.RCVMORE):
                raise BlockRefusedError("bad_header", "a header without a payload")
            self._leases.begin_block(header)
        except BlockRefusedError as error:
            if error.cause_name == "bad_header":
                self._leases.count_bad_header()
            self._warnings.warn(f"refused a KV block: {error}", error.cause_name)
            self._drain()
            return
        try:
            frame = self._socket.recv(copy=False)
            # More parts than two: not one of ours.
            payload = None if self._socket.getsockopt(zmq.RCVMORE) else frame.buffer
            self._drain()
            self._leases.finish_block(header, payload)
        except BlockRefusedError as error:
            self._warnings.warn(f"refused a KV block: {error}", error.cause_name)

    def _drain(self) -> None:
        while self._socket.getsockopt(zmq.RCVMORE):
            self._socket.recv(copy=False)
