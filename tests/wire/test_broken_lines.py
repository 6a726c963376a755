"""Data connections that break while both workers live: the sending side hears of it at once, in whatever it does at the moment."""

from __future__ import annotations

import asyncio
import socket as sockets
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import zmq
import zmq.asyncio
from prometheus_client import CollectorRegistry

from kvrelay.wire.block_frames import BlockHeader
from kvrelay.wire.block_sender import BlockSender
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.send_job import SendTicket
from tests.reliability.fleet import Cable

from .rig import WAIT_S, assert_done_soon

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

    def send(self, num_blocks: int = 1, nbytes: int = 100) -> list[SendTicket]:
        payload = memoryview(bytes(nbytes))
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
    prefill = Prefill(context, cable.port, num_sockets)
    tickets = prefill.send()
    await receive(peer)
    cable.cut()
    await prefill.assert_it_ends(tickets)


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
