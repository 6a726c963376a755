"""The data sockets: KV blocks as raw frames, from the sender's pool into the receiver's pool.

A block is one multipart message: header (:mod:`kvrelay.wire.block_frames`), payload. The sender gives ZeroMQ the pool's
memory itself; a ticket says when ZeroMQ no longer reads it. The receiver is a thread of its own: it takes the header, asks the
lease table where the payload belongs, and receives the payload straight into that block. What has no place is read into
nothing and dropped, so one bad frame never blocks the good ones behind it.
"""

from __future__ import annotations

import logging
import threading
import time

import zmq

from kvrelay.wire.addresses import SocketFile
from kvrelay.wire.block_frames import HEADER_NBYTES, BlockHeader, parse_header
from kvrelay.wire.errors import BlockRefusedError, WireError
from kvrelay.wire.leases import LeaseTable
from kvrelay.wire.metrics import WireMetrics

logger = logging.getLogger(__name__)

_REFUSALS_LOGGED_EVERY_S = 1.0
_READ_AHEAD_MESSAGES = 32  # per sender


class SendTicket:
    """One block on its way. ``is_done``: ZeroMQ no longer reads the block's memory."""

    def __init__(self, tracker: zmq.MessageTracker) -> None:
        self._tracker = tracker

    @property
    def is_done(self) -> bool:
        """Whether the memory may be written again."""
        return self._tracker.done


class BlockSender:
    """One connection to a decode worker's data socket. Network thread only; never blocks."""

    def __init__(self, address: str, *, metrics: WireMetrics, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._metrics = metrics
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # Not bounded here: what can be queued is bounded by the pool that the frames point into.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10000)
        self._socket.connect(address)

    def send(self, header: BlockHeader, payload: memoryview) -> SendTicket:
        """Queue a block. The payload's memory must not change until the ticket is done.

        Raises WireError on a sender that is closed.
        """
        if self._socket.closed:
            raise WireError("this block sender is closed: its decode worker is lost")
        self._socket.send(header.pack(payload), zmq.SNDMORE | zmq.DONTWAIT)
        # Never copied, however small: the ticket must mean the same for every block.
        tracker = self._socket.send(
            zmq.Frame(payload, track=True, copy=False, copy_threshold=0), zmq.DONTWAIT, copy=False
        )
        self._metrics.blocks_sent.inc()
        self._metrics.bytes_sent.inc(len(payload))
        assert tracker is not None
        return SendTicket(tracker)

    def close(self) -> None:
        """Drop what is queued and close; every ticket is done soon after, whether or not the peer ever existed."""
        self._socket.close()


class BlockReceiver:
    """The thread that receives blocks. ``start`` once, ``stop`` once."""

    def __init__(
        self, address: str, leases: LeaseTable, block_nbytes: int, *, context: zmq.Context[zmq.Socket[bytes]]
    ) -> None:
        self._leases = leases
        self._context = context
        self._block_nbytes = block_nbytes
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # What is read ahead lies in memory beside the pool: keep it to a few blocks, TCP holds the senders back.
        self._socket.setsockopt(zmq.RCVHWM, _READ_AHEAD_MESSAGES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max(block_nbytes, HEADER_NBYTES) + 1024)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10000)
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
        self._num_unlogged = 0
        self._logged_s = 0.0

    def start(self) -> None:
        """Start receiving."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether blocks are being received."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the thread and close the sockets."""
        if self._thread.ident is not None:
            self._wakeup.send(b"")
            self._thread.join()
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
            while wakeup not in dict(poller.poll()):
                self._receive_one()
        finally:
            wakeup.close()
            self._socket.close()

    def _receive_one(self) -> None:
        self._socket.recv()  # the sender's routing id
        if not self._socket.getsockopt(zmq.RCVMORE):
            return
        try:
            frame = self._socket.recv()
            header = parse_header(frame)
            if not self._socket.getsockopt(zmq.RCVMORE):
                raise BlockRefusedError("bad_header", "a header without a payload")
            target = self._leases.begin_block(header)
        except BlockRefusedError as error:
            if error.cause_name == "bad_header":
                self._leases.count_bad_header()
            self._log(error)
            self._drain()
            return
        try:
            nbytes = self._socket.recv_into(target)
            if self._socket.getsockopt(zmq.RCVMORE):
                nbytes = 0  # more parts than two: not one of ours
            self._drain()
            self._leases.finish_block(header, nbytes)
        except BlockRefusedError as error:
            self._log(error)

    def _drain(self) -> None:
        while self._socket.getsockopt(zmq.RCVMORE):
            self._socket.recv(copy=False)

    def _log(self, error: BlockRefusedError) -> None:
        """One line a second at the most: a flood of bad frames must not become a flood of logs."""
        now_s = time.monotonic()
        if now_s - self._logged_s < _REFUSALS_LOGGED_EVERY_S:
            self._num_unlogged += 1
            return
        more = f" (and {self._num_unlogged} more since the last such line)" if self._num_unlogged else ""
        logger.warning("refused a KV block: %s%s", error, more, extra={"cause": error.cause_name})
        self._logged_s, self._num_unlogged = now_s, 0
