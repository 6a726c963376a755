"""The data sockets: KV blocks over TCP as raw frames, from the sender's pool into the receiver's pool.

A block is one multipart message: header (:mod:`kvrelay.wire.blocks.frames`), payload. The sending side is a line of a
:mod:`kvrelay.wire.lines.block_sender`. It gives ZeroMQ the pool's memory itself, or a copy, sealed or plain. A ticket says when
ZeroMQ no longer reads the pool's memory. The line works on few blocks at a time, so that the bytes just read for the checksum are
still in the cache when the kernel copies them.

The receiver is one port and one thread. It takes a message off the socket, asks the lease table whether the block has a place, and
gives the table the payload. It drops a block without a place, so one bad frame never blocks good frames after it.

Workers on one host have a faster way: :mod:`kvrelay.wire.lines.shared.ring`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvrelay.common.logs import RareWarnings
from kvrelay.wire.addresses import SocketFile, with_brackets
from kvrelay.wire.blocks.frames import HEADER_NBYTES, parse_header
from kvrelay.wire.blocks.seal import TAG_NBYTES
from kvrelay.wire.blocks.send_job import JobQueue, SendJob, Wakeup
from kvrelay.wire.errors import BlockRefusedError, PeerLostError, WireError
from kvrelay.wire.leases.table import LeaseTable
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.security.authentication import PeerGate, show_token
from kvrelay.wire.sockets import allow_family, bound_strangers, close_dead_connections

logger = logging.getLogger(__name__)

_SEND_AHEAD_MESSAGES = 32  # blocks with checksum or seal that the kernel has not taken yet
_READ_AHEAD_MESSAGES = 32  # per sender, and no more than this many bytes:
_READ_AHEAD_NBYTES = 64 * 2**20
_LOOK_S = 0.01  # period at which a busy line checks its connection
_DEAD_AFTER_S = 10.0  # an idle connection is closed this long after its other machine vanished


class TcpLine:
    """One connection to a decode worker's data socket. Implements :class:`kvrelay.wire.blocks.send_job.Line`.

    ZeroMQ retries until it is connected. It also reconnects later, but this line then ends: blocks that ZeroMQ had taken are lost,
    and it does not say which.
    """

    def __init__(
        self,
        address: str,
        *,
        metrics: WireMetrics,
        context: zmq.Context[zmq.Socket[bytes]],
        wakeup: Wakeup,
        token: str | None = None,
    ) -> None:
        """``token``: what the decode worker's data port asks for; None: nothing. Raises zmq.ZMQError on a bad address."""
        self._blocks_sent = metrics.blocks_sent.labels("tcp")
        self._bytes_sent = metrics.bytes_sent.labels("tcp")
        self._wakeup = wakeup
        self._looked_s = time.monotonic()
        self._is_up = False  # the handshake is over; before it a lost connection loses no block
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _SEND_AHEAD_MESSAGES)
        allow_family(self._socket, address)
        close_dead_connections(self._socket, _DEAD_AFTER_S)
        if token is not None:
            show_token(self._socket, token)
        try:
            # Before ``connect``, because each event is reported only once.
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            try:
                self._socket.connect(address)
            except zmq.ZMQError:
                self._socket.disable_monitor()
                self._monitor.close(linger=0)
                raise
        except zmq.ZMQError:
            self._socket.close()
            raise
        self._room = self._poller_for(self._socket, zmq.POLLOUT)
        self._buffers = _Buffers()

    is_direct = False

    def ship(self, job: SendJob) -> bool:
        """See Line. ZeroMQ reads the payload's memory until the job's ticket is done."""
        if not job.ticket.take():
            return True
        if (plain := job.wait(self._wakeup, self._look)) is None:
            return not self._wakeup.is_set
        header, payload = self._prepared(job, plain)
        while not self._sent(job, header, payload, is_ours=payload is not plain):
            if not self.has_room():
                return False
        return True

    def close(self) -> None:
        """See Line."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()

    def has_room(self) -> bool:
        """See Line: True when ZeroMQ takes a message."""
        while not self._wakeup.is_set:
            # To check the connection, or to poll, costs as much as everything else here. So poll only to wait.
            if time.monotonic() >= self._looked_s + _LOOK_S:
                self._look()
            if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
                return True
            self._wait(self._room)
        return False

    def wait_for(self, jobs: JobQueue) -> None:
        """See Line."""
        self._wait(self._poller_for(jobs.fileno(), zmq.POLLIN))

    def _poller_for(self, for_what: zmq.Socket[bytes] | int, events: int) -> zmq.Poller:
        """A poller for ``for_what``, the wakeup, and events of the connection."""
        poller = zmq.Poller()
        poller.register(for_what, events)
        poller.register(self._wakeup.fileno(), zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        return poller

    def _wait(self, poller: zmq.Poller) -> None:
        if self._monitor in dict(poller.poll()):
            self._look()

    def _look(self) -> None:
        """Read the connection's events. Raises PeerLostError if it broke."""
        self._looked_s = time.monotonic()
        while int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            if self._is_up:  # the only event that can follow
                raise PeerLostError("the connection broke")
            self._is_up = event == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def _prepared(self, job: SendJob, plain: memoryview) -> tuple[bytes, memoryview]:
        """The header with checksum or seal, and the payload frame: ``plain``, or a buffer of ``_buffers``."""
        if job.sealer is not None:
            payload = self._buffers.take(len(plain) + TAG_NBYTES)
            header = job.sealer.seal(job.header, plain, payload)
        elif job.is_memory_scarce:
            payload = self._buffers.take(len(plain))
            header = job.header.pack(job.copy(plain, payload))
        else:
            self._buffers.give_up()
            return job.header.pack(job.digests(plain)), plain
        job.ticket.end()  # ZeroMQ reads the buffer, and no longer the pool
        return header, payload

    def _sent(self, job: SendJob, header: bytes, payload: memoryview, *, is_ours: bool) -> bool:
        """Give both frames to ZeroMQ. False if it takes none, because the connection broke after it had reported room.

        ``is_ours``: the payload is one of ``_buffers``.
        """
        try:
            self._socket.send(header, zmq.SNDMORE | zmq.DONTWAIT)
        except zmq.Again:
            return False
        # Never copied, however small: the ticket must mean the same for every block.
        frame = zmq.Frame(payload, track=True, copy=False, copy_threshold=0)
        tracker = self._socket.send(frame, zmq.DONTWAIT, copy=False)
        assert tracker is not None
        if is_ours:
            self._buffers.give(payload, tracker)
        else:
            job.ticket.follow(tracker)
        self._blocks_sent.inc()
        self._bytes_sent.inc(job.header.payload_nbytes)
        return True


