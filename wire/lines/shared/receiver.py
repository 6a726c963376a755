"""The receiving end of shared memory: the socket that all senders of this host connect to, and the thread that takes their blocks.

A sender connects, passes its ring (:mod:`kvrelay.wire.lines.shared.packets`), and gets a yes or a no. After a yes each of its
packets names a slot and holds a block's header. The lease table writes the block from the slot into the pool and verifies it there,
as it does every block. A sender with malformed packets is dropped at once. When a sender's process ends, its connection ends too.

One epoll instance waits for all connections. Each connection with packets gets a turn of a few blocks before the next one. An idle
sender costs only a descriptor. The listening socket gets a turn, too, which is short.

The thread never waits for one peer. A *stranger* is a connection that has not greeted. It is dropped after a while, or earlier if
there are many. Only processes of the same user or of root may connect. With keys a sender must also show the data socket's token.
"""

from __future__ import annotations

import hmac
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from kvrelay.common.late_bytes import Register
from kvrelay.common.logs import RareWarnings
from kvrelay.wire.blocks.frames import parse_header
from kvrelay.wire.blocks.seal import TAG_NBYTES
from kvrelay.wire.blocks.send_job import Wakeup
from kvrelay.wire.errors import BlockRefusedError, GreetingRefusedError
from kvrelay.wire.leases.table import LeaseTable
from kvrelay.wire.lines.shared.packets import (
    MAX_GREETING_NBYTES,
    MAX_PACKET_NBYTES,
    pack_answer,
    pack_slots,
    parse_greeting,
    split_block,
)
from kvrelay.wire.lines.shared.place import SharedPlace, is_trusted
from kvrelay.wire.lines.shared.ring import Ring, RingShape, map_ring
from kvrelay.wire.metrics import WireMetrics

logger = logging.getLogger(__name__)

_MAX_SENDERS = 1024  # connections; each costs a descriptor here, and ring memory at the sender
_MAX_STRANGERS = 64  # connections without a greeting; with one more, the oldest is dropped
_STRANGER_S = 5.0
_PAUSE_S = 1.0  # pause in accepting when no descriptor is left
_TURN_BLOCKS = 8  # most blocks of one connection per turn


@dataclass(slots=True, eq=False)
class SharedPeer:
    """One connection: a stranger until it has greeted, then a sender. ``close`` once."""

    connection: socket.socket  # does not block
    until_s: float  # a stranger is dropped at this time
    ring: Ring | None = None  # None: a stranger

    def close(self) -> None:
        """Hang up and unmap the ring."""
        self.connection.close()
        if self.ring is not None:
            self.ring.close()


