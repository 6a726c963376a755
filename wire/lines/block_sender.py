"""The sending side of one data link: a queue of blocks, and the thread that gives them, with checksums or sealed, to a line.

It has its own thread, so that the network thread neither computes checksums and seals nor waits for greetings. If the decode worker
names a socket for shared memory, the sender opens a line through it (:mod:`kvrelay.wire.lines.shared.sender`). Otherwise, or if
that fails, as it does between two hosts, it uses TCP (:mod:`kvrelay.wire.lines.data_plane`). It takes a block only when its line
has room.

When the line fails the sender ends, and its link with it, so that its requests are retried at once. A broken TCP connection is such
a failure, because nobody knows which blocks it lost. The sender notices it also while no block waits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import zmq

from kvrelay.common.late_bytes import LateBytes
from kvrelay.wire.blocks.frames import BlockHeader
from kvrelay.wire.blocks.seal import BlockSealer
from kvrelay.wire.blocks.send_job import JobQueue, Line, SendJob, SendTicket, Wakeup
from kvrelay.wire.errors import NoSharedMemoryError, PeerLostError, WireError
from kvrelay.wire.lines.data_plane import TcpLine
from kvrelay.wire.lines.shared.sender import SharedLine, SharedTarget
from kvrelay.wire.metrics import WireMetrics

logger = logging.getLogger(__name__)


class BlockSender:
    """The connection to a decode worker's pool, and its thread. Called on the network thread; never blocks for long."""

    def __init__(
        self,
        address: str,
        *,
        metrics: WireMetrics,
        context: zmq.Context[zmq.Socket[bytes]],
        token: str | None = None,
        shared: SharedTarget | None = None,
        on_end: Callable[[], object] | None = None,
    ) -> None:
        """``address``: the data port. ``token``: what the decode worker's data port asks for; None: nothing.

        ``shared``: where to try shared memory first; None: nowhere.
        ``on_end``: called on the sender's thread when it has ended without being closed.
        Raises OSError without a free descriptor.
        """
        self._address = address
        self._token = token
        self._shared = shared
        self._metrics = metrics
        self._context = context
        self._on_end = on_end
        self._jobs = JobQueue()
        self._is_closed = False
        self._has_ended = False
        self._is_direct = False  # the line's, once it is open
        self._leaving = threading.Lock()
        self._num_left = 0  # of the two that use the descriptors: the thread, and who closes
        try:
            self._wakeup = Wakeup()
        except OSError:
            self._jobs.close()
            raise
        try:
            line = self._tcp_line() if shared is None else None
            self._thread = threading.Thread(target=self._run, args=(line,), name="block-sender", daemon=True)
            self._thread.start()
        except BaseException:
            self._wakeup.close()
            self._jobs.close()
            raise

    def send(
        self, header: BlockHeader, payload: memoryview | LateBytes, sealer: BlockSealer | None = None
    ) -> SendTicket:
        """Queue a block, and seal it if there is a sealer. The payload's memory must not change until the ticket is done.

        Raises WireError if the sender is closed, ValueError if ``sealer`` had this piece before.
        """
        if not self.is_alive:
            raise WireError("this block sender is closed: its decode worker is lost")
        if sealer is not None:
            sealer.claim(header)
        if not isinstance(payload, memoryview) and not (self._is_direct and sealer is None):
            payload.begin()
        ticket = SendTicket()
        self._jobs.put(SendJob(ticket, header, payload, sealer))
        if self._has_ended:  # the thread ended meanwhile, and may not have seen this job
            self._end_queued()
        return ticket

    @property
    def is_alive(self) -> bool:
        """Whether queued blocks will be sent."""
        return not self._is_closed and not self._has_ended

    def give_up(self) -> None:
        """End soon, as if the line had broken: blocks that were sent do not seem to arrive. A second call does nothing."""
        if self.is_alive:
            self._has_ended = True
            self._wakeup.set()

    def close(self) -> None:
        """Drop queued blocks, and have the thread end. Every ticket is done soon after, whether or not the peer exists."""
        if self._is_closed:
            return
        self._is_closed = True
        self._wakeup.set()
        self._leave()

    def join(self) -> None:
        """Wait for the thread, which finishes one block at most. Call ``close`` before, and not on the network thread."""
        self._thread.join()

    def _leave(self) -> None:
        """The last of the two closes the descriptors."""
        with self._leaving:
            self._num_left += 1
            is_last = self._num_left == 2
        if is_last:
            self._wakeup.close()
            self._jobs.close()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self, line: Line | None) -> None:
        job: SendJob | None = None
        try:
            line = line or self._open_line()
            self._is_direct = line.is_direct
            while line.has_room() and (job := self._next(line)) is not None and line.ship(job):
                pass
        except PeerLostError as error:
            logger.warning("KV blocks for %s: %s; its link will be made anew", self._address, error)
        except Exception:
            logger.exception("KV blocks for %s: the sender dies; its link will be made anew", self._address)
        finally:
            self._has_ended = True
            if line is not None:
                line.close()
            if job is not None:
                job.ticket.end_unless_followed()
            self._end_queued()
            if self._on_end is not None and not self._is_closed:
                self._on_end()
            self._leave()

    def _next(self, line: Line) -> SendJob | None:
        """Wait for a block. ``line`` has room. None: the sender ends. Raises PeerLostError if the line breaks."""
        while not self._wakeup.is_set:
            if (job := self._jobs.take()) is not None:
                return job
            line.wait_for(self._jobs)
        return None

    def _open_line(self) -> Line:
        """Open shared memory if possible, else TCP. Logs the choice once for each link."""
        assert self._shared is not None
        try:
            line = SharedLine.connect(self._shared, self._metrics, self._wakeup)
        except NoSharedMemoryError as error:
            if self.is_alive:
                logger.info("KV blocks for %s go over TCP, not through shared memory: %s", self._address, error)
            return self._tcp_line()
        self._metrics.data_lines.labels("shared_memory").inc()
        logger.info("KV blocks for %s go through shared memory, %s", self._address, line)
        return line

    def _tcp_line(self) -> Line:
        line = TcpLine(
            self._address, metrics=self._metrics, context=self._context, wakeup=self._wakeup, token=self._token
        )
        self._metrics.data_lines.labels("tcp").inc()
        return line

    def _end_queued(self) -> None:
        """End the tickets of all queued blocks, which nobody will send. On any thread."""
        while (job := self._jobs.take()) is not None:
            job.ticket.end()
