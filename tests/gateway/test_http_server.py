"""How many connections there may be, and what becomes of one more; refusals in metrics and log."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.refusals import Reason, Refusals

from .http_port import GET, Recorder, all_of, answer, close, error_of, serving, until


async def test_one_connection_too_many_is_told_to_come_again() -> None:
    app = Recorder()
    async with serving(app, max_connections=2) as port:
        held = [await port.connect() for _ in range(2)]
        await until(lambda: len(port.server.server_state.connections) == 2)
        refused = await port.talk()  # before it has said anything
        assert b"retry-after: 1\r\n" in refused
        error = error_of(refused, 503)
        assert error["code"] == "too_many_connections"
        assert "2 connections, which is its limit" in error["message"]
        assert port.refused() == {"too_many_connections": 1}
        for reader, writer in held:  # who was there first is served
            writer.write(GET)
            assert b"200 OK" in await answer(reader)
            await close(writer)
        await until(lambda: not port.server.server_state.connections)
        reader, writer = await port.connect()
        writer.write(GET)
        assert b"200 OK" in await answer(reader)
        await close(writer)
    assert len(app.paths) == 3


async def test_many_connections_that_say_nothing_hinder_nobody() -> None:
    async with serving(Recorder(), max_connections=1000) as port:
        silent = [await port.connect() for _ in range(200)]
        reader, writer = await port.connect()
        writer.write(GET)
        assert b"200 OK" in await answer(reader)
        for _, one in [*silent, (reader, writer)]:
            await close(one)
        await until(lambda: not port.server.server_state.connections)


@pytest.mark.parametrize("num_turns", range(5))
async def test_a_connection_that_is_just_being_made_does_not_hold_up_the_end(num_turns: int) -> None:
    """``num_turns``: of the loop, from its being accepted to the end."""
    async with serving(Recorder()) as port, asyncio.timeout(20):
        with socket.create_connection(("127.0.0.1", port.number)):
            while not port.server._opening:
                await asyncio.sleep(0)
            for _ in range(num_turns):
                await asyncio.sleep(0)
            await port.server.shutdown()
            assert not port.server.server_state.connections


async def test_nobody_waits_for_a_connection_that_was_given_up_when_its_handshake_was_just_over() -> None:
    async with serving(Recorder()) as port:
        server, connection = port.server, socket.socket()
        protocol = server._protocol()
        server.server_state.connections.add(
            protocol
        )  # as its connection_made does; whether the loop says that it ends depends
        opening = asyncio.create_task(asyncio.Event().wait())
        opening.add_done_callback(lambda task: server._opened(protocol, connection, task))  # type: ignore[arg-type]
        opening.cancel()
        await until(lambda: connection.fileno() == -1)
        assert protocol not in server.server_state.connections


class FullTable:
    """A listener whose process has no descriptor left, once."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.is_full = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)

    def accept(self) -> Any:
        if self.is_full:
            self.is_full = False
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listener.accept()


async def test_without_descriptors_it_waits_and_goes_on() -> None:
    async with serving(Recorder()) as port:
        server = port.server
        (listener,) = server._listeners
        full: Any = FullTable(listener)
        asyncio.get_running_loop().remove_reader(listener)
        server._listeners = (full,)
        server._watch(full)
        reader, writer = await port.connect()
        await until(lambda: port.refused() == {"too_many_connections": 1})
        writer.write(GET)
        assert b"200 OK" in await answer(reader)
        await close(writer)


def test_a_flood_of_refusals_is_a_line_a_second(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    registry = CollectorRegistry()
    refusals = Refusals(GatewayMetrics(registry).refused_connections, lambda: now_s)
    for now_s in (0.0, 0.2, 0.9, 1.1):
        refusals.count(Reason.PIPELINE, f"at {now_s}", "1.2.3.4")
    assert [record.getMessage() for record in caplog.records] == [
        "ended the connection of 1.2.3.4: at 0.0",
        "ended the connection of 1.2.3.4: at 1.1 (and 2 more since the last such line)",
    ]
    assert caplog.records[0].__dict__["cause"] == "pipeline"
    name = "kvrelay_refused_connections_total"
    assert registry.get_sample_value(name, {"reason": "pipeline"}) == 4
    assert registry.get_sample_value(name, {"reason": "tls_handshake"}) == 0  # is there from the start


async def test_a_server_stops_before_a_connection_was_even_looked_at() -> None:
    """Accepted, and its task cancelled before it began: no socket is left to the garbage collector."""
    async with serving(Recorder()) as port:
        server = port.server
        (listener,) = server._listeners
        asyncio.get_running_loop().remove_reader(listener)
        reader, writer = await port.connect()
        server._accept(listener)
        (task,) = server._opening
        task.cancel()
        await until(lambda: not server._connections)
        assert await all_of(reader) == b""
        await close(writer)
