"""One connection against hostile clients: which requests end it, with which answer, and which reach the application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from kvrelay.gateway.http.protocol import HttpProtocol

from ..http_port import GET, POST, Port, Recorder, all_of, answer, close, error_of, pestered, serving, told, until


async def test_the_parts_of_uvicorn_that_are_built_on_are_there() -> None:
    """HttpProtocol uses private parts of uvicorn. A version of uvicorn without them must fail here, and not under load."""
    for name in ("_start_asgi_task", "_unset_keepalive_if_required", "timeout_keep_alive_handler", "send_400_response"):
        assert callable(getattr(HttpToolsProtocol, name)), name
    config = uvicorn.Config(lambda: None, http="httptools")
    protocol = vars(HttpToolsProtocol(config, ServerState(), {}))
    assert protocol.keys() >= {"connections", "cycle", "flow", "headers", "pipeline", "timeout_keep_alive_task"}
    cycle: Any = RequestResponseCycle
    made = vars(cycle(*[None] * 11))
    assert made.keys() >= {
        "chunked_encoding", "default_headers", "disconnected", "flow", "keep_alive", "message_event", "more_body",
        "response_complete", "response_started", "transport", "waiting_for_100_continue",
    }  # fmt: skip


async def test_a_client_that_ends_its_side_gets_its_answers() -> None:
    """``nc -N`` does so. The last answer ends the connection."""
    async with serving(Recorder()) as port:
        reader, writer = await port.connect()
        writer.write(GET + SECOND)
        writer.write_eof()
        received = await all_of(reader)
        await close(writer)
    assert received.count(b"200 OK") == 2
    assert received.endswith(b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n7\r\n/second\r\n0\r\n\r\n"), (
        received
    )


@pytest.mark.parametrize("closes", [True, False])
async def test_a_client_that_closes_its_socket_is_told_from_one_that_waits(
    closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.gateway.http.protocol._PROBE_S", 0.05)
    app = Recorder()
    app.held.clear()
    async with serving(app) as port:
        reader, writer = await port.connect()
        writer.write(GET)
        await until(lambda: bool(app.paths))
        if closes:
            await close(writer)
            await until(lambda: app.num_disconnects == 1)
            return
        writer.write_eof()
        assert await answer(reader, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        app.held.set()
        assert (await all_of(reader)).startswith(b"HTTP/1.1 200 OK")
        await close(writer)
    assert app.num_disconnects == 0


async def test_with_http_1_0_the_end_of_one_side_ends_the_request() -> None:
    """Nothing may be sent to find out whether the socket is closed. Some proxies close it for a client that left."""
    app = Recorder()
    app.held.clear()
    async with serving(app) as port:
        reader, writer = await port.connect()
        writer.write(GET.replace(b"1.1", b"1.0"))
        await until(lambda: bool(app.paths))
        writer.write_eof()
        assert await all_of(reader) == b""
        await close(writer)
    assert app.num_disconnects == 1


async def test_half_a_request_gets_no_answer() -> None:
    app = Recorder()
    async with serving(app) as port:
        reader, writer = await port.connect()
        writer.write(POST + b"content-length: 5\r\n\r\nab")
        await until(lambda: bool(app.paths))
        writer.write_eof()
        assert await all_of(reader) == b""
        await close(writer)
    assert app.num_disconnects == 1


SECOND = b"GET /second HTTP/1.1\r\nhost: x\r\n\r\n"
LIMIT = 4096


@pytest.fixture
async def app() -> Recorder:
    return Recorder()


@pytest.fixture
async def port(app: Recorder) -> AsyncIterator[Port]:
    async with serving(app, max_header_bytes=LIMIT) as running:
        yield running


def headers_of(num_bytes: int) -> bytes:
    """A request whose path and headers have ``num_bytes`` bytes, as the limit counts them."""
    head = b"GET /first HTTP/1.1\r\nhost: x\r\nx: "
    return head + b"a" * (num_bytes - len("/first") - len("host: x\r\n") - len("x: \r\n")) + b"\r\n\r\n"


async def test_headers_of_just_the_limit_are_taken(app: Recorder, port: Port) -> None:
    reader, writer = await port.connect()
    writer.write(headers_of(LIMIT))
    assert (await answer(reader)).startswith(b"HTTP/1.1 200")
    await close(writer)
    assert app.paths == ["/first"]
    assert port.refused() == {}


@pytest.mark.parametrize(
    "request_bytes",
    [
        pytest.param(headers_of(LIMIT + 1), id="one byte too many"),
        pytest.param(b"GET /" + b"a" * LIMIT + b" HTTP/1.1\r\n\r\n", id="a long path"),
        pytest.param(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 257 + b"\r\n", id="257 headers"),
    ],
)
async def test_headers_beyond_the_limit_are_431(app: Recorder, port: Port, request_bytes: bytes) -> None:
    error = error_of(await port.talk(request_bytes), 431)
    assert error["code"] == "headers_too_large"
    assert "limit" in error["message"]
    assert app.paths == []
    assert port.refused() == {"headers_too_large": 1}


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        pytest.param(b"GET / HTTP/1.1\r\nx: ", b"a", id="a header"),
        pytest.param(b"GET /", b"a", id="a path"),
        pytest.param(b"GET / HTTP/1.1\r\n", b"a", id="a header's name"),
        pytest.param(b"", b"\r\n", id="blank lines"),
        pytest.param(POST + b"transfer-encoding: chunked\r\n\r\n5;", b"a", id="what surrounds a chunk"),
        pytest.param(POST + b"transfer-encoding: chunked\r\n\r\n0\r\nx: ", b"a", id="a trailer"),
    ],
)
async def test_what_never_ends_is_cut(app: Recorder, port: Port, begin: bytes, more: bytes) -> None:
    """A client sends a header, path or trailer without end. It gets a 431, although the parser waits for a line end."""
    reader, writer = await port.connect()
    writer.write(begin)
    error_of(await pestered(reader, writer, more * 500), 431)
    assert port.refused() == {"headers_too_large": 1}
    assert app.bodies == []


async def test_trailers_are_nobodys_headers(app: Recorder, port: Port) -> None:
    chunked = POST + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nauthorization: Bearer x\r\n\r\n"
    await port.talk(chunked + b"GET /second HTTP/1.1\r\nconnection: close\r\n\r\n")
    assert app.bodies == [b"a", b""]
    assert b"authorization" not in app.headers[0]


async def test_a_body_in_tiny_pieces_is_a_body(app: Recorder, port: Port) -> None:
    body = b"".join(b"1\r\n%c\r\n" % (97 + index % 26) for index in range(50_000))
    head = POST + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    assert b"200 OK" in await port.talk(
        head, *(body[start : start + 1000] for start in range(0, len(body), 1000)), b"0\r\n\r\n"
    )
    assert len(app.bodies[0]) == 50_000
    assert app.bodies[0].startswith(b"abcdefg")


async def test_a_request_that_begins_during_an_answer_has_its_own_time(app: Recorder, port: Port) -> None:
    """Half of a second request arrives before the first answer ends. The connection then has no keep-alive timer."""
    app.held.clear()
    reader, writer = await port.connect()
    writer.write(GET + SECOND[:20])
    await until(lambda: app.paths == ["/first"])
    app.held.set()
    await answer(reader)
    (connection,) = port.server.server_state.connections
    assert isinstance(connection, HttpProtocol)
    assert connection.timeout_keep_alive_task is None
    writer.write(SECOND[20:])
    await answer(reader)
    assert connection.timeout_keep_alive_task is not None
    await close(writer)
    assert app.paths == ["/first", "/second"]
    assert port.refused() == {}


async def test_requests_sent_ahead_are_answered_in_order(app: Recorder, port: Port) -> None:
    reader, writer = await port.connect()
    writer.write(b"".join(b"GET /%d HTTP/1.1\r\n\r\n" % index for index in range(17)))
    for index in range(17):
        assert b"\r\n/%d\r\n" % index in await answer(reader)
    await close(writer)
    assert port.refused() == {}


async def test_too_many_requests_sent_ahead_end_all_of_them(app: Recorder, port: Port) -> None:
    """The connection ends without an answer, which the client would take for that to the first request."""
    app.held.clear()
    assert await port.talk(GET * 18) == b""
    await until(lambda: app.num_disconnects == 1)
    assert app.paths == ["/first"]
    assert port.refused() == {"pipeline": 1}


async def test_a_client_that_leaves_ends_the_request_that_runs_before_others(app: Recorder, port: Port) -> None:
    app.held.clear()
    _, writer = await port.connect()
    writer.write(GET + SECOND)
    await until(lambda: app.paths == ["/first"])
    await close(writer)
    await until(lambda: app.num_disconnects == 1)
    await until(lambda: not port.server.server_state.tasks)
    assert app.paths == ["/first"]


async def test_garbage_behind_a_request_is_no_answer_to_it(app: Recorder, port: Port) -> None:
    app.held.clear()
    assert await port.talk(GET, b"\x00\x01\x02") == b""
    await until(lambda: app.num_disconnects == len(app.paths))
    assert port.refused() == {"invalid_http": 1}


CHUNKS = b"5\r\nhello\r\n0\r\n\r\n"
AMBIGUOUS = {
    "length and chunks": b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n" + CHUNKS,
    "two lengths": b"content-length: 5\r\ncontent-length: 50\r\n\r\nhello",
    "a length that wraps": b"content-length: 18446744073709551621\r\n\r\nhello",
    "an unknown encoding": b"transfer-encoding: xchunked\r\n\r\n" + CHUNKS,
    "chunked and then something": b"transfer-encoding: chunked, identity\r\n\r\n" + CHUNKS,
    "a space before the colon": b"transfer-encoding : chunked\r\n\r\n" + CHUNKS,
    "a folded header": b"x: a\r\n transfer-encoding: chunked\r\n\r\n" + CHUNKS,
    "no CR": b"transfer-encoding: chunked\n\n" + CHUNKS,
    "a chunk's size that wraps": b"transfer-encoding: chunked\r\n\r\n10000000000000005\r\nhello\r\n0\r\n\r\n",
    "a chunk that is longer": b"transfer-encoding: chunked\r\n\r\n4\r\nhello\r\n0\r\n\r\n",
    "NUL": b"x: a\0b\r\n\r\n",
}


@pytest.mark.parametrize("name", AMBIGUOUS)
async def test_what_can_be_read_in_two_ways_is_read_in_none(app: Recorder, port: Port, name: str) -> None:
    """A request's end is ambiguous (request smuggling). It gets a 400, and the bytes after it are not served as a request."""
    error = error_of(await port.talk(POST + AMBIGUOUS[name] + SECOND), 400)
    assert error["code"] == "invalid_http"
    await until(lambda: app.num_disconnects == len(app.paths))
    assert app.bodies == []
    assert "/second" not in app.paths
    assert port.refused() == {"invalid_http": 1}


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"CONNECT example.com:443 HTTP/1.1\r\n\r\n",
    ],
)
async def test_garbage_is_400_and_no_traceback(
    app: Recorder, port: Port, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        error_of(await port.talk(sent), 400)
    assert app.paths == []
    assert port.refused() == {"invalid_http": 3}
    (record,) = told(caplog)  # at most one line a second
    assert record.exc_info is None
    assert "not HTTP/1.1" in record.getMessage()


@pytest.mark.parametrize("wanted", [b"websocket", b"h2c"])
async def test_nothing_is_upgraded(app: Recorder, port: Port, wanted: bytes, caplog: pytest.LogCaptureFixture) -> None:
    reader, writer = await port.connect()
    head = b"GET /first HTTP/1.1\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\nsec-websocket-key: eA==\r\nupgrade: "
    writer.write(head + wanted + b"\r\n\r\n")
    assert (await answer(reader)).startswith(b"HTTP/1.1 200 OK")
    await close(writer)
    assert told(caplog) == []
