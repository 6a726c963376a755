"""The receiving end of shared memory: a door that all senders of this host come to, and behind it the threads that take blocks.

A sender connects, shows its ring (:mod:`kvrelay.wire.shared_packets`), and is told yes or no. That is the work of one thread. Just
before a yes its connection goes to the threads in :mod:`kvrelay.wire.shared_takers` (one, or as many as there are for the data
socket), so that its turns do not depend on when this thread runs again. A sender may come with several connections, each with a
ring, and is not asked whether it is the same.

Nobody is waited for. Who connects and does not greet is dropped after a while, or earlier, when many do so at a time. Only
processes of the same user, and root's, may connect. With keys a sender must also show the token of the data socket.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import selectors
import socket
import struct
import sys
import threading
import time
from pathlib import Path

from kvrelay.common.logs import RareWarnings
from kvrelay.wire.addresses import SocketFile
from kvrelay.wire.errors import GreetingRefusedError, WireError
from kvrelay.wire.leases import LeaseTable
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.send_job import Wakeup
from kvrelay.wire.shared_packets import MAX_GREETING_NBYTES, pack_answer, parse_greeting
from kvrelay.wire.shared_place import SharedPlace
from kvrelay.wire.shared_ring import Ring, RingShape, map_ring
from kvrelay.wire.shared_takers import SharedSender, SharedTakers, sent

logger = logging.getLogger(__name__)

_BACKLOG = 128
_MAX_SENDERS = 1024  # connections; each costs a descriptor, and the memory of its ring is its own
_MAX_STRANGERS = 64  # connected and silent; one more, and the oldest goes
_STRANGER_S = 5.0
_PAUSE_S = 1.0  # without a descriptor left
_DESCRIPTOR = struct.Struct("i")
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


class SharedReceiver:
    """The door and the threads behind it. ``start`` once, ``stop`` once."""

    def __init__(
        self,
        place: SharedPlace,
        leases: LeaseTable,
        block_nbytes: int,
        metrics: WireMetrics,
        *,
        token: str | None = None,
        num_threads: int = 1,
        stranger_s: float = _STRANGER_S,
    ) -> None:
        """Listens from now on, under ``name``. ``token``: what senders must show; None: nothing. Raises WireError.

        ``num_threads``: how many blocks are written and proved at a time, each on a thread.
        """
        if sys.platform != "linux":
            raise WireError("only Linux passes memory over sockets as this needs it")
        self._block_nbytes = block_nbytes
        self._metrics = metrics
        self._token = token
        self._stranger_s = stranger_s
        place.sweep()
        self.name = place.new_name()
        self._listener, self._file = _listen(place.address(self.name))
        self._strangers: dict[socket.socket, float] = {}  # when they connected, in that order
        self._wakeup = Wakeup()
        self._takers = SharedTakers(leases, self._wakeup, num_threads)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._accepts_from_s: float | None = None  # None: it accepts
        self._thread = threading.Thread(target=self._run, name="shared-receiver", daemon=True)
        self._warnings = RareWarnings(
            logger, time.monotonic
        )  # a flood of bad greetings must not become a flood of logs

    def start(self) -> None:
        """Start receiving."""
        self._takers.start()
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether senders are let in, and blocks received by as many threads as there should be."""
        return self._thread.is_alive() and self._takers.is_alive

    @property
    def num_connections(self) -> int:
        """Senders, and who is not known to be one."""
        return self._takers.num_senders + len(self._strangers)

    def stop(self) -> None:
        """End the threads, close the sockets and unmap the rings."""
        self._wakeup.set()
        if self._thread.ident is not None:
            self._thread.join()
        else:
            self._close()
        self._wakeup.close()
        self._file.remove()

    # -- the door's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._wakeup.is_set:
                for key, _ in self._selector.select(self._patience_s()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data in self._strangers:
                        self._greet(key.data)
                self._pass_time()
        finally:
            self._wakeup.set()  # if this one has died: the others would serve whom they have
            self._close()

    def _close(self) -> None:
        self._takers.join()
        self._takers.close()
        for stranger in list(self._strangers):
            self._drop(stranger)
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # who connected has left already
            return
        except OSError as error:  # no descriptor left: else this would be asked for over and over
            self._warnings.warn(f"cannot accept a connection for shared memory: {error.strerror}", "accept")
            self._selector.unregister(self._listener)
            self._accepts_from_s = time.monotonic() + _PAUSE_S
            return
        if not _is_trusted(connection):
            self._metrics.refused_greetings.labels("other_user").inc()
            self._warnings.warn("refused shared memory: another user of this machine", "other_user")
            connection.close()
            return
        connection.setblocking(False)
        self._know(connection)
        # An honest sender has greeted by now or does so next; a crowd of silent ones must not shut it out.
        self._greet(connection)
        if len(self._strangers) > _MAX_STRANGERS:
            self._drop(next(iter(self._strangers)))

    def _greet(self, stranger: socket.socket) -> None:
        """Take a greeting if one is there, and answer it: a sender goes through the door, anybody else is dropped."""
        try:
            packet, ancillary, flags, _ = stranger.recvmsg(
                MAX_GREETING_NBYTES, socket.CMSG_LEN(_DESCRIPTOR.size), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            self._drop(stranger)
            return
        descriptors = [
            _DESCRIPTOR.unpack_from(data)[0]
            for level, kind, data in ancillary
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS) and len(data) >= _DESCRIPTOR.size
        ]
        try:
            ring = self._ring_of(packet, descriptors, is_cut=bool(flags & socket.MSG_CTRUNC))
        except GreetingRefusedError as error:
            self._metrics.refused_greetings.labels(error.cause_name).inc()
            self._warnings.warn(f"refused shared memory: {error}", error.cause_name)
            sent(stranger, pack_answer(str(error)))
            self._drop(stranger)
            return
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._let_in(stranger, ring)

    def _let_in(self, stranger: socket.socket, ring: Ring) -> None:
        """Give a sender to the takers, and only then tell it yes: who has been told stands in line, however late this thread is."""
        try:
            answering = stranger.dup()  # the takers may close theirs at any moment from now on
        except OSError as error:
            self._warnings.warn(f"cannot answer a connection for shared memory: {error.strerror}", "answer")
            self._drop(stranger)
            ring.close()
            return
        self._forget(stranger)
        self._takers.add(SharedSender(stranger, ring))
        with answering:
            if not sent(answering, pack_answer(None)):
                with contextlib.suppress(OSError):  # it is gone already
                    answering.shutdown(socket.SHUT_RDWR)  # the takers see that, and drop it

    def _ring_of(self, packet: bytes, descriptors: list[int], *, is_cut: bool) -> Ring:
        """The memory that a greeting brings, mapped. Raises GreetingRefusedError."""
        greeting = parse_greeting(packet)
        if self._token is not None and not hmac.compare_digest(greeting.token, self._token.encode()):
            self._metrics.refused_tokens.inc()
            raise GreetingRefusedError("wrong_token", "not the token of this process's data port")
        shape, ours = greeting.shape, RingShape.of(self._block_nbytes)
        if shape.slot_nbytes != ours.slot_nbytes or not 0 < shape.num_slots <= ours.num_slots:
            detail = (
                f"{shape.num_slots} slots of {shape.slot_nbytes} bytes; "
                f"1 to {ours.num_slots} of {ours.slot_nbytes} are taken"
            )
            raise GreetingRefusedError("wrong_shape", detail)
        if len(descriptors) != 1 or is_cut:
            raise GreetingRefusedError("bad_memory", "a greeting brings one descriptor, that of its memory")
        if self._takers.num_senders >= _MAX_SENDERS:
            raise GreetingRefusedError("too_many", f"{_MAX_SENDERS} senders are connected, and no more are taken")
        return map_ring(descriptors[0], shape)

    def _know(self, stranger: socket.socket) -> None:
        self._selector.register(stranger, selectors.EVENT_READ, stranger)
        self._strangers[stranger] = time.monotonic()

    def _drop(self, stranger: socket.socket) -> None:
        self._forget(stranger)
        stranger.close()

    def _forget(self, stranger: socket.socket) -> None:
        self._selector.unregister(stranger)
        del self._strangers[stranger]

    def _patience_s(self) -> float | None:
        """How long nothing needs to be done if nothing comes; None: for ever."""
        moments = [] if self._accepts_from_s is None else [self._accepts_from_s]
        if self._strangers:
            moments.append(next(iter(self._strangers.values())) + self._stranger_s)
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _pass_time(self) -> None:
        """Drop who has been silent for too long, and accept again behind a pause."""
        now_s = time.monotonic()
        while self._strangers and next(iter(self._strangers.values())) + self._stranger_s <= now_s:
            self._drop(next(iter(self._strangers)))
        if self._accepts_from_s is not None and self._accepts_from_s <= now_s:
            self._accepts_from_s = None
            self._selector.register(self._listener, selectors.EVENT_READ)


def open_shared_receiver(
    place: SharedPlace | None,
    leases: LeaseTable,
    block_nbytes: int,
    metrics: WireMetrics,
    *,
    token: str | None,
    num_threads: int,
) -> SharedReceiver | None:
    """A worker's receiver at ``place``; None without one, or where a system does not have what ``auto`` would use (logged).

    Raises WireError if a directory that somebody named cannot be used.
    """
    if place is None:
        return None
    try:
        return SharedReceiver(place, leases, block_nbytes, metrics, token=token, num_threads=num_threads)
    except WireError as error:
        if place.directory is not None:
            raise
        logger.warning("%s: KV blocks come over TCP only", error)
        return None


def _listen(address: str) -> tuple[socket.socket, SocketFile]:
    """A socket that senders can connect to. Raises WireError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    shown = address.replace("\0", "@")
    try:
        listener.setblocking(False)
        listener.bind(address)
        if not shown.startswith("@"):
            Path(address).chmod(0o600)  # before anybody can connect
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        detail = f"cannot listen for shared memory on {shown}: {error}"
        raise WireError(f"{detail}; choose another --shared-memory, or off") from error
    return listener, SocketFile(f"ipc://{shown}")


def _is_trusted(connection: socket.socket) -> bool:
    """Whether a process of our user, or root's, connected. What others pass is not even received."""
    uid = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
    return uid in (0, os.geteuid())
