"""The same frames through shared memory: slots and packets, right, changed and nonsense, and greetings of all kinds.

The receiver's threads do not run: what they would do is done at once, so that what it raises is found where it was sent.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from kvrelay.wire.leases import LeaseTable
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.shared_packets import Greeting, pack_block, parse_slots, refusal_in
from kvrelay.wire.shared_place import SharedPlace
from kvrelay.wire.shared_receiver import SharedReceiver
from kvrelay.wire.shared_ring import RingShape, make_ring, map_ring
from kvrelay.wire.shared_takers import SharedSender

from .mutator import Mutator


class SlotFuzz:
    """A receiver, one sender that has greeted, and others that try to."""

    def __init__(self, leases: LeaseTable, block_nbytes: int, rng: random.Random, mutator: Mutator) -> None:
        self._rng, self._mutator = rng, mutator
        self._receiver = SharedReceiver(SharedPlace(), leases, block_nbytes, WireMetrics(CollectorRegistry()))
        self._shape = RingShape.of(block_nbytes)
        self._ring, self._descriptor = make_ring(self._shape)
        self._ours, theirs = _pair()
        self._sender = SharedSender(theirs, map_ring(self._descriptor, self._shape))

    def send(self, frame: bytes, payload: bytes, is_spared: Callable[[bytes], bool]) -> None:
        """A block through a slot, its packet changed now and then; a slot that it went through must come back.

        ``is_spared``: of a header's frame, whether it must not be sent.
        """
        slot = self._rng.randrange(self._shape.num_slots)
        room = self._shape.slot_nbytes
        self._ring.slots[slot][: min(len(payload), room)] = payload[:room]
        packet = pack_block(slot, frame)
        if self._rng.random() < 0.3:
            packet = self._mutator.mutate([packet])
        elif self._rng.random() < 0.1:
            packet = pack_block(self._rng.choice([self._shape.num_slots, 2**31, 2**32 - 1]), frame)
        if not packet or is_spared(packet[4:]):
            return  # an empty one would be the end of the connection
        self._ours.send(packet)
        is_kept = self._receiver._takers.take_blocks(self._sender)
        came_back = self._slots_back()
        assert came_back == ([int.from_bytes(packet[:4], "little")] if is_kept else []), (is_kept, came_back, packet)

    def greet(self) -> None:
        """Somebody's greeting, with as many descriptors as it likes."""
        shape = RingShape(self._rng.choice([self._shape.slot_nbytes, 0, 2**64 - 1]), self._rng.choice([4, 32, 33, 0]))
        packet = Greeting(shape, self._rng.randbytes(self._rng.choice([0, 64]))).pack()
        if self._rng.random() < 0.7:
            packet = self._mutator.mutate([packet])
        ours, theirs = _pair()
        with ours, theirs:
            socket.send_fds(ours, [packet], [self._descriptor] * self._rng.choice([0, 1, 1, 2]))
            self._receiver._know(theirs)
            self._receiver._greet(theirs)
            is_let_in = self._receiver._takers.num_senders == 1
            assert (refusal_in(ours.recv(1000)) is None) is is_let_in
            assert (theirs.fileno() >= 0) is is_let_in
            assert self._receiver.num_connections == is_let_in
            ours.close()
            if is_let_in:
                self._receiver._takers._serve(theirs.fileno())
            assert self._receiver.num_connections == 0

    def close(self) -> None:
        """Nothing stays open."""
        self._sender.close()
        self._ours.close()
        self._ring.close()
        os.close(self._descriptor)
        self._receiver.stop()

    def _slots_back(self) -> list[int]:
        try:
            return parse_slots(self._ours.recv(1000))
        except BlockingIOError:
            return []


def _pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.setblocking(False)
    return pair
