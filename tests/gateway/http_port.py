"""The gateway's HTTP server in front of any ASGI application, and clients that write bytes."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest
import uvicorn
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Receive, Scope, Send

from kvrelay.gateway.http.tls import Certificate
from kvrelay.gateway.main import make_http_server
from kvrelay.gateway.metrics import GatewayMetrics, Reason, Refusals
from kvrelay.gateway.settings import HttpLimits

GET = b"GET /first HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST /first HTTP/1.1\r\nhost: x\r\n"  # a test adds the rest


class Recorder:
    """An application that notes each request, and answers with its path once ``held`` is set."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.headers: list[dict[bytes, bytes]] = []
        self.bodies: list[bytes] = []
        self.num_disconnects = 0
        self.held = asyncio.Event()
        self.held.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        else:
            self.num_disconnects += 1
            return
        left = asyncio.ensure_future(receive())
        held = asyncio.ensure_future(self.held.wait())
        await asyncio.wait([left, held], return_when=asyncio.FIRST_COMPLETED)
        has_left = left.done()
        left.cancel()
        held.cancel()
        if has_left:
            self.num_disconnects += 1
            return
        self.bodies.append(body)
        self.headers.append(dict(scope["headers"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["path"].encode(), "more_body": False})


class Talker:
    """An application that answers without end, as fast as it can."""

    def __init__(self) -> None:
        self.num_disconnects = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        talking = asyncio.create_task(self._talk(send))
        while (await receive())["type"] != "http.disconnect":
            pass
        self.num_disconnects += 1
        talking.cancel()

    async def _talk(self, send: Send) -> None:
        while True:
            await send({"type": "http.response.body", "body": b"x" * 1000, "more_body": True})
            await asyncio.sleep(0)


class Flow:
    """Stands in for uvicorn's flow control of writes."""

    write_paused = False


class Connection:
    """Stands in for uvicorn's cycle and its transport. ``log`` holds the writes to all connections."""

    def __init__(self, name: str, log: list[tuple[str, bytes]]) -> None:
        self.name = name
        self.log = log
        self.disconnected = False
        self.closing = False
        self.flow = Flow()
        self.transport = self
        self.response_started = self.waiting_for_100_continue = False
        self.default_headers: list[tuple[bytes, bytes]] = []
        self.keep_alive = True

    def write(self, data: bytes) -> None:
        self.log.append((self.name, data))

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.closing = True


@dataclass
class Port:
    """A server on a port, and its metrics."""

    number: int
    server: uvicorn.Server
    registry: CollectorRegistry

    def refused(self) -> dict[str, float]:
        """The number of refused connections by reason, without zeros."""
        name = "kvrelay_refused_connections_total"
        counts = {reason: self.registry.get_sample_value(name, {"reason": reason}) for reason in Reason}
        return {str(reason): count for reason, count in counts.items() if count}

    async def connect(self, tls: ssl.SSLContext | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect a client."""
        name = "localhost" if tls else None
        return await asyncio.open_connection("127.0.0.1", self.number, ssl=tls, server_hostname=name)

    @contextmanager
    def deaf(self) -> Iterator[socket.socket]:
        """A client that has sent a request and reads nothing; its receive buffer is small."""
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", self.number))
            client.sendall(GET)
            yield client

    async def talk(self, *sent: bytes, tls: ssl.SSLContext | None = None) -> bytes:
        """Send these bytes, and return everything that arrives until the connection ends."""
        reader, writer = await self.connect(tls)
        try:
            with suppress(ConnectionError):  # the server may close while the client still sends
                for data in sent:
                    writer.write(data)
                    await writer.drain()
            return await all_of(reader)
        finally:
            await close(writer)


async def all_of(reader: asyncio.StreamReader) -> bytes:
    """Everything that arrives until the connection ends or is reset."""
    received = b""
    with suppress(ConnectionError):
        while data := await asyncio.wait_for(reader.read(2**16), 20):
            received += data
    return received


async def pestered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, more: bytes) -> bytes:
    """Send ``more`` again and again, and return everything that arrives until the connection ends."""
    end = asyncio.create_task(all_of(reader))
    async with asyncio.timeout(20):
        while not end.done():
            writer.write(more)
            await asyncio.sleep(0.005)  # polls until the server ends the connection
    await close(writer)
    return await end


async def answer(reader: asyncio.StreamReader, end: bytes = b"\r\n0\r\n\r\n") -> bytes:
    """One answer of a connection that stays open: chunked, unless ``end`` is another end."""
    return await asyncio.wait_for(reader.readuntil(end), 20)


async def close(writer: asyncio.StreamWriter) -> None:
    """End a client's connection."""
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


async def until(condition: Callable[[], bool]) -> None:
    """Poll until the condition holds, for 20 seconds at most."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def told(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """The logged warnings and errors. Other tests in the process may change which other lines are logged."""
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


def error_of(answer: bytes, status: int) -> Any:
    """Check that an answer has this status and ends its connection, and return its error."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), answer
    assert b"connection: close" in head
    error = json.loads(body)["error"]
    named = {"request_id"} if b"x-request-id" in head else set()  # bytes that are no request get no id
    assert set(error) == {"message", "type", "param", "code"} | named
    return error


@asynccontextmanager
async def serving(
    app: ASGIApp,
    *,
    certificate: Certificate | None = None,
    send_buffer_bytes: int | None = None,
    drain_s: float = 5,
    **limits: Any,
) -> AsyncIterator[Port]:
    """``app`` on its own port. It needs no lifespan. Afterwards the server is stopped, and no connection or task may be left."""
    registry = CollectorRegistry()
    refusals = Refusals(GatewayMetrics(registry).refused_connections, time.monotonic)
    server = make_http_server(app, HttpLimits(**limits), refusals, certificate=certificate, drain_s=drain_s)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    if send_buffer_bytes is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await until(lambda: server.started or task.done())
        yield Port(listener.getsockname()[1], server, registry)
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, 20)
        assert not server.server_state.connections
        assert not server.server_state.tasks
