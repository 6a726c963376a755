"""Either end of shared memory, played by a test; and the descriptors and rings that are still open."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from kvrelay.wire.lines.shared.packets import Greeting, pack_block, parse_slots, refusal_in
from kvrelay.wire.lines.shared.place import SharedPlace
from kvrelay.wire.lines.shared.ring import RingShape, make_ring

from .lease_bench import WAIT_S


class SharedPeer:
    """A connection to a receiver, and a ring once it has greeted. Use it in ``with``."""

    def __init__(self, name: str, place: SharedPlace | None = None) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(WAIT_S)
        self.socket.connect((place or SharedPlace()).address(name))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def greet(self, block_nbytes: int, token: bytes = b"") -> str | None:
        """Greet as a sender does. Returns the refusal, or None."""
        self.ring, descriptor = make_ring(RingShape.of(block_nbytes))
        refusal = self.introduce(Greeting(self.ring.shape, token).pack(), descriptor)
        os.close(descriptor)
        return refusal

    def introduce(self, packet: bytes, *descriptors: int) -> str | None:
        """Send any greeting. Returns the refusal, or None."""
        socket.send_fds(self.socket, [packet], list(descriptors))
        return refusal_in(self.socket.recv(1000))

    def send(self, slot: int, frame: bytes, payload: bytes) -> None:
        """Send a block through a slot."""
        self.ring.slots[slot][: len(payload)] = payload
        self.socket.send(pack_block(slot, frame))

    def slots_back(self) -> list[int]:
        """Wait for slots that come back; empty if the connection ends instead."""
        return parse_slots(self.ended_with())

    def ended_with(self) -> bytes:
        """Wait for a packet; empty if the connection ends."""
        try:
            return self.socket.recv(1000)
        except ConnectionResetError:  # closed with packets unread
            return b""


class SharedDoor:
    """A decode worker's socket. It answers what the test says, and gives no slot back by itself. Use it in ``with``."""

    def __init__(self) -> None:
        self.name = SharedPlace().new_name()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.settimeout(WAIT_S)
        self.listener.bind(SharedPlace().address(self.name))
        self.listener.listen(8)
        self.connection: socket.socket | None = None
        self.descriptors: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_up()
        self.listener.close()

    def accept(self, answer: bytes | None = b"+") -> socket.socket:
        """Take a sender's greeting and its descriptor."""
        self.connection, _ = self.listener.accept()
        self.connection.settimeout(WAIT_S)
        _, self.descriptors, _, _ = socket.recv_fds(self.connection, 1000, 4)
        if answer is not None:
            self.connection.send(answer)
        return self.connection

    def hang_up(self) -> None:
        """Close the connection and the memory, as the end of the process would."""
        if self.connection is not None:
            self.connection.close()
        self.let_go_of_memory()

    def let_go_of_memory(self) -> None:
        """Close the memory of the last accepted sender."""
        while self.descriptors:
            os.close(self.descriptors.pop())


def open_descriptors() -> set[str]:
    """Open descriptors of the kinds that shared memory uses, by number and target. ZeroMQ opens other kinds at any time."""
    unix = {f"socket:[{line.split()[6]}]" for line in Path("/proc/self/net/unix").read_text().splitlines()[1:]}
    links: set[str] = set()
    for path in Path("/proc/self/fd").iterdir():
        try:
            target = str(path.readlink())
        except FileNotFoundError:  # the descriptor of this listing
            continue
        if target in unix or target.startswith(("/memfd:", "pipe:", "anon_inode:[eventpoll]")):
            links.add(f"{path.name} {target}")
    return links


def num_mapped_rings() -> int:
    """The number of rings that are mapped in this process."""
    return Path("/proc/self/maps").read_text().count("kvrelay-ring")


@contextmanager
def nothing_left() -> Iterator[None]:
    """Check that what is opened in the block is closed at its end, and that no ring stays mapped."""
    gc.collect()  # else garbage of earlier tests could be collected between the two counts
    before, rings = open_descriptors(), num_mapped_rings()
    yield
    assert open_descriptors() == before
    assert num_mapped_rings() == rings
