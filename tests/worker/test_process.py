"""A worker process from start to SIGTERM, with a component that the test plays."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from kvrelay.common.errors import ModelError, SettingsError
from kvrelay.worker.process import run as process_module
from kvrelay.worker.process.run import ProcessSettings, run_process
from tests.ports import reserved_port

from ..ipv6 import needs_ipv6


@pytest.fixture
def port() -> Iterator[int]:
    """The admin port."""
    with reserved_port() as found:
        yield found


class Played:
    """A component that records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.reasons: list[str] = []
        self.exit_code = 1
        self.live_reasons: list[str] = []
        self.may_drain = asyncio.Event()
        self.is_draining = asyncio.Event()

    async def start(self) -> None:
        self.calls.append("start")

    def not_live(self) -> list[str]:
        return self.live_reasons

    def not_ready(self) -> list[str]:
        return self.reasons

    def debug_kv(self) -> dict[str, Any]:
        return {"blocks": 7}

    async def drain(self) -> None:
        self.calls.append("drain")
        self.is_draining.set()
        await self.may_drain.wait()

    async def stop(self) -> None:
        self.calls.append("stop")


async def until(client: httpx.AsyncClient, status: int) -> Any:
    """Poll readiness until the answer has this status. The test's timeout bounds it."""
    while True:
        try:
            response = await client.get("/health/ready")
        except httpx.TransportError:
            await asyncio.sleep(0.01)  # polls until the port is open
            continue
        if response.status_code == status:
            return response.json()
        await asyncio.sleep(0.01)  # polls until the status is there


@pytest.mark.timeout(60)
async def test_from_loading_to_exit_0(port: int) -> None:
    played, may_load = Played(), threading.Event()
    registry = CollectorRegistry()
    Counter("things", "Things", registry=registry).inc()

    def load() -> Played:
        may_load.wait()
        return played

    running = asyncio.create_task(run_process(load, ProcessSettings("127.0.0.1", port, 30.0), registry, "played"))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        assert (await until(client, 503))["reasons"] == ["the model is loading"]
        assert (await client.get("/health/live")).status_code == 200
        may_load.set()
        await until(client, 200)
        assert "things_total 1.0" in (await client.get("/metrics")).text
        assert (await client.get("/debug/kv")).json() == {"blocks": 7}
        played.reasons = ["the KV port is dead"]
        assert (await until(client, 503))["reasons"] == ["the KV port is dead"]
        os.kill(os.getpid(), signal.SIGTERM)
        await played.is_draining.wait()
        assert "draining" in (await client.get("/health/ready")).json()["reasons"]
        played.may_drain.set()
    assert await running == 0
    assert played.calls == ["start", "drain", "stop"]


@needs_ipv6
@pytest.mark.timeout(60)
async def test_the_log_has_a_url_that_can_be_asked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    played = Played()
    with reserved_port("::1") as port:
        settings = ProcessSettings("::1", port, 30.0)
        running = asyncio.create_task(run_process(lambda: played, settings, CollectorRegistry(), "played"))
        async with httpx.AsyncClient(base_url=f"http://[::1]:{port}") as client:
            await until(client, 200)
        os.kill(os.getpid(), signal.SIGTERM)
        played.may_drain.set()
        assert await running == 0
    assert f"played: health and metrics at http://[::1]:{port}" in caplog.text.splitlines()[0]


