"""The receiving end of shared memory: one thread for the rings of all senders on this host, beside that of the data socket.

A sender connects, shows its ring (:mod:`kvrelay.wire.shared_packets`), and is told yes or no. From then on each of its packets
names a slot and has a block's header; the block is written from the slot into the pool and proved there, by the lease table, as
any other. One thread and not one for each sender: a copy out of the ring keeps Python's lock anyway, and a sender that says
nothing costs a descriptor, no thread. Nobody is waited for. Who connects and does not greet is dropped after a while, or earlier,
when many do so at a time; a sender whose packets are not ours is dropped at once, and one that is gone with its process.

Only processes of the same user, and root's, may connect. With keys a sender must also show the token of the data socket.
"""

from __future__ import annotations

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
from kvrelay.wire.block_frames import parse_header
from kvrelay.wire.errors import BlockRefusedError, GreetingRefusedError, WireError
from kvrelay.wire.leases import LeaseTable
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.seal import TAG_NBYTES
from kvrelay.wire.send_job import Wakeup
from kvrelay.wire.shared_packets import (
    MAX_GREETING_NBYTES,
    MAX_PACKET_NBYTES,
    pack_answer,
    pack_slots,
    parse_greeting,
    split_block,
)
from kvrelay.wire.shared_place import SharedPlace
from kvrelay.wire.shared_ring import Ring, RingShape, map_ring

logger = logging.getLogger(__name__)

_BACKLOG = 128
_MAX_SENDERS = 1024  # each costs two descriptors; the memory of its ring is its own
_MAX_STRANGERS = 64  # connected and silent; one more, and the oldest goes
_STRANGER_S = 5.0
_TURN_BLOCKS = 8  # of one sender, before the others are looked at
_PAUSE_S = 1.0  # without a descriptor left
_DESCRIPTOR = struct.Struct("i")
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


class _Sender:
    """One connection."""

    def __init__(self, connection: socket.socket, connected_s: float) -> None:
        self.connection = connection
        self.connected_s = connected_s
        self.ring: Ring | None = None  # None: it has not greeted