class SharedReceiver:
    """The listening socket and the thread. ``start`` once, ``stop`` once."""

    def __init__(
        self,
        place: SharedPlace,
        leases: LeaseTable,
        block_nbytes: int,
        metrics: WireMetrics,
        *,
        token: str | None = None,
        register: Register | None = None,
        stranger_s: float = _STRANGER_S,
    ) -> None:
        """Listens at once, under ``name``. ``token``: what senders must show; None: nothing. ``register``: lets the pool's device
        copy from rings. Raises WireError.
        """
        self._leases = leases
        self._block_nbytes = block_nbytes
        self._metrics = metrics
        self._token = token
        self._register = register
        self._stranger_s = stranger_s
        place.sweep()
        self.name = place.new_name()
        self._listener, self._file = place.listen(self.name)
        self._accepts_from_s: float | None = None  # None: it accepts connections
        self._peers: dict[int, SharedPeer] = {}  # by descriptor; removed before the descriptor is closed
        self._strangers: dict[int, SharedPeer] = {}  # subset of ``_peers``, oldest first
        self._wakeup = Wakeup()
        self._epoll = select.epoll()
        for waited in (self._wakeup, self._listener):
            self._epoll.register(waited, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="shared-receiver", daemon=True)
        self._warnings = RareWarnings(logger, time.monotonic)  # a flood of lies must not become a flood of logs

    def start(self) -> None:
        """Start receiving."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread accepts senders and receives blocks."""
        return self._thread.is_alive()

    @property
    def num_connections(self) -> int:
        """The number of connections, strangers included."""
        return len(self._peers)

    def stop(self) -> None:
        """End the thread after its current turn, close the sockets and unmap the rings."""
        self._wakeup.set()
        if self._thread.ident is None:
            self._close()
        else:
            self._thread.join()
        self._wakeup.close()
        self._file.remove()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        patience_s: float | None = None
        try:
            while not self._wakeup.is_set:
                patience_s = self.take_turns(patience_s)
        finally:
            self._close()

    def take_turns(self, patience_s: float | None) -> float | None:
        """Wait ``patience_s`` at most (None: no bound), then give each ready connection a turn. Returns the next such wait."""
        for descriptor, _ in self._epoll.poll(patience_s):
            if descriptor == self._listener.fileno():
                self._accept()
            elif (peer := self._peers.get(descriptor)) is None:  # the wakeup, or a connection dropped in this round
                continue
            elif peer.ring is None:
                self._greet(peer)
            elif not self.take_blocks(peer):
                self._drop(peer)
        return self._pass_time()

    def _close(self) -> None:
        for peer in list(self._peers.values()):
            self._drop(peer)
        self._epoll.close()
        self._listener.close()

    def take_blocks(self, sender: SharedPeer) -> bool:
        """Take a few blocks of one connection. False if the connection must be closed."""
        done: list[int] = []
        written: list[Callable[[], None]] = []  # a device copies them side by side
        try:
            is_sound = self._write_blocks(sender, done, written)
        finally:  # no device may read the slots any more when their memory is unmapped
            self._verify(written)
        # Slots go back together, so that the sender is woken rarely, and early enough that it can refill them meanwhile.
        return is_sound and (not done or _sent(sender.connection, pack_slots(done)))

    def _write_blocks(self, sender: SharedPeer, done: list[int], written: list[Callable[[], None]]) -> bool:
        """Begin to write a few blocks. Adds their slots to ``done``, and what verifies them to ``written``."""
        assert sender.ring is not None
        slots = sender.ring.slots
        for _ in range(min(_TURN_BLOCKS, len(slots) // 2) or 1):
            try:
                packet = sender.connection.recv(MAX_PACKET_NBYTES)
            except BlockingIOError:
                break
            except OSError:
                return False
            if not packet:
                return False  # the sender closed, or its process ended
            try:
                slot, frame = split_block(packet)
                header = parse_header(frame)
                if slot >= len(slots):
                    raise BlockRefusedError("bad_header", f"slot {slot} of {len(slots)}")
            except BlockRefusedError as error:
                self._leases.count_bad_header()
                self._warnings.warn(f"refused a KV block and its sender: {error}", error.cause_name)
                return False
            done.append(slot)
            try:
                self._leases.begin_piece(header)  # the size is checked from here on
                nbytes = header.payload_nbytes + (TAG_NBYTES if header.is_sealed else 0)
                written.append(self._leases.write_piece(header, slots[slot][:nbytes]))
            except BlockRefusedError as error:
                self._warnings.warn(f"refused a KV block: {error}", error.cause_name)
            if header.is_sealed:  # another piece may claim the same place, and would wait for this one
                self._verify(written)
        return True

    def _verify(self, written: list[Callable[[], None]]) -> None:
        """Verify the blocks, and forget them. If one raises, the others are verified first."""
        with ExitStack() as stack:
            for verify in reversed(written):
                stack.callback(self._verify_one, verify)
            written.clear()

    def _verify_one(self, verify: Callable[[], None]) -> None:
        try:
            verify()
        except BlockRefusedError as error:
            self._warnings.warn(f"refused a KV block: {error}", error.cause_name)

    # -- new connections -----------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the peer has left already
            return
        except OSError as error:  # no descriptor left; without a pause epoll would report it again and again
            self._warnings.warn(f"cannot accept a connection for shared memory: {error.strerror}", "accept")
            self._accepts_from_s = time.monotonic() + _PAUSE_S
            self._epoll.modify(self._listener, 0)
            return
        if not is_trusted(connection):
            self._metrics.refused_greetings.labels("other_user").inc()
            self._warnings.warn("refused shared memory: another user of this machine", "other_user")
            connection.close()
            return
        connection.setblocking(False)
        self.meet(connection)

    def meet(self, connection: socket.socket) -> None:
        """Take in a new connection, which must not block, as a stranger. The receiver owns it from then on."""
        stranger = SharedPeer(connection, time.monotonic() + self._stranger_s)
        self._peers[connection.fileno()] = self._strangers[connection.fileno()] = stranger
        self._epoll.register(connection, select.EPOLLIN)
        # A real sender has greeted already or does so next. Many silent connections must not shut it out.
        self._greet(stranger)
        if len(self._strangers) > _MAX_STRANGERS:
            self._drop(next(iter(self._strangers.values())))

    def _greet(self, stranger: SharedPeer) -> None:
        """Read and answer a greeting, if one is there. A valid one makes the stranger a sender; any other drops it."""
        try:
            packet, descriptors, flags, _ = socket.recv_fds(
                stranger.connection, MAX_GREETING_NBYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            self._drop(stranger)
            return
        if not packet and not descriptors:  # it left without a word, as another decode worker's ``sweep`` does
            self._drop(stranger)
            return
        try:
            stranger.ring = self._ring_of(packet, descriptors, is_cut=bool(flags & socket.MSG_CTRUNC))
        except GreetingRefusedError as error:
            self._metrics.refused_greetings.labels(error.cause_name).inc()
            self._warnings.warn(f"refused shared memory: {error}", error.cause_name)
            _sent(stranger.connection, pack_answer(str(error)))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if stranger.ring is not None and _sent(stranger.connection, pack_answer(None)):
            del self._strangers[stranger.connection.fileno()]
        else:
            self._drop(stranger)

    def _ring_of(self, packet: bytes, descriptors: list[int], *, is_cut: bool) -> Ring:
        """Map the memory that a greeting passes. Raises GreetingRefusedError."""
        greeting = parse_greeting(packet)
        if self._token is not None and not hmac.compare_digest(greeting.token, self._token.encode()):
            self._metrics.refused_tokens.inc()
            raise GreetingRefusedError("wrong_token", "not the token of this process's data port")
        shape, ours = greeting.shape, RingShape.of(self._block_nbytes, is_for_device=True)
        if shape.slot_nbytes != ours.slot_nbytes or not 0 < shape.num_slots <= ours.num_slots:
            detail = (
                f"{shape.num_slots} slots of {shape.slot_nbytes} bytes; "
                f"1 to {ours.num_slots} of {ours.slot_nbytes} are taken"
            )
            raise GreetingRefusedError("wrong_shape", detail)
        if len(descriptors) != 1 or is_cut:
            raise GreetingRefusedError("bad_memory", "a greeting brings one descriptor, that of its memory")
        if len(self._peers) - len(self._strangers) >= _MAX_SENDERS:
            raise GreetingRefusedError("too_many", f"{_MAX_SENDERS} senders are connected, and no more are taken")
        ring = map_ring(descriptors[0], shape)
        if self._register is not None:
            ring.register(self._register)
        return ring

    def _drop(self, peer: SharedPeer) -> None:
        del self._peers[peer.connection.fileno()]
        self._strangers.pop(peer.connection.fileno(), None)
        peer.close()

    def _pass_time(self) -> float | None:
        """Drop strangers whose time is up, and accept again after a pause.

        Returns the seconds until the next of these; None: none.
        """
        now_s = time.monotonic()
        while self._strangers and (oldest := next(iter(self._strangers.values()))).until_s <= now_s:
            self._drop(oldest)
        if self._accepts_from_s is not None and self._accepts_from_s <= now_s:
            self._accepts_from_s = None
            self._epoll.modify(self._listener, select.EPOLLIN)
        moments = [] if self._accepts_from_s is None else [self._accepts_from_s]
        moments += [stranger.until_s for stranger in list(self._strangers.values())[:1]]
        return min(moments) - now_s if moments else None


def _sent(connection: socket.socket, packet: bytes) -> bool:
    """Send without waiting. False if the socket takes no packet: a real sender always reads its answers."""
    try:
        connection.send(packet)
    except OSError:
        return False
    return True
