"""The admin endpoints (health, metrics, the ledger, profiles) and their server."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from kvrelay.common.errors import SettingsError
from kvrelay.engine.step.interface import Profiler
from kvrelay.worker.process.admin import AdminServer, admin_app


class Probe:
    """A component whose health the test sets."""

    def __init__(self) -> None:
        self.live_reasons: list[str] = []
        self.ready_reasons: list[str] = []
        self.profiler: Profiler | None = None

    def not_live(self) -> list[str]:
        return self.live_reasons

    def not_ready(self) -> list[str]:
        return self.ready_reasons

    def debug_kv(self) -> dict[str, Any]:
        return {"num_blocks": 3, "owners": {"lease 1": 2}}


class OneAtATime:
    """A profiler whose recording never ends."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def ask(self, num_steps: int) -> str | None:
        self.asked.append(num_steps)
        return "/tmp/traces-*" if len(self.asked) == 1 else None


@pytest.fixture
def probe() -> Probe:
    return Probe()


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
async def client(probe: Probe, registry: CollectorRegistry) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(admin_app(probe, registry))
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as made:
        yield made


@pytest.mark.parametrize("path", ["/health/live", "/health/ready", "/health"])
async def test_a_verdict_is_200_or_503_with_all_reasons(path: str, client: httpx.AsyncClient, probe: Probe) -> None:
    answer = await client.get(path)
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    reasons = ["draining", "the KV port is dead"]
    probe.live_reasons, probe.ready_reasons = (reasons, []) if path.endswith("live") else ([], reasons)
    answer = await client.get(path)
    assert (answer.status_code, answer.json()) == (503, {"status": "unavailable", "reasons": reasons})
    other = "/health/ready" if path.endswith("live") else "/health/live"
    assert (await client.get(other)).status_code == 200


async def test_metrics_are_prometheus_text_of_this_registry(
    client: httpx.AsyncClient, registry: CollectorRegistry
) -> None:
    Counter("kvrelay_things", "Things", ["kind"], registry=registry).labels("odd").inc(2)
    Gauge("vllm:waiting", "Waiting", registry=registry).set_function(lambda: 4)
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    lines = answer.text.splitlines()
    assert 'kvrelay_things_total{kind="odd"} 2.0' in lines
    assert "vllm:waiting 4.0" in lines
    assert not any(line.startswith("python_") for line in lines)


async def test_the_ledger_is_shown_and_nothing_else_exists(client: httpx.AsyncClient) -> None:
    assert (await client.get("/debug/kv")).json() == {"num_blocks": 3, "owners": {"lease 1": 2}}
    answer = await client.get("/v1/models")
    assert answer.status_code == 404
    assert answer.text.startswith("there is no '/v1/models' here, but /health, /health/live, ")
    assert (await client.post("/health/ready")).status_code == 405


async def test_a_profile_is_asked_for_once_at_a_time(client: httpx.AsyncClient, probe: Probe) -> None:
    assert (await client.post("/debug/profile")).status_code == 501
    probe.profiler = profiler = OneAtATime()
    for steps in ("0", "101", "-1", "", "x", "9" * 5000):
        assert (await client.post("/debug/profile", params={"steps": steps})).status_code == 400
    answer = await client.post("/debug/profile")
    assert (answer.status_code, answer.json()) == (202, {"num_steps": 20, "traces": "/tmp/traces-*"})
    assert (await client.post("/debug/profile?steps=100")).status_code == 409
    assert profiler.asked == [20, 100]
    assert (await client.get("/debug/profile")).status_code == 405


async def test_a_started_server_listens_at_once(probe: Probe, registry: CollectorRegistry) -> None:
    server = AdminServer("127.0.0.1", 0, probe, registry)
    port = await server.start()
    with socket.create_connection(("127.0.0.1", port)):  # no await: uvicorn's task did not run yet
        pass
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        assert (await client.get("/health/live")).status_code == 200
        with pytest.raises(SettingsError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*with --admin-port"):
            await AdminServer("127.0.0.1", port, probe, registry).start()
        with pytest.raises(SettingsError, match=r"cannot listen on 192\.0\.2\.1:0: .*with --admin-host"):
            await AdminServer("192.0.2.1", 0, probe, registry).start()
    await server.stop()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_garbage_writes_no_line_into_the_log(
    probe: Probe, registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    """Anybody who reaches the port could fill the worker's log otherwise."""
    caplog.set_level(logging.INFO)
    server = AdminServer("127.0.0.1", 0, probe, registry)
    port = await server.start()
    upgrade = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    for sent, status in (
        (b"\x16\x03\x01 garbage\r\n\r\n", b" 400 "),
        (upgrade + b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n", b" 404 "),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        assert status in await asyncio.wait_for(reader.readline(), 20)
        writer.close()
        await writer.wait_closed()
    await server.stop()
    assert [record.getMessage() for record in caplog.records if record.name.startswith("uvicorn")] == []


async def test_a_server_may_stop_at_once_or_without_a_start(probe: Probe, registry: CollectorRegistry) -> None:
    server = AdminServer("127.0.0.1", 0, probe, registry)
    await server.stop()
    port = await server.start()
    await server.stop()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_signals_are_the_processs_while_a_server_runs(probe: Probe, registry: CollectorRegistry) -> None:
    """A running server leaves the process's signal handlers alone, so that SIGTERM drains the worker.

    The server overrides an undocumented method of uvicorn for that (``capture_signals``).
    """
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    server = AdminServer("127.0.0.1", 0, probe, registry)
    port = await server.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        assert (await client.get("/health/live")).status_code == 200
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    await server.stop()
