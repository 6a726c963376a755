"""Streams on a real connection, past ASGI's send: what arrives is the same answer, also for clients that are slow."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest
from starlette.types import Receive, Scope, Send

from kvrelay.gateway.errors import ClientBehindError
from kvrelay.gateway.http_protocol import EXTENSION, Exchange
from kvrelay.gateway.reply import Reply
from kvrelay.gateway.sse import EventStream

from .http_port import GET, close, lifespan, serving

Produce = Callable[[EventStream], Awaitable[bytes]]


class Streamer:
    """An application that answers everything with the events of ``produce``."""

    def __init__(self, produce: Produce) -> None:
        self.produce = produce

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await lifespan(receive, send)
            return
        exchange: Exchange = scope["extensions"][EXTENSION]
        while (await receive()).get("more_body"):
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


async def test_a_slow_reader_gets_all_that_was_kept_and_holds_nobody_up() -> None:
    events = [b"%07d" % number * 100 for number in range(20_000)]  # 14 MB: more than any kernel keeps
    written: list[bytes] = []
    is_written = asyncio.Event()

    async def long(stream: EventStream) -> bytes:
        is_written.set()
        for event in events:
            try:
                stream.write(event)
            except ClientBehindError:
                return b"last"
            written.append(event)
        raise AssertionError("everything was kept")

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
                    body += (data := await loop.sock_recv(client, 2**16))
                    assert data, "the connection ended"
    chunks = bytes(body).partition(b"\r\n\r\n")[2]
    assert _unchunked(chunks) == b"".join(written) + b"last"


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
