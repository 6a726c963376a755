"""Streams on a real connection, past ASGI's send: what arrives is the same answer, also for clients that are slow."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl

from kvrelay.gateway.gathered_writes import GatheredWrites
from kvrelay.gateway.reply import EXTENSION, Exchange, Reply
from kvrelay.gateway.sse import EventStream

from .http_port import GET, POST, close, lifespan, serving, until

Produce = Callable[[EventStream], Awaitable[bytes]]


class Streamer:
    """An application that answers everything with the events of ``produce``."""

    def __init__(self, produce: Produce) -> None:
        self.produce = produce
        self.taken: list[bytes | None] = []  # of each request, what was there when it started

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await lifespan(receive, send)
            return
        exchange: Exchange = scope["extensions"][EXTENSION]
        self.taken.append(exchange.take_body())
        while self.taken[-1] is None and (await receive()).get("more_body"):
            pass
        reply = Reply(send, "r1", exchange)
        await EventStream(self.produce, lambda error: b"")(scope, receive, reply)
        assert reply.status == 200


async def two_events(stream: EventStream) -> bytes:
    for event in (b"one", b"", b"two"):
        stream.write(event)
        await asyncio.sleep(0)
    return b"last"


CHUNKS = b"3\r\none\r\n3\r\ntwo\r\n4\r\nlast\r\n0\r\n\r\n"


@pytest.mark.parametrize("closes", [False, True])
async def test_a_stream_is_one_answer_in_chunks(closes: bool) -> None:
    async with serving(Streamer(two_events)) as port:
        request = GET[:-2] + b"connection: close\r\n\r\n" if closes else GET
        reader, writer = await port.connect()
        for _ in range(1 if closes else 2):  # else the connection can be used again
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.split(b"\r\n")
            assert lines[0] == b"HTTP/1.1 200 OK"
            assert {
                b"x-request-id: r1",
                b"content-type: text/event-stream; charset=utf-8",
                b"transfer-encoding: chunked",
            } <= set(lines)
            assert (b"connection: close" in lines) is closes
            assert await reader.readexactly(len(CHUNKS)) == CHUNKS
        await close(writer)


async def test_it_is_known_whether_a_body_is_still_to_come() -> None:
    app = Streamer(two_events)
    async with serving(app) as port:
        reader, writer = await port.connect()
        writer.write(POST + b"content-length: 2\r\n\r\nab")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert await reader.readexactly(len(CHUNKS)) == CHUNKS
        writer.write(POST + b"content-length: 2\r\n\r\na")
        await until(lambda: len(app.taken) == 2)
        writer.write(b"b")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert app.taken == [b"ab", None]
        await close(writer)


def cycle_with(body: bytes, **others: Any) -> Any:
    """uvicorn's, as far as a body is concerned, reading paused."""
    cycle = SimpleNamespace(
        body=bytearray(body), more_body=False, disconnected=False, waiting_for_100_continue=True,
        message_event=asyncio.Event(), flow=FlowControl(cast(asyncio.Transport, SimpleNamespace(
            pause_reading=lambda: None, resume_reading=lambda: None,
        ))),
    )  # fmt: skip
    cycle.message_event.set()
    cycle.flow.pause_reading()
    vars(cycle).update(others)
    return cycle


async def test_a_body_is_taken_as_if_it_had_been_received() -> None:
    cycle = cycle_with(b"ab")
    assert Exchange(cycle, GatheredWrites()).take_body() == b"ab"
    assert cycle.body == b""
    assert not cycle.message_event.is_set()
    assert not cycle.flow.read_paused
    assert not cycle.waiting_for_100_continue


@pytest.mark.parametrize("why", ["more_body", "disconnected"])
async def test_half_a_body_is_not_taken(why: str) -> None:
    cycle = cycle_with(b"ab", **{why: True})
    assert Exchange(cycle, GatheredWrites()).take_body() is None
    assert (cycle.body, cycle.message_event.is_set(), cycle.flow.read_paused) == (b"ab", True, True)


async def test_a_slow_reader_gets_everything_and_holds_nobody_up() -> None:
    events = [b"%07d" % number * 100 for number in range(20_000)]  # 14 MB: more than any kernel keeps
    is_written = asyncio.Event()

    async def long(stream: EventStream) -> bytes:
        for event in events:
            stream.write(event)
        is_written.set()
        return b"last"

    app = Streamer(long)
    async with serving(app) as port:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", port.number))
            client.sendall(GET)
            await is_written.wait()  # though nothing has been read
            app.produce = two_events
            assert (await port.talk(GET[:-2] + b"connection: close\r\n\r\n")).endswith(CHUNKS)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            body = bytearray()
            async with asyncio.timeout(60):
                while not body.endswith(b"last\r\n0\r\n\r\n"):
                    body += await loop.sock_recv(client, 2**16)
    chunks = bytes(body).partition(b"\r\n\r\n")[2]
    assert _unchunked(chunks) == b"".join(events) + b"last"


def _unchunked(chunks: bytes) -> bytes:
    parts: list[bytes] = []
    place = 0
    while True:
        end = chunks.index(b"\r\n", place)
        size = int(chunks[place:end], 16)
        if size == 0:
            return b"".join(parts)
        parts.append(chunks[end + 2 : end + 2 + size])
        place = end + 4 + size
