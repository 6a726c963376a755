"""Clients that are slow to send a request or to read its answer. They are disconnected after a time, unless they make progress."""

from __future__ import annotations

import asyncio
import time
from unittest.mock import Mock

import pytest
import uvicorn
from prometheus_client import CollectorRegistry
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from kvrelay.gateway.http.protocol import HttpProtocol
from kvrelay.gateway.http.sse import GatheredWrites
from kvrelay.gateway.metrics import GatewayMetrics, Refusals
from kvrelay.gateway.settings import HttpLimits

from ..http_port import GET, Recorder, Talker, all_of, answer, close, error_of, pestered, serving, until


@pytest.fixture
async def app() -> Recorder:
    return Recorder()


@pytest.mark.parametrize("sent", [b"GET / HTT", b"POST / HTTP/1.1\r\nhost: x\r\ncontent-le", b"\r\n\r\n"])
async def test_half_a_request_is_408(app: Recorder, sent: bytes) -> None:
    async with serving(app, header_timeout_s=0.5) as port:
        error = error_of(await port.talk(sent), 408)
        assert error["code"] == "request_too_slow"
        assert "0.5 s" in error["message"]
        assert port.refused() == {"header_timeout": 1}
    assert app.paths == []


async def test_who_says_nothing_hears_nothing(app: Recorder) -> None:
    async with serving(app, header_timeout_s=0.1) as port:
        assert await port.talk() == b""
        assert port.refused() == {"header_timeout": 1}


async def test_a_byte_now_and_then_buys_no_time(app: Recorder) -> None:
    """Slowloris: a client sends headers slowly. The time runs from the request's beginning, on new and used connections."""
    async with serving(app, header_timeout_s=0.5) as port:
        for before in (b"", GET):
            reader, writer = await port.connect()
            writer.write(before)
            if before:
                await answer(reader)
            writer.write(b"GET / HTTP/1.1\r\n")
            error_of(await pestered(reader, writer, b"a: b\r\n"), 408)
        assert port.refused() == {"header_timeout": 2}


async def test_an_idle_connection_is_kept_for_so_long(app: Recorder) -> None:
    loop = asyncio.get_running_loop()
    async with serving(app, keep_alive_s=0.3) as port:
        reader, writer = await port.connect()
        asked_s = loop.time()  # and not the end of the answer, which a client may notice late
        writer.write(GET)
        await answer(reader)
        assert await all_of(reader) == b""
        assert loop.time() - asked_s >= 0.25
        await close(writer)


async def test_blank_lines_keep_no_idle_connection_open(app: Recorder) -> None:
    async with serving(app, header_timeout_s=0.2) as port:
        reader, writer = await port.connect()
        writer.write(GET)
        await answer(reader)
        error_of(await pestered(reader, writer, b"\r\n"), 408)
        assert port.refused() == {"header_timeout": 1}


async def test_who_reads_nothing_of_an_answer_is_disconnected() -> None:
    app = Talker()
    async with serving(app, client_timeout_s=0.3, send_buffer_bytes=4096) as port:
        with port.deaf():
            await until(lambda: app.num_disconnects == 1)
            await until(lambda: not port.server.server_state.connections)
        assert port.refused() == {"client_reads_nothing": 1}


class Whole:
    """An application that writes its answer at once, and ends the connection."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body", "body": b"x" * 60_000, "more_body": False})


async def test_a_closed_connection_waits_no_longer_for_its_client() -> None:
    """The answer is complete, and too short to pause writing. The connection is still closed when its client reads nothing."""
    async with serving(Whole(), client_timeout_s=0.3, send_buffer_bytes=4096) as port:
        with port.deaf():
            await until(lambda: port.refused() == {"client_reads_nothing": 1})
            await until(lambda: not port.server.server_state.connections)


async def test_a_slow_reader_is_no_deaf_one() -> None:
    """A client may stay that reads, in each period, the bytes between the buffer's two marks. With one byte less it is cut off."""
    loop, transport = Mock(), Mock()
    transport.get_extra_info.return_value = None
    transport.is_closing.return_value = False
    refusals = Refusals(GatewayMetrics(CollectorRegistry()).refused_connections, time.monotonic)
    config = uvicorn.Config(Recorder())  # type: ignore[arg-type]
    limits, writes = HttpLimits(), GatheredWrites()
    protocol = HttpProtocol(
        config, ServerState(), {}, loop, limits=limits, refusals=refusals, writes=writes, is_ending=lambda: False
    )
    protocol.connection_made(transport)
    marks = transport.set_write_buffer_limits.call_args.kwargs
    step = marks["high"] - marks["low"]

    def passes(num_taken: int) -> None:
        """A period passes, in which the client reads ``num_taken`` bytes."""
        delay_s, callback, *arguments = loop.call_later.call_args.args
        assert delay_s == HttpLimits().client_timeout_s
        transport.get_write_buffer_size.return_value -= num_taken
        callback(*arguments)

    transport.get_write_buffer_size.return_value = 10 * step
    protocol.pause_writing()
    for _ in range(5):
        passes(step)
    loop.call_later.return_value.cancel.reset_mock()
    protocol.resume_writing()
    loop.call_later.return_value.cancel.assert_called_once_with()
    protocol.pause_writing()
    transport.abort.assert_not_called()
    passes(step - 1)
    transport.abort.assert_called_once_with()
