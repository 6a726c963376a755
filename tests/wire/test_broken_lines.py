"""Data connections that break while both workers live: the sending side hears of it at once, in whatever it does at the moment."""

from __future__ import annotations

import asyncio
import socket as sockets
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import zmq
import zmq.asyncio
from prometheus_client import CollectorRegistry

from kvrelay.common.late_bytes import LateBytes
from kvrelay.wire.block_frames import BlockHeader
from kvrelay.wire.block_sender import BlockSender
from kvrelay.wire.data_plane import TcpLine
from kvrelay.wire.errors import PeerLostError
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.send_job import SendTicket, Wakeup
from tests.reliability.fleet import Cable

from .lease_bench import WAIT_S
from .rig import assert_done_soon
from .shared_peer import open_descriptors

BIG_NBYTES = 2**20


class Prefill:
    """A sender, and whether it said that it has ended."""

    def __init__(self, context: Any, port: int, num_sockets: int = 1) -> None:
        self.has_told = threading.Event()
        self.sender = BlockSender(
            f"tcp://127.0.0.1:{port}",
            metrics=WireMetrics(CollectorRegistry()),
            context=context,
            num_sockets=num_sockets,
            on_end=self.has_told.set,
        )

    def send(
        self, num_blocks: int = 1, nbytes: int = 100, payload: memoryview | LateBytes | None = None
    ) -> list[SendTicket]:
        payload = payload or memoryview(bytes(nbytes))
        return [self.sender.send(BlockHeader(1, 1, i, nbytes, b"h" * 16), payload) for i in range(num_blocks)]

    async def assert_it_ends(self, tickets: list[SendTicket]) -> None:
        """Soon, and holds no block."""
        assert await asyncio.to_thread(self.has_told.wait, WAIT_S), "it does not notice"
        assert not self.sender.is_alive
        for ticket in tickets:
            await asyncio.to_thread(assert_done_soon, ticket)
        self.sender.close()


@pytest.fixture
async def peer(context: Any) -> AsyncIterator[zmq.Socket[bytes]]:
    with context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        socket.rcvhwm = 1
        socket.rcvbuf = 2**16
        yield socket


@pytest.fixture
async def cable(peer: zmq.Socket[bytes]) -> AsyncIterator[Cable]:
    """What lies between the sender and ``peer``."""
    cable = Cable(peer.bind_to_random_port("tcp://127.0.0.1"))
    await cable.start()
    yield cable
    await cable.stop()


async def receive(peer: zmq.Socket[bytes]) -> None:
    assert await asyncio.to_thread(peer.poll, WAIT_S * 1000), "no block comes"
    peer.recv_multipart()


async def connected(
    context: Any, peer: zmq.Socket[bytes], cable: Cable, num_sockets: int
) -> tuple[Prefill, list[SendTicket]]:
    """A sender of which a block has come."""
    prefill = Prefill(context, cable.port, num_sockets)
    tickets = prefill.send()
    await receive(peer)
    return prefill, tickets


async def test_a_break_is_noticed_while_blocks_wait_for_room(
    context: Any, peer: Any, cable: Cable, num_sockets: int
) -> None:
    prefill = Prefill(context, cable.port, num_sockets)
    tickets = prefill.send(100, BIG_NBYTES)
    await receive(peer)
    assert not all(ticket.is_done for ticket in tickets)
    cable.cut()
    await prefill.assert_it_ends(tickets)


async def test_a_break_is_noticed_while_nothing_is_to_be_sent(
    context: Any, peer: Any, cable: Cable, num_sockets: int
) -> None:
    """What ZeroMQ had taken may be lost, and nothing that follows would find out."""
    prefill, tickets = await connected(context, peer, cable, num_sockets)
    cable.cut()
    await prefill.assert_it_ends(tickets)


class Never:
    """Bytes that do not come. Implements LateBytes."""

    nbytes = 100
    is_scarce = False

    def __init__(self) -> None:
        self.is_awaited = threading.Event()
        self._comes = threading.Event()

    def wait(self, reader: object, timeout_s: float) -> None:
        self.is_awaited.set()
        self._comes.wait(timeout_s)


async def test_a_break_is_noticed_while_a_block_s_bytes_are_waited_for(
    context: Any, peer: Any, cable: Cable, num_sockets: int
) -> None:
    prefill, tickets = await connected(context, peer, cable, num_sockets)
    late = Never()
    tickets += prefill.send(payload=late)
    assert await asyncio.to_thread(late.is_awaited.wait, WAIT_S)
    cable.cut()
    await prefill.assert_it_ends(tickets)


async def test_a_break_is_noticed_by_a_line_that_never_waits(context: Any, peer: Any, cable: Cable) -> None:
    wakeup = Wakeup()
    line = TcpLine(
        f"tcp://127.0.0.1:{cable.port}", metrics=WireMetrics(CollectorRegistry()), context=context, wakeup=wakeup
    )

    def ask_until(condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not condition() and time.monotonic() < deadline_s:
            assert line.has_room()

    await asyncio.to_thread(ask_until, lambda: line._is_up)
    cable.cut()
    with pytest.raises(PeerLostError, match="broke"):
        await asyncio.to_thread(ask_until, lambda: False)
    line.close()
    wakeup.close()


def test_a_sender_that_cannot_begin_leaves_nothing_open(context: Any) -> None:
    before = open_descriptors()
    with pytest.raises(zmq.ZMQError):
        BlockSender("nowhere", metrics=WireMetrics(CollectorRegistry()), context=context)
    assert open_descriptors() == before


async def test_a_connection_that_ends_in_its_handshake_is_tried_again(context: Any, num_sockets: int) -> None:
    """As that to a port which nobody listens on yet, behind a load balancer: no block was lost with it."""
    with sockets.create_server(("127.0.0.1", 0)) as door:
        prefill = Prefill(context, door.getsockname()[1], num_sockets)
        (ticket,) = prefill.send()
        door.settimeout(WAIT_S)
        for greeting in (b"", b"\xff"):
            connection, _ = await asyncio.to_thread(door.accept)
            connection.send(greeting)
            connection.close()
        connection, _ = await asyncio.to_thread(door.accept)  # the sender has seen the others end
        with connection, context.socket(zmq.ROUTER) as peer:
            peer.linger = 0
            onward = sockets.create_connection(("127.0.0.1", peer.bind_to_random_port("tcp://127.0.0.1")))
            with onward:
                pumps = [
                    threading.Thread(target=pump, args=ends) for ends in ((connection, onward), (onward, connection))
                ]
                for thread in pumps:
                    thread.start()
                await receive(peer)
                await asyncio.to_thread(assert_done_soon, ticket)
                assert prefill.sender.is_alive
                prefill.sender.close()
                for thread in pumps:
                    await asyncio.to_thread(thread.join, WAIT_S)
        assert not prefill.has_told.is_set(), "closing is no break"


def pump(source: sockets.socket, target: sockets.socket) -> None:
    """Until ``source`` ends."""
    while data := source.recv(2**16):
        target.sendall(data)
    target.shutdown(sockets.SHUT_RDWR)
