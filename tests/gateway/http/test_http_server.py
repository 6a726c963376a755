"""The limit on connections, the metrics and log lines of refusals, and a server that ends."""

from __future__ import annotations

import asyncio
import logging
import socket

import pytest
from prometheus_client import CollectorRegistry

from kvrelay.gateway.metrics import GatewayMetrics, Reason, Refusals

from ..http_port import GET, Port, Recorder, all_of, answer, close, error_of, serving, told, until


async def test_one_connection_too_many_is_told_to_come_again() -> None:
    app = Recorder()
    async with serving(app, max_connections=2) as port:
        held = [await port.connect() for _ in range(2)]
        await until(lambda: len(port.server.server_state.connections) == 2)
        refused = await port.talk()  # refused though the client has sent nothing
        assert b"retry-after: 1\r\n" in refused
        error = error_of(refused, 503)
        assert error["code"] == "too_many_connections"
        assert "2 connections, which is its limit" in error["message"]
        assert port.refused() == {"too_many_connections": 1}
        for reader, writer in held:  # earlier connections are served
            writer.write(GET)
            assert b"200 OK" in await answer(reader)
            await close(writer)
        await until(lambda: not port.server.server_state.connections)
        reader, writer = await port.connect()
        writer.write(GET)
        assert b"200 OK" in await answer(reader)
        await close(writer)
    assert len(app.paths) == 3


async def test_probes_and_metrics_are_answered_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise many clients would make Kubernetes restart the gateway. Other requests are refused once their headers came.

    A connection that says nothing has its place for longer than clients here wait, so what is refused at once is not refused late.
    """
    monkeypatch.setattr("kvrelay.gateway.http.protocol._OPERATORS_S", 60.0)
    app = Recorder()
    async with serving(app, max_connections=1) as port:
        reader, writer = await port.connect()
        await until(lambda: len(port.server.server_state.connections) == 1)
        for path in (b"/health/live", b"/metrics"):
            assert b"200 OK" in await port.talk(b"GET " + path + b" HTTP/1.1\r\nhost: a\r\n\r\n")  # and then closed
        assert error_of(await port.talk(GET), 503)["code"] == "too_many_connections"
        assert port.refused() == {"too_many_connections": 1}
        silent = [await port.connect() for _ in range(16)]
        await until(lambda: len(port.server.server_state.connections) == 17)
        error_of(await port.talk(), 503)  # the places for probes are bounded
        for _, one in (*silent, (reader, writer)):
            await close(one)
    assert app.paths == ["/health/live", "/metrics"]


async def test_who_says_nothing_beyond_the_limit_is_refused_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.gateway.http.protocol._OPERATORS_S", 0.05)
    async with serving(Recorder(), max_connections=1) as port:
        _, writer = await port.connect()
        await until(lambda: len(port.server.server_state.connections) == 1)
        assert error_of(await port.talk(), 503)["code"] == "too_many_connections"
        await close(writer)


def test_a_flood_of_refusals_is_a_line_a_second(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    registry = CollectorRegistry()
    refusals = Refusals(GatewayMetrics(registry).refused_connections, lambda: now_s)
    for now_s, client in ((0.0, ("1.2.3.4", 5)), (0.2, None), (0.9, None), (1.1, ("fd00::7", 6)), (2.2, None)):
        refusals.count(Reason.PIPELINE, f"at {now_s}", client)
    assert [record.getMessage() for record in caplog.records] == [
        "ended the connection of 1.2.3.4:5: at 0.0",
        "ended the connection of [fd00::7]:6: at 1.1 (and 2 more since the last such line)",
        "ended the connection of a client: at 2.2",
    ]
    assert caplog.records[0].__dict__["cause"] == "pipeline"
    name = "kvrelay_refused_connections_total"
    assert registry.get_sample_value(name, {"reason": "pipeline"}) == 5
    assert registry.get_sample_value(name, {"reason": "invalid_http"}) == 0  # the sample exists from the start


async def end(port: Port) -> None:
    """Let the server end, and wait until it accepts nobody any more."""
    port.server.should_exit = True
    await until(lambda: not any(one.is_serving() for one in port.server.servers))


@pytest.mark.parametrize("num_bytes", [0, 10])
async def test_a_request_on_its_way_is_answered_by_a_server_that_ends(num_bytes: int) -> None:
    async with serving(Recorder()) as port:
        reader, writer = await port.connect()
        writer.write(GET[:num_bytes])
        await until(lambda: len(port.server.server_state.connections) == 1)
        await end(port)
        writer.write(GET[num_bytes:])
        received = await all_of(reader)
        await close(writer)
    assert received.startswith(b"HTTP/1.1 200 "), received
    assert b"connection: close" in received


async def test_a_client_that_a_server_has_not_accepted_when_it_ends_is_answered() -> None:
    async with serving(Recorder()) as port:
        with socket.create_connection(("127.0.0.1", port.number)) as client:
            client.sendall(GET)  # without a round of the server's loop until it ends
            port.server.should_exit = True
            await port.server.shutdown()
            client.setblocking(False)
            received = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 2**16), 20)
    assert received.startswith(b"HTTP/1.1 200 "), received
    assert b"connection: close" in received


async def test_a_server_that_ends_waits_a_moment_for_the_first_request_of_a_connection_and_not_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvrelay.gateway.http.protocol._LAST_REQUEST_S", 0.05)
    async with serving(Recorder(), header_timeout_s=60.0) as port:
        silent, used = await port.connect(), await port.connect()
        used[1].write(GET)
        await answer(used[0])
        await until(lambda: len(port.server.server_state.connections) == 2)
        await end(port)
        for reader, writer in (used, silent):
            assert await all_of(reader) == b""
            await close(writer)
        assert port.refused() == {}  # nobody did anything wrong


async def test_requests_that_outlast_the_drain_are_a_warning_with_a_way_out(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(Recorder(), drain_s=1) as port:
        tasks = port.server.server_state.tasks
        running = asyncio.create_task(asyncio.Event().wait())
        tasks.add(running)  # type: ignore[arg-type]
        running.add_done_callback(tasks.discard)  # type: ignore[arg-type]
    assert running.cancelled()
    (record,) = told(caplog)
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("gateway: 1 requests outlast the drain and are cut off; a longer --drain-s")
