"""The threads that take blocks out of rings: those of the senders that :mod:`kvrelay.wire.shared_receiver` has let in.

All threads wait on one epoll instance. A connection with a packet is given to one of them, and to no other until that one asks for
more (``EPOLLONESHOT``). So a connection and its ring have one thread at a time, and need no lock; blocks of several connections
land side by side; and a sender that says nothing costs a descriptor, no thread. Who has had its turn waits behind all others that
have something to say.

Each packet names a slot and has a block's header; the block is written from the slot into the pool and proved there, by the lease
table, as any other. A sender whose packets are not ours is dropped at once, and one that is gone with its process.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from dataclasses import dataclass

from kvrelay.common.logs import RareWarnings
from kvrelay.wire.block_frames import parse_header
from kvrelay.wire.errors import BlockRefusedError
from kvrelay.wire.leases import LeaseTable
from kvrelay.wire.seal import TAG_NBYTES
from kvrelay.wire.send_job import Wakeup
from kvrelay.wire.shared_packets import MAX_PACKET_NBYTES, pack_slots, split_block
from kvrelay.wire.shared_ring import Ring

logger = logging.getLogger(__name__)

_TURN_BLOCKS = 8  # of one connection, before the others are looked at


@dataclass(frozen=True, slots=True, eq=False)
class SharedSender:
    """One connection of a sender, and the ring that it brought. ``close`` once."""

    connection: socket.socket  # does not block
    ring: Ring

    def close(self) -> None:
        """Hang up and unmap the ring."""
        self.connection.close()
        self.ring.close()


class SharedTakers:
    """The threads. ``start`` once; they end with ``wakeup``, and all of them if one dies: then ``join``, and ``close``."""

    def __init__(self, leases: LeaseTable, wakeup: Wakeup, num_threads: int) -> None:
        self._leases = leases
        self._wakeup = wakeup
        self._senders: dict[int, SharedSender] = {}  # by descriptor; one goes before its descriptor is anybody else's
        self._epoll = select.epoll()
        self._epoll.register(wakeup, select.EPOLLIN)  # for every thread, and for good
        self._threads = [
            threading.Thread(target=self._run, name=f"shared-taker-{number}", daemon=True)
            for number in range(num_threads)
        ]
        self._warnings = RareWarnings(logger, time.monotonic)  # not a flood of logs for a flood of bad packets

    def start(self) -> None:
        """Start taking blocks."""
        for thread in self._threads:
            thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether blocks are being taken, by as many threads as there should be."""
        return all(thread.is_alive() for thread in self._threads)

    @property
    def num_senders(self) -> int:
        """Connections that blocks may come by."""
        return len(self._senders)

    def add(self, sender: SharedSender) -> None:
        """Take its blocks from now on; it is closed here. On one thread."""
        descriptor = sender.connection.fileno()
        self._senders[descriptor] = sender
        self._epoll.register(descriptor, select.EPOLLIN | select.EPOLLONESHOT)

    def join(self) -> None:
        """Wait for the threads, each of which ends its turn first. Behind the wakeup."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def close(self) -> None:
        """Close all connections and unmap their rings. Behind ``join``."""
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()
        self._epoll.close()

    # -- the threads -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._wakeup.is_set:
                for descriptor, _ in self._epoll.poll(maxevents=1):
                    if descriptor in self._senders:
                        self._serve(descriptor)
        finally:
            self._wakeup.set()  # if this one has died: a receiver of which one thread is left would seem to be well

    def _serve(self, descriptor: int) -> None:
        sender = self._senders[descriptor]
        is_well = self.take_blocks(sender)
        # Not modified, but taken out and put in again: a packet that came while the kernel was giving the connection to this thread
        # has left it on the list of who is ready, and there it would have its next turn, before those who came during this one.
        self._epoll.unregister(descriptor)
        if is_well:
            try:
                self._epoll.register(descriptor, select.EPOLLIN | select.EPOLLONESHOT)
            except OSError as error:  # the kernel has no room for it any more
                logger.warning("a sender through shared memory is dropped: %s", error.strerror)
                is_well = False
        if not is_well:
            del self._senders[descriptor]
            sender.close()

    def take_blocks(self, sender: SharedSender) -> bool:
        """Take a few blocks of one connection; False if it is to be closed. Nobody else uses ``sender`` meanwhile."""
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
        return not done or sent(sender.connection, pack_slots(done))


def sent(connection: socket.socket, packet: bytes) -> bool:
    """Send it; False if that cannot be done now: who takes nothing back is no sender of ours."""
    try:
        connection.send(packet)
    except OSError:
        return False
    return True
