"""Server-sent events as bytes, and streams of them, by ASGI and past it, also to slow clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from itertools import repeat
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrelay.gateway.errors import ClientBehindError
from kvrelay.gateway.http.edge import Edge
from kvrelay.gateway.http.sse import EXTENSION, ChunkTemplate, EventStream, Exchange, GatheredWrites, sse
from kvrelay.gateway.metrics import GatewayMetrics

from ..http_port import GET, Connection, close, serving

Produce = Callable[[EventStream], Awaitable[bytes]]

HEAD: dict[str, Any] = {"id": "cmpl-1", "created": 17, "model": 'a "quoted" \u2028 née', "system_fingerprint": None}


@pytest.mark.parametrize("text", ["", "plain", 'é 🏃 "\\', "line ends: \x85\u2028\u2029\r\n"])
def test_a_template_writes_what_the_whole_body_would_be(text: str) -> None:
    choices = [{"index": 0, "text": text, "finish_reason": None}]
    event = ChunkTemplate(HEAD, "choices").event(choices)
    assert event == sse({**HEAD, "choices": choices})
    data = event.decode().removeprefix("data: ").removesuffix("\n\n")
    assert data.splitlines() == [data]
    assert json.loads(data) == {**HEAD, "choices": choices}


def behind_edge(app: ASGIApp) -> Edge:
    return Edge(app, (), 1000, 60.0, GatewayMetrics(CollectorRegistry()))


async def stream_to(produce: Produce, send: Send, exchange: Exchange | None = None) -> None:
    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    extensions = {} if exchange is None else {EXTENSION: exchange}
    scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "extensions": extensions}
    await behind_edge(EventStream(produce, lambda error: error.code.encode()))(scope, receive, send)


# -- by ASGI -------------------------------------------------------------------------------------------------------


async def test_a_stream_that_cannot_be_sent_fails() -> None:
    async def produce(stream: EventStream) -> bytes:
        stream.write(b"never")
        return b""

    async def send(_: Message) -> None:
        raise OSError("the connection is gone")

    with pytest.raises(OSError, match="gone"):
        await stream_to(produce, send)


async def test_what_a_client_cannot_take_waits_in_order_and_holds_nobody_up() -> None:
    sent: list[bytes] = []
    takes, was_written = asyncio.Event(), asyncio.Event()

    async def produce(stream: EventStream) -> bytes:
        for event in (b"1", b"", b"2"):
            stream.write(event)
        await takes.wait()
        await asyncio.sleep(0)
        stream.write(b"3")
        was_written.set()
        return b"end"

    async def send(message: Message) -> None:
        await takes.wait()
        sent.append(message.get("body", b"head"))

    task = asyncio.create_task(stream_to(produce, send))
    await asyncio.sleep(0)
    assert not sent
    takes.set()
    await was_written.wait()
    await task
    assert b"".join(sent) == b"head123end"


async def test_what_the_client_has_taken_does_not_count_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only bytes that still wait count against the limit. Otherwise any long answer to a slow client would end."""
    monkeypatch.setattr("kvrelay.gateway.http.sse.MAX_WAITING_BYTES", len(b"event"))
    sent: list[bytes] = []

    async def produce(stream: EventStream) -> bytes:
        for _ in range(3):
            stream.write(b"event")
            while not sent or sent[-1] != b"event":
                await asyncio.sleep(0)
            sent.append(b"-")
        return b"end"

    async def send(message: Message) -> None:
        sent.append(message.get("body", b"head"))

    await stream_to(produce, send)
    assert b"".join(sent) == b"headevent-event-event-end"


async def test_a_stream_that_is_cut_off_ends_with_its_last_words() -> None:
    """A stream is cancelled before the client has taken the head. The client still gets the events and the error."""
    sent: list[bytes] = []
    is_held = asyncio.Event()
    begun = asyncio.Event()

    async def produce(stream: EventStream) -> bytes:
        stream.write(b"1")
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        if not is_held.is_set():
            is_held.set()
            await asyncio.Event().wait()
        sent.append(message.get("body", b"head"))

    task = asyncio.create_task(stream_to(produce, send))
    await begun.wait()
    await is_held.wait()
    task.cancel()
    await task
    assert sent == [b"head", b"1", b"shutting_down"]


# -- past ASGI -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
async def test_what_was_written_arrives_in_front_of_what_ends_the_stream(fails: bool) -> None:
    log: list[tuple[str, bytes]] = []
    connection: Any = Connection("0", log)

    async def produce(stream: EventStream) -> bytes:
        stream.write(b"first")
        stream.write(b"second")
        if fails:
            raise ValueError("a fault")
        return b"last"

    async def send(message: Message) -> None:
        connection.write(message["body"])

    await stream_to(produce, send, Exchange(connection, GatheredWrites()))
    written = b"".join(data for _, data in log)
    assert written.endswith(b"5\r\nfirst\r\n6\r\nsecond\r\n" + (b"" if fails else b"last"))


def answering(produces: Iterator[Produce]) -> Edge:
    """An application that answers each request with the next stream."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        await EventStream(next(produces), lambda error: b"")(scope, receive, send)

    return behind_edge(app)


async def two_events(stream: EventStream) -> bytes:
    for event in (b"one", b"", b"two"):
        stream.write(event)
        await asyncio.sleep(0)
    return b"last"


CHUNKS = b"3\r\none\r\n3\r\ntwo\r\n4\r\nlast\r\n0\r\n\r\n"


@pytest.mark.parametrize("closes", [False, True])
async def test_a_stream_is_one_answer_in_chunks(closes: bool) -> None:
    request = GET[:-2] + b"x-request-id: r1\r\n" + (b"connection: close\r\n\r\n" if closes else b"\r\n")
    async with serving(answering(repeat(two_events))) as port:
        reader, writer = await port.connect()
        for _ in range(1 if closes else 2):  # without "close" the connection is used again
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
    events = [b"%07d" % number * 100 for number in range(20_000)]  # 14 MB: more than a kernel's buffers
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

    async with serving(answering(iter((long, two_events)))) as port:
        with port.deaf() as client:
            await is_written.wait()  # while the client reads nothing
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