class _Buffers:
    """Memory for sealed or copied payloads, reused once ZeroMQ has read it: fresh memory would fault for every block.

    There are as many buffers as ZeroMQ held at a time. Each block that needs none frees one.
    """

    def __init__(self) -> None:
        self._in_use: deque[tuple[memoryview, zmq.MessageTracker]] = deque()

    def take(self, nbytes: int) -> memoryview:
        """A buffer of ``nbytes``. Hand it to ``give`` once ZeroMQ has it."""
        if self._in_use and self._in_use[0][1].done:
            buffer, _ = self._in_use.popleft()
            if len(buffer) == nbytes:
                return buffer
        return memoryview(bytearray(nbytes))

    def give(self, buffer: memoryview, tracker: zmq.MessageTracker) -> None:
        """Keep the buffer for reuse. It is free when ``tracker`` is done."""
        self._in_use.append((buffer, tracker))

    def give_up(self) -> None:
        """Drop one buffer that ZeroMQ has read, if there is one."""
        if self._in_use and self._in_use[0][1].done:
            self._in_use.popleft()


def read_ahead(block_nbytes: int) -> int:
    """How many blocks of one sender may wait in ZeroMQ's memory."""
    return max(1, min(_READ_AHEAD_MESSAGES, _READ_AHEAD_NBYTES // block_nbytes))


class BlockReceiver:
    """The port that receives blocks, and its thread. ``start`` once, ``stop`` at the end."""

    def __init__(
        self,
        address: str,
        leases: LeaseTable,
        block_nbytes: int,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        gate: PeerGate | None = None,
    ) -> None:
        """Listens at once. ``gate``: decides who may connect, once the caller starts it; None: everybody. Raises WireError."""
        self._leases = leases
        address = with_brackets(address)
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # ZeroMQ reads ahead into memory beside the pool, which soon leaves the cache. So keep it to a few blocks; TCP holds
        # senders back.
        self._socket.setsockopt(zmq.RCVHWM, read_ahead(block_nbytes))
        self._socket.setsockopt(zmq.MAXMSGSIZE, max(block_nbytes, HEADER_NBYTES) + 1024)
        close_dead_connections(self._socket, _DEAD_AFTER_S)
        bound_strangers(self._socket)
        allow_family(self._socket, address)
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
        self._wakeup = Wakeup()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wakeup.fileno(), zmq.POLLIN)
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="block-receiver", daemon=True)
        self._warnings = RareWarnings(logger, time.monotonic)  # a flood of bad frames must not become a flood of logs

    def start(self) -> None:
        """Start receiving. A process that receives for long should keep freed memory (:mod:`kvrelay.common.system`)."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether blocks are being received."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the thread after its current block, and close the socket. A second call does nothing."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self._wakeup.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._socket.close()  # if the thread never started, only this closes it
        self._wakeup.close()
        self._file.remove()

    def _run(self) -> None:
        try:
            while self._has_message():
                self._take(*self._receive())
        finally:
            self._socket.close()  # senders must not wait for a port that nobody reads

    def _has_message(self) -> bool:
        """Wait for a message. False: the receiver is stopped."""
        while not self._wakeup.is_set:
            if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return True
            self._poller.poll()
        return False

    def _receive(self) -> tuple[bytes, list[zmq.Frame]]:
        """One message: its header, and the frames after it. Two of these are kept at most, one more than a valid message has."""
        self._socket.recv()  # the sender's routing id
        header = self._socket.recv() if self._socket.getsockopt(zmq.RCVMORE) else b""
        payloads: list[zmq.Frame] = []
        while self._socket.getsockopt(zmq.RCVMORE):
            frame = self._socket.recv(copy=False)
            if len(payloads) < 2:
                payloads.append(frame)
        return header, payloads

    def _take(self, frame: bytes, payloads: list[zmq.Frame]) -> None:
        """Give a block to the lease table, or count and log its refusal."""
        try:
            header = parse_header(frame)
            if not payloads:
                raise BlockRefusedError("bad_header", "a header without a payload")
            self._leases.begin_piece(header)
            # A message of more than two parts is none of ours.
            self._leases.write_piece(header, payloads[0].buffer if len(payloads) == 1 else None)()
        except BlockRefusedError as error:
            if error.cause_name == "bad_header":
                self._leases.count_bad_header()
            self._warnings.warn(f"refused a KV block: {error}", error.cause_name)
