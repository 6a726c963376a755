"""A ZeroMQ socket on the asyncio loop: no message is missed, although its descriptor is edge-triggered."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import zmq

from kvrelay.wire.loop_socket import LoopSocket

WAIT_S = 10.0


class Ear:
    """A handler that keeps a socket's messages."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.changed = asyncio.Event()
        self.error: Exception | None = None

    def __call__(self, frames: list[bytes]) -> None:
        self.heard.append(frames[-1])
        self.changed.set()
        if self.error is not None:
            raise self.error

    async def until(self, num_messages: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(self.heard) < num_messages:
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture
def pair(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    left, right = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    port = left.bind_to_random_port("tcp://127.0.0.1")
    right.connect(f"tcp://127.0.0.1:{port}")
    yield left, right
    for socket in (left, right):
        socket.close(linger=0)


async def test_more_messages_than_one_turn_takes(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    ear = Ear()
    for number in range(1000):
        pair[1].send(b"%d" % number)
    socket = LoopSocket(pair[0], ear)
    socket.start()
    await ear.until(1000)
    assert ear.heard == [b"%d" % number for number in range(1000)]
    socket.close(linger_ms=0)


async def test_a_message_that_came_while_we_sent_is_heard(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    """Sending clears the descriptor's edge. The socket must look again, or an arrived message waits for the next one."""
    ear = Ear()
    socket = LoopSocket(pair[0], ear)
    socket.start()
    for number in range(200):
        pair[1].send(b"%d" % number)
        while not pair[0].poll(1000):  # clears the edge when the message arrives; the loop does not run meanwhile
            pass
        assert socket.send([b"x"])
        await ear.until(number + 1)
    socket.close(linger_ms=0)


async def test_a_message_that_breaks_its_handler_costs_no_other(
    pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    ear = Ear()
    ear.error = ValueError("broken")
    socket = LoopSocket(pair[0], ear)
    socket.start()
    for _ in range(3):
        pair[1].send(b"x")
    await ear.until(3)
    assert socket.is_alive
    assert caplog.text.count("ValueError: broken") == 3
    socket.close(linger_ms=0)


async def test_closed_means_closed(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    """The handler closes the socket at the first of five messages. It gets no other message."""

    class Closing(Ear):
        def __call__(self, frames: list[bytes]) -> None:
            super().__call__(frames)
            socket.close(linger_ms=0)

    ear = Closing()
    for _ in range(5):
        pair[1].send(b"x")
    while not pair[0].poll(1000):
        pass
    socket = LoopSocket(pair[0], ear)
    socket.start()
    await ear.until(1)
    await asyncio.sleep(0)
    assert (len(ear.heard), socket.is_alive, socket.send([b"x"])) == (1, False, False)


async def test_what_nobody_takes_is_not_sent(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket = LoopSocket(router, Ear())
    socket.start()
    assert not socket.send([b"nobody", b"x"])
    socket.close(linger_ms=0)
