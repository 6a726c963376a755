"""The limit on connections, and the metrics and log lines of refusals."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from kvrelay.gateway.metrics import GatewayMetrics, Reason, Refusals

from ..http_port import GET, Recorder, answer, close, error_of, serving, until


async def test_one_connection_too_many_is_told_to_come_again() -> None:
    app = Recorder()
    async with serving(app, max_connections=2) as port:
        held = [await port.connect() for _ in range(2)]
        await until(lambda: len(port.server.server_state.connections) == 2)
        refused = await port.talk()  # refused before the client has sent anything
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
    assert registry.get_sample_value(name, {"reason": "invalid_http"}) == 0  # the sample exists from the start