class SharedReceiver:
    """The thread that receives blocks through shared memory. ``start`` once, ``stop`` once."""

    def __init__(
        self,
        place: SharedPlace,
        leases: LeaseTable,
        block_nbytes: int,
        metrics: WireMetrics,
        *,
        token: str | None = None,
        stranger_s: float = _STRANGER_S,
    ) -> None:
        """Listens from now on, under ``name``. ``token``: what senders must show; None: nothing. Raises WireError."""
        if sys.platform != "linux":
            raise WireError("only Linux passes memory over sockets as this needs it")
        self._leases = leases
        self._block_nbytes = block_nbytes
        self._metrics = metrics
        self._token = token
        self._stranger_s = stranger_s
        place.sweep()
        self.name = place.new_name()
        self._listener, self._file = _listen(place.address(self.name))
        self._senders: set[_Sender] = set()
        self._strangers: dict[_Sender, None] = {}  # in the order in which they came
        self._wakeup = Wakeup()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._accepts_from_s: float | None = None  # None: it accepts
        self._thread = threading.Thread(target=self._run, name="shared-receiver", daemon=True)
        self._warnings = RareWarnings(logger)  # a flood of bad packets must not become a flood of logs

    def start(self) -> None:
        """Start receiving."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether blocks are being received."""
        return self._thread.is_alive()

    @property
    def num_connections(self) -> int:
        """Senders, and who is not known to be one."""
        return len(self._senders) + len(self._strangers)

    def stop(self) -> None:
        """End the thread, close the sockets and unmap the rings."""
        self._wakeup.set()
        if self._thread.ident is not None:
            self._thread.join()
        else:
            self._close()
        self._wakeup.close()
        self._file.remove()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._wakeup.is_set:
                for key, _ in self._selector.select(self._patience_s()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data in self._senders:
                        self._keep(key.data, self._take_blocks(key.data))
                    elif key.data in self._strangers:
                        self._keep(key.data, self._greet(key.data))
                self._pass_time()
        finally:
            self._close()

    def _close(self) -> None:
        for sender in [*self._senders, *self._strangers]:
            self._drop(sender)
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
        sender = _Sender(connection, time.monotonic())
        self._selector.register(connection, selectors.EVENT_READ, sender)
        self._strangers[sender] = None
        # An honest sender has greeted by now or does so next; a crowd of silent ones must not shut it out.
        self._keep(sender, self._greet(sender))
        if len(self._strangers) > _MAX_STRANGERS:
            self._drop(next(iter(self._strangers)))

    def _greet(self, sender: _Sender) -> bool:
        """Take a greeting if one is there; False if the connection is to be closed."""
        try:
            packet, ancillary, flags, _ = sender.connection.recvmsg(
                MAX_GREETING_NBYTES, socket.CMSG_LEN(_DESCRIPTOR.size), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return True
        except OSError:
            return False
        descriptors = [
            _DESCRIPTOR.unpack_from(data)[0]
            for level, kind, data in ancillary
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS) and len(data) >= _DESCRIPTOR.size
        ]
        refusal: str | None = None
        try:
            sender.ring = self._ring_of(packet, descriptors, is_cut=bool(flags & socket.MSG_CTRUNC))
        except GreetingRefusedError as error:
            refusal = str(error)
            self._metrics.refused_greetings.labels(error.cause_name).inc()
            self._warnings.warn(f"refused shared memory: {error}", error.cause_name)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if sender.ring is not None:
            del self._strangers[sender]
            self._senders.add(sender)
        return _sent(sender.connection, pack_answer(refusal)) and refusal is None

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
        if len(self._senders) >= _MAX_SENDERS:
            raise GreetingRefusedError("too_many", f"{_MAX_SENDERS} senders are connected, and no more are taken")
        return map_ring(descriptors[0], shape)

    def _take_blocks(self, sender: _Sender) -> bool:
        """Take a few blocks of one sender; False if the connection is to be closed."""
        assert sender.ring is not None
        slots = sender.ring.slots
        done: list[int] = []
        # Slots go back together, so that it is not woken for each, and early enough for it to fill them meanwhile.
        for _ in range(min(_TURN_BLOCKS, len(slots) // 2) or 1):
            try:
                packet = sender.connection.recv(MAX_PACKET_NBYTES)
            except BlockingIOError:
                break
            except OSError:
                return False
            if not packet:
                return False  # it has closed, or its process is gone
            try:
                slot, frame = split_block(packet)
                header = parse_header(frame)
                if slot >= len(slots):
                    raise BlockRefusedError("bad_header", f"slot {slot} of {len(slots)}")
            except BlockRefusedError as error:
                self._leases.count_bad_header()
                self._warnings.warn(f"refused a KV block and its sender: {error}", error.cause_name)
                return False
            try:
                self._leases.begin_block(header)  # from here on its size is that of the pool's blocks
                nbytes = header.payload_nbytes + (TAG_NBYTES if header.is_sealed else 0)
                self._leases.finish_block(header, slots[slot][:nbytes])
            except BlockRefusedError as error:
                self._warnings.warn(f"refused a KV block: {error}", error.cause_name)
            done.append(slot)
        return not done or _sent(sender.connection, pack_slots(done))

    def _keep(self, sender: _Sender, is_kept: bool) -> None:
        if not is_kept:
            self._drop(sender)

    def _drop(self, sender: _Sender) -> None:
        self._selector.unregister(sender.connection)
        sender.connection.close()
        if sender.ring is not None:
            sender.ring.close()
        self._strangers.pop(sender, None)
        self._senders.discard(sender)

    def _patience_s(self) -> float | None:
        """How long nothing needs to be done if nothing comes; None: for ever."""
        moments = [] if self._accepts_from_s is None else [self._accepts_from_s]
        if self._strangers:
            moments.append(next(iter(self._strangers)).connected_s + self._stranger_s)
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _pass_time(self) -> None:
        """Drop who has been silent for too long, and accept again behind a pause."""
        now_s = time.monotonic()
        while self._strangers and next(iter(self._strangers)).connected_s + self._stranger_s <= now_s:
            self._drop(next(iter(self._strangers)))
        if self._accepts_from_s is not None and self._accepts_from_s <= now_s:
            self._accepts_from_s = None
            self._selector.register(self._listener, selectors.EVENT_READ)


def open_shared_receiver(
    place: SharedPlace | None, leases: LeaseTable, block_nbytes: int, metrics: WireMetrics, token: str | None
) -> SharedReceiver | None:
    """A worker's receiver at ``place``; None without one, or where a system does not have what ``auto`` would use (logged).

    Raises WireError if a directory that somebody named cannot be used.
    """
    if place is None:
        return None
    try:
        return SharedReceiver(place, leases, block_nbytes, metrics, token=token)
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
        detail = f"cannot listen for shared memory on {shown}: {error.strerror}"
        raise WireError(f"{detail}; choose another --shared-memory, or off") from error
    return listener, SocketFile(f"ipc://{shown}")


def _is_trusted(connection: socket.socket) -> bool:
    """Whether a process of our user, or root's, connected. What others pass is not even received."""
    uid = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
    return uid in (0, os.geteuid())


def _sent(connection: socket.socket, packet: bytes) -> bool:
    """Send it; False if that cannot be done now: who takes nothing back is no sender of ours."""
    try:
        connection.send(packet)
    except OSError:
        return False
    return True
