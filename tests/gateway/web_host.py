"""A host of images for tests: an HTTP server in this process that writes what a test tells it to, byte by byte if need be."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import pytest

from kvrelay.gateway.chat import image_fetch

FETCH_S = 100.0  # of fetches with ``Deadlines``

Serve = Callable[[asyncio.StreamWriter], Awaitable[None]]
"""Writes an answer. Cancelled when the client leaves."""


class WebHost:
    """What it serves by path (without the query), and what it was asked."""

    def __init__(self) -> None:
        self.files: dict[str, bytes | Serve] = {}
        self.heads: list[str] = []  # of all requests
        self.is_asked = asyncio.Event()
        self.left = asyncio.Event()  # a client has left before its answer was complete
        self.num_open = self.most_open = 0  # requests at a time
        self.port = 0
        self.scheme = "http"

    @property
    def entry(self) -> str:
        """It in ``--image-hosts``."""
        return f"{self.scheme}://localhost:{self.port}"

    def url(self, path: str, host: str = "localhost") -> str:
        return f"{self.scheme}://{host}:{self.port}{path}"

    @property
    def lines(self) -> list[str]:
        """The first lines of all requests."""
        return [head.partition("\r\n")[0] for head in self.heads]

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                self.is_asked.set()
                self.num_open += 1
                self.most_open = max(self.most_open, self.num_open)
                try:
                    await self._answer(head.split()[1].partition("?")[0], reader, writer)
                finally:
                    self.num_open -= 1
        writer.close()

    async def _answer(self, path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served = self.files.get(path, answer(404))
        serving = asyncio.ensure_future((served if callable(served) else answer(200, served))(writer))
        leaving = asyncio.ensure_future(reader.read(1))
        await asyncio.wait([serving, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            self.left.set()
        for task in (serving, leaving):
            task.cancel()
        await asyncio.gather(serving, leaving, return_exceptions=True)


def answer(status: int, body: bytes = b"", *headers: str) -> Serve:
    """An answer as a whole."""

    async def serve(writer: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {status} Told", f"Content-Length: {len(body)}", *headers]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)

    return serve


def beginning(*headers: str, body: bytes = b"") -> Serve:
    """The beginning of an answer that never ends."""

    async def serve(writer: asyncio.StreamWriter) -> None:
        writer.write("\r\n".join(["HTTP/1.1 200 Told", *headers, "", ""]).encode() + body)
        await asyncio.Event().wait()

    return serve


def redirect(location: str, status: int = 302) -> Serve:
    return answer(status, b"elsewhere", f"Location: {location}")


async def silence(_: asyncio.StreamWriter) -> None:
    """No answer at all."""
    await asyncio.Event().wait()


async def endless(writer: asyncio.StreamWriter) -> None:
    """A file without an end, and without a length."""
    writer.write(b"HTTP/1.1 200 Told\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"1000\r\n" + bytes(0x1000) + b"\r\n")
        await writer.drain()


class Deadlines:
    """The deadlines of fetches. One passes only for a host that ``is_late``. On a machine that stops for a moment, a short one
    would pass before the host is asked.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._begun: list[asyncio.Timeout] = []
        monkeypatch.setattr(image_fetch, "FETCH_S", FETCH_S)
        monkeypatch.setattr(image_fetch, "asyncio", SimpleNamespace(**{**vars(asyncio), "timeout_at": self._begin}))

    def _begin(self, at_s: float | None) -> asyncio.Timeout:
        assert at_s is not None
        assert 0.5 * FETCH_S < at_s - asyncio.get_running_loop().time() <= FETCH_S
        self._begun.append(asyncio.timeout(None))
        return self._begun[-1]

    def is_late(self, served: Serve) -> Serve:
        """Serves so, and lets the deadline of the fetch that began last pass soon afterwards."""

        async def serve(writer: asyncio.StreamWriter) -> None:
            self._begun[-1].reschedule(asyncio.get_running_loop().time() + 0.1)
            await served(writer)

        return serve


@asynccontextmanager
async def web_host(tls: ssl.SSLContext | None = None) -> AsyncIterator[WebHost]:
    """A host that listens on this machine."""
    host = WebHost()
    talks: set[asyncio.Task[None]] = set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        talks.add(task)
        try:
            await host.talk(reader, writer)
        except asyncio.CancelledError:  # the test is over
            writer.transport.abort()
        finally:
            talks.discard(task)

    server = await asyncio.start_server(talk, "127.0.0.1", 0, ssl=tls)
    host.port = server.sockets[0].getsockname()[1]
    host.scheme = "http" if tls is None else "https"
    try:
        yield host
    finally:
        server.close()
        for task in list(talks):
            task.cancel()
        await asyncio.gather(*talks, return_exceptions=True)
        await server.wait_closed()
