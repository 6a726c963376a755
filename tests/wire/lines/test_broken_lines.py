"""Data connections that break while both workers live. The sender notices it at once, whatever it does at that moment."""

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

from kvrelay.wire.blocks.send_job import Wakeup
from kvrelay.wire.errors import PeerLostError
from kvrelay.wire.lines.block_sender import BlockSender
from kvrelay.wire.lines.data_plane import TcpLine
from kvrelay.wire.metrics import WireMetrics
from tests.reliability.fleet import Cable

from ..lease_bench import WAIT_S
from ..sending import NeverThere, Sending, assert_all_done_soon
from ..shared_peer import nothing_left

Make = Callable[..., Sending]
BIG_NBYTES = 2**20


@pytest.fixture
async def cable(peer: zmq.Socket[bytes]) -> AsyncIterator[Cable]:
    """A proxy between the sender and ``peer``, which can cut the connection."""
    cable = Cable(peer.bind_to_random_port("tcp://127.0.0.1"))
    await cable.start()
    yield cable
    await cable.stop()


async def receive(peer: zmq.Socket[bytes]) -> None:
    assert await asyncio.to_thread(peer.poll, WAIT_S * 1000), "no block comes"
    peer.recv_multipart()


@pytest.mark.parametrize("doing", ["waits for room", "has nothing to send", "waits for a block's bytes"])
async def test_a_break_is_noticed(
    sending: Make, peer: Any, cable: Cable, caplog: pytest.LogCaptureFixture, doing: str
) -> None:
    """The connection breaks. The sender ends and releases all blocks, because blocks in ZeroMQ's queue may be lost."""
    prefill = sending(f"tcp://127.0.0.1:{cable.port}")
    tickets = prefill.send(*((100, BIG_NBYTES) if doing == "waits for room" else ()))
    await receive(peer)
    if doing == "waits for room":
        assert not all(ticket.is_done for ticket in tickets)
    elif doing == "waits for a block's bytes":
        late = NeverThere()
        tickets += prefill.send(payload=late)
        assert await asyncio.to_thread(late.is_awaited.wait, WAIT_S)
    cable.cut()
    await asyncio.to_thread(prefill.assert_ends, tickets)
    told = f"KV blocks for tcp://127.0.0.1:{cable.port}: the connection broke; its link will be made anew"
    assert [record.message for record in caplog.records if record.name.startswith("kvrelay.wire.lines")] == [told]


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
    with nothing_left(), pytest.raises(zmq.ZMQError):
        BlockSender("nowhere", metrics=WireMetrics(CollectorRegistry()), context=context)


async def test_a_connection_that_ends_in_its_handshake_is_tried_again(sending: Make, peer: Any) -> None:
    """Two connections end during ZeroMQ's handshake, before a block is sent. The third one carries the block."""
    with sockets.create_server(("127.0.0.1", 0)) as door:
        prefill = sending(f"tcp://127.0.0.1:{door.getsockname()[1]}")
        tickets = prefill.send()
        door.settimeout(WAIT_S)
        for greeting in (b"", b"\xff"):
            connection, _ = await asyncio.to_thread(door.accept)
            connection.send(greeting)
            connection.close()
        connection, _ = await asyncio.to_thread(door.accept)  # the sender has seen the others end
        onward = sockets.create_connection(("127.0.0.1", peer.bind_to_random_port("tcp://127.0.0.1")))
        with connection, onward:
            pumps = [threading.Thread(target=pump, args=ends) for ends in ((connection, onward), (onward, connection))]
            for thread in pumps:
                thread.start()
            await receive(peer)
            await asyncio.to_thread(assert_all_done_soon, tickets)
            assert prefill.sender.is_alive
            prefill.sender.close()
            prefill.sender.join()
            for thread in pumps:
                await asyncio.to_thread(thread.join, WAIT_S)
        assert not prefill.has_told.is_set(), "closing is no break"


def pump(source: sockets.socket, target: sockets.socket) -> None:
    """Copy bytes to ``target`` until ``source`` ends."""
    while data := source.recv(2**16):
        target.sendall(data)
    target.shutdown(sockets.SHUT_RDWR)
