"""The sending side of one data link: a queue of blocks, and the thread that proves or seals them and gives them to a line.

A thread of its own, so that neither checksums nor seals are computed on the network thread, nor greetings waited for. It opens the
line: through shared memory if the decode worker names a place for it (:mod:`kvrelay.wire.shared_sender`), and where there is
none in common, which is what two hosts look like, over TCP (:mod:`kvrelay.wire.data_plane`). A line that has served is not
exchanged: when it breaks the sender ends, and its link with it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading

import zmq

from kvrelay.wire.block_frames import BlockHeader
from kvrelay.wire.data_plane import TcpLine
from kvrelay.wire.errors import NoSharedMemoryError, PeerLostError, WireError
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.seal import BlockSealer
from kvrelay.wire.send_job import Line, SendJob, SendTicket, Wakeup
from kvrelay.wire.shared_sender import SharedLine, SharedTarget

logger = logging.getLogger(__name__)


class BlockSender:
    """One connection to a decode worker's pool, and its thread. Called on the network thread; never blocks long."""

    def __init__(
        self,
        address: str,
        *,
        metrics: WireMetrics,
        context: zmq.Context[zmq.Socket[bytes]],
        token: str | None = None,
        shared: SharedTarget | None = None,
    ) -> None:
        """``address``: of the data socket. ``token``: what the decode worker lets data connections in by; None: everybody.

        ``shared``: where to try shared memory first; None: nowhere.
        """
        self._address = address
        self._token = token
        self._metrics = metrics
        self._context = context
        # Not bounded here: what can be queued is bounded by the pool that the payloads lie in.
        self._jobs: queue.SimpleQueue[SendJob | None] = queue.SimpleQueue()
        self._is_closed = False
        self._has_ended = False
        self._wakeup = Wakeup()
        self._line = self._tcp_line() if shared is None else None
        self._thread = threading.Thread(target=self._run, args=(shared,), name="block-sender", daemon=True)
        self._thread.start()

    def send(self, header: BlockHeader, payload: memoryview, sealer: BlockSealer | None = None) -> SendTicket:
        """Queue a block, sealed if there is a sealer. The payload's memory must not change until the ticket is done.

        Raises WireError on a sender that is closed, ValueError if ``sealer`` had this block before.
        """
        if not self.is_alive:
            raise WireError("this block sender is closed: its decode worker is lost")
        if sealer is not None:
            sealer.claim(header.block_index)
        ticket = SendTicket()
        self._jobs.put(SendJob(ticket, header, payload, sealer))
        if self._has_ended:  # meanwhile, and perhaps without having seen this job
            self._end_queued()
        return ticket

    @property
    def is_alive(self) -> bool:
        """Whether blocks that are queued will be sent."""
        return not self._is_closed and not self._has_ended

    def close(self) -> None:
        """Drop what is queued and close; every ticket is done soon after, whether or not the peer ever existed."""
        if self._is_closed:
            return
        self._is_closed = True
        self._wakeup.set()
        self._jobs.put(None)
        self._thread.join()  # it is busy with one block at the most
        self._wakeup.close()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self, shared: SharedTarget | None) -> None:
        job: SendJob | None = None
        try:
            if shared is not None:
                self._line = self._line_to(shared)
            line = self._line
            assert line is not None
            while (job := self._jobs.get()) is not None and line.ship(job):
                pass
        except PeerLostError as error:
            logger.warning("%s; its link will be made anew", error)
        except Exception:
            logger.exception("a block sender dies; its link will be made anew")
        finally:
            self._has_ended = True
            if self._line is not None:
                self._line.close()
            if job is not None:
                job.ticket.end_unless_followed()
            self._end_queued()

    def _line_to(self, shared: SharedTarget) -> Line:
        """Shared memory if it can be, else TCP. What it is is logged once for each link."""
        try:
            line = SharedLine.connect(shared, self._metrics, self._wakeup)
        except NoSharedMemoryError as error:
            if not self._is_closed:
                logger.info("KV blocks for %s go over TCP, not through shared memory: %s", self._address, error)
            return self._tcp_line()
        self._metrics.data_lines.labels("shared_memory").inc()
        logger.info("KV blocks for %s go through shared memory, %s", self._address, line)
        return line

    def _tcp_line(self) -> Line:
        self._metrics.data_lines.labels("tcp").inc()
        return TcpLine(
            self._address, metrics=self._metrics, context=self._context, wakeup=self._wakeup, token=self._token
        )

    def _end_queued(self) -> None:
        """Nobody will send what is in the queue. On any thread."""
        with contextlib.suppress(queue.Empty):
            while True:
                if (job := self._jobs.get_nowait()) is not None:
                    job.ticket.end()