@pytest.mark.timeout(60)
async def test_a_second_signal_does_not_wait_for_requests(port: int) -> None:
    played = Played()
    settings = ProcessSettings("127.0.0.1", port, 3600.0)
    running = asyncio.create_task(run_process(lambda: played, settings, CollectorRegistry(), "played"))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        await until(client, 200)
    os.kill(os.getpid(), signal.SIGINT)
    await played.is_draining.wait()
    os.kill(os.getpid(), signal.SIGINT)
    assert await running == 0
    assert played.calls == ["start", "drain", "stop"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_signal_first", [True, False])
async def test_what_it_runs_on_may_ask_it_to_end_beside_a_signal_and_nobody_hurries(
    is_signal_first: bool, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM and another node's request to end arrive one after the other. The second one does not cut the drain short."""
    monkeypatch.setattr(process_module, "_WATCH_S", 0.001)  # the request is noticed while the test looks on
    played, asked = Played(), threading.Event()
    settings = ProcessSettings("127.0.0.1", port, 3600.0, asked.is_set)
    running = asyncio.create_task(run_process(lambda: played, settings, CollectorRegistry(), "played"))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        await until(client, 200)
        for is_signal in (is_signal_first, not is_signal_first):
            if is_signal:
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                asked.set()
            await played.is_draining.wait()
            await asyncio.sleep(0)  # a signal's handler runs on the loop
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(running), 0.3)
        played.may_drain.set()
    assert await running == 0
    assert played.calls == ["start", "drain", "stop"]


async def test_what_loading_raises_comes_out() -> None:
    def load() -> Played:
        raise ModelError("no such model")

    with pytest.raises(ModelError, match="no such model"):
        await run_process(load, ProcessSettings("127.0.0.1", 0, 1.0), CollectorRegistry(), "played")


def once_ready(played: Played, act: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    """``played.start``, which also schedules ``act`` on the loop."""
    start = played.start

    async def started() -> None:
        await start()
        asyncio.get_running_loop().call_soon(act)

    return started


async def run_until_signal(played: Played, drain_s: float = 30.0) -> int:
    """Load, start, and end by SIGTERM as soon as the component is up."""
    played.start = once_ready(played, lambda: os.kill(os.getpid(), signal.SIGTERM))  # type: ignore[method-assign]
    settings = ProcessSettings("127.0.0.1", 0, drain_s)
    return await run_process(lambda: played, settings, CollectorRegistry(), "played")


@pytest.mark.timeout(60)
async def test_a_drain_that_takes_too_long_is_cut_off() -> None:
    played = Played()
    assert await run_until_signal(played, drain_s=0.01) == 0
    assert played.calls == ["start", "drain", "stop"]


@pytest.mark.timeout(60)
async def test_a_drain_that_fails_still_stops_the_component() -> None:
    class Failing(Played):
        async def drain(self) -> None:
            raise RuntimeError("cannot drain")

    played = Failing()
    with pytest.raises(RuntimeError, match="cannot drain"):
        await run_until_signal(played)
    assert played.calls == ["start", "stop"]


@pytest.mark.timeout(60)
async def test_a_start_that_fails_stops_the_component_and_the_admin_server(port: int) -> None:
    class Failing(Played):
        async def start(self) -> None:
            raise SettingsError("the KV port is taken")

    played = Failing()
    with pytest.raises(SettingsError, match="the KV port is taken"):
        await run_process(lambda: played, ProcessSettings("127.0.0.1", port, 1.0), CollectorRegistry(), "played")
    assert played.calls == ["stop"]
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


@pytest.mark.timeout(60)
async def test_a_signal_while_loading_ends_the_process_without_starting() -> None:
    played, may_load, loop = Played(), threading.Event(), asyncio.get_running_loop()

    def load() -> Played:
        loop.call_soon_threadsafe(os.kill, os.getpid(), signal.SIGTERM)
        may_load.wait()
        return played

    try:
        assert await run_process(load, ProcessSettings("127.0.0.1", 0, 1.0), CollectorRegistry(), "played") == 0
    finally:
        may_load.set()
    assert played.calls == []


@pytest.mark.timeout(60)
async def test_a_component_that_is_not_live_any_more_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "_WATCH_S", 0.001)
    played = Played()

    def die() -> None:
        played.live_reasons = ["the model loop is dead"]

    played.start = once_ready(played, die)  # type: ignore[method-assign]
    settings = ProcessSettings("127.0.0.1", 0, 3600.0)
    assert await run_process(lambda: played, settings, CollectorRegistry(), "played") == 1
    assert played.calls == ["start", "stop"]  # it does not drain: no request could finish


@pytest.mark.timeout(60)
async def test_a_component_that_dies_while_it_drains_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "_WATCH_S", 0.001)

    class Dying(Played):
        async def drain(self) -> None:
            self.live_reasons = ["the model loop is dead"]
            await super().drain()

    played = Dying()
    played.exit_code = 3
    assert await run_until_signal(played, drain_s=3600.0) == 3
    assert played.calls == ["start", "drain", "stop"]


LOADS_FOR_EVER = """
import os, signal, sys, threading
from prometheus_client import CollectorRegistry
from kvrelay.worker.process.run import ProcessSettings, serve_process

def load():
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()

sys.exit(serve_process(load, ProcessSettings("127.0.0.1", 0, 30.0), CollectorRegistry(), "played"))
"""


def test_a_process_that_loads_for_ever_still_ends_on_sigterm_with_exit_code_0() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LOADS_FOR_EVER], timeout=60, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


READS_ON = """
import sys, threading
from prometheus_client import CollectorRegistry
from kvrelay.common.errors import ModelError
from kvrelay.common.logs import configure_logs
from kvrelay.worker.process.run import ProcessSettings, serve_process

def load():
    threading.Thread(target=threading.Event().wait, name="reads on", daemon=True).start()
    raise ModelError("rank 1 cannot load its part: why")

configure_logs("info", "text")
sys.exit(serve_process(load, ProcessSettings("127.0.0.1", 0, 30.0), CollectorRegistry(), "played"))
"""


def test_a_load_that_fails_while_a_thread_reads_on_ends_the_process_with_its_reason() -> None:
    ended = subprocess.run([sys.executable, "-c", READS_ON], timeout=60, capture_output=True, text=True, check=False)
    assert ended.returncode == 1, ended.stderr
    assert "played: rank 1 cannot load its part: why" in ended.stderr
    assert "leaving without waiting for reads on" in ended.stderr
