"""Grafana's queries and every alert but one, on a real Prometheus that scrapes a real deployment under load and faults.

One deployment goes through four phases: normal load, a flood of requests, a hung decode worker, and strangers with
misconfigured workers. Each alert is silent before its cause and fires after it. ``KvrelayComputesWrongly`` needs broken
weights: see :mod:`tests.e2e.test_canary`. :mod:`tests.helm.test_alerts` checks that alerts fire at their exact time.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import signal
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from kvrelay.launcher.local.deployment import LocalDeployment, LogRecorder
from kvrelay.launcher.local.process import ComponentSpec
from kvrelay.launcher.local.supervisor import Supervisor
from kvrelay.launcher.settings import LocalSettings
from kvrelay.wire.messages import Role
from kvrelay.wire.security.keys import WireKeys, make_keys

from ..helm.alerts import alerts, groups
from ..helm.chart import CHART, NAMESPACE, needs_helm
from .prometheus import prometheus_of

pytestmark = [
    needs_helm,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus"),
    pytest.mark.timeout(300),
]

IN_A_FLOOD = {"KvrelayRequestsWait", "KvrelayRequestsRefused", "KvrelayDecodeFull"}
WITHOUT_DECODE_WORKER = {"KvrelayNoWorker", "KvrelayRequestsFail"}
AMONG_STRANGERS = {"KvrelayBlocksRefused", "KvrelayStrangers", "KvrelayWorkersRefused"}
WITH_BROKEN_WEIGHTS = {"KvrelayComputesWrongly"}

PODS = {
    "gateway": "gateway-0", "prefill-0": "prefill-worker-0",
    **{f"decode-{number}": f"decode-worker-{number}" for number in range(3)},
}  # fmt: skip


async def ask_again_and_again(client: httpx.AsyncClient, number: int) -> None:
    """A client that repeats requests with long answers. Each prompt is new, so no blocks are shared."""
    chance = random.Random(number)
    while True:
        body = {
            "prompt": chance.choices(range(3, 40_000), k=40),
            "max_tokens": chance.randint(100, 200),
            "ignore_eos": True,
        }
        await client.post("/v1/completions", json=body)
        await asyncio.sleep(0.2)  # a pause, because a refusal comes at once


async def be_in_a_hurry(client: httpx.AsyncClient) -> None:
    """A client that repeats short requests with a timeout of 3 s, which suffices without other load."""
    while True:
        body = {"prompt": [3, 4, 5], "max_tokens": 5, "ignore_eos": True}
        await client.post("/v1/completions", json=body, headers={"x-request-timeout": "3"})
        await asyncio.sleep(0.2)


async def talk_nonsense(decode: ComponentSpec, url: str) -> None:
    """Send garbage to a decode worker's control and data ports and to the gateway."""
    host, port = url.removeprefix("http://").split(":")
    with zmq.Context() as context:
        while True:
            for door, frames in (("address", [b"nonsense"]), ("data-address", [b"no header", b"no block"])):
                with context.socket(zmq.DEALER) as dealer:
                    dealer.linger = 1000
                    dealer.connect(door_of(decode, door))
                    for _ in range(5):
                        dealer.send_multipart(frames)
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"nonsense\r\n\r\n")
            await writer.drain()
            writer.close()
            await asyncio.sleep(0.3)


async def knock_with_other_keys(decode: ComponentSpec, known: Path, own: Path) -> None:
    """Connect like a gateway whose keys the workers do not know."""
    [server_key] = WireKeys.load(known, Role.GATEWAY).peers[Role.DECODE]
    keys = WireKeys.load(own, Role.GATEWAY)
    with zmq.Context() as context:
        while True:
            with context.socket(zmq.DEALER) as dealer:
                dealer.linger = 0
                dealer.curve_serverkey, dealer.curve_publickey, dealer.curve_secretkey = (
                    server_key,
                    keys.public,
                    keys.secret,
                )
                dealer.connect(door_of(decode, "address"))
                await asyncio.sleep(0.2)


def door_of(decode: ComponentSpec, option: str) -> str:
    """The address of a decode worker's option ``address`` or ``data-address``."""
    return dict(re.findall(r"--(address|data-address)[= ](\S+)", " ".join(decode.command)))[option]


@asynccontextmanager
async def meanwhile(*endless: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run these coroutines during the block. None may end before it."""
    tasks = [asyncio.create_task(one) for one in endless]
    try:
        yield
        assert not [one for one in tasks if one.done()], "a client, or a stranger, gave up"
    finally:
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def hung(pid: int) -> Iterator[None]:
    """Stop the process for the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@asynccontextmanager
async def started(*specs: ComponentSpec) -> AsyncIterator[None]:
    """Run these components for the block, from when they are ready."""
    late = Supervisor(specs)
    late.start(LogRecorder())
    try:
        await asyncio.to_thread(late.wait_ready, timeout_s=180)
        yield
    finally:
        await asyncio.to_thread(late.stop)


def dashboard_queries() -> dict[str, str]:
    """The dashboard's queries by panel and legend, with Grafana's variables filled in."""
    panels = json.loads((CHART / "dashboards" / "kvrelay.json").read_text())["panels"]
    asked = {
        f"{panel['title']}: {target.get('legendFormat')}": target["expr"]
        for panel in panels
        for target in panel.get("targets", [])
    }
    assert len(asked) > 30
    return {
        name: query.replace("$namespace", NAMESPACE).replace("$__rate_interval", "15s") for name, query in asked.items()
    }


def test_every_alert_has_a_cause() -> None:
    causes = [IN_A_FLOOD, WITHOUT_DECODE_WORKER, AMONG_STRANGERS, WITH_BROKEN_WEIGHTS]
    assert sorted(name for cause in causes for name in cause) == sorted(alerts())


async def test_each_alert_fires_behind_its_cause_and_every_query_finds_data(
    model_directory: Path, tmp_path: Path
) -> None:
    settings = LocalSettings.of(
        port=0,
        decode=3,
        engine="fake",
        local_prefill="never",
        fake_step_ms=100,
        num_blocks=320,
        room_timeout_s=30,
        max_attempts=1,
    )
    known, other = tmp_path / "known", tmp_path / "other"
    make_keys(known)
    make_keys(other)
    plan = LocalDeployment.from_settings(settings, model_directory).plan
    specs = {spec.name: spec for spec in plan.specs}
    # Two decode workers start late and with other settings. The gateway has their addresses from the start.
    misfit, locked = specs.pop("decode-1"), specs.pop("decode-2")
    misfit = replace(misfit, command=(*misfit.command, "--block-size=32"))
    locked = replace(locked, command=(*locked.command, f"--keys={known}"))
    urls = {pod: plan.admin_urls[name] for name, pod in PODS.items()}
    with LocalDeployment(replace(plan, specs=tuple(specs.values()))) as deployment:
        await asyncio.to_thread(deployment.wait_ready, timeout_s=180)
        limits = httpx.Limits(max_connections=None)
        async with (
            prometheus_of(urls, tmp_path, groups()) as prometheus,
            httpx.AsyncClient(base_url=deployment.url, timeout=60, limits=limits) as client,
            meanwhile(*(be_in_a_hurry(client) for _ in range(8))),
        ):
            await prometheus.until_data({"all is well": 'sum(kvrelay_requests_total{outcome="200"}) > 5'})
            assert not await prometheus.firing()
            async with meanwhile(*(ask_again_and_again(client, number) for number in range(180))):
                await prometheus.until_fired(IN_A_FLOOD)
                queries = await prometheus.without_data(dashboard_queries())
            await prometheus.until_silent()
            with hung(deployment.pids["decode-0"]):
                await prometheus.until_fired(WITHOUT_DECODE_WORKER)
            assert not AMONG_STRANGERS & await prometheus.firing()
            async with (
                started(misfit, locked),
                meanwhile(
                    talk_nonsense(specs["decode-0"], deployment.url), knock_with_other_keys(locked, known, other)
                ),
            ):
                await prometheus.until_fired(AMONG_STRANGERS)
                await prometheus.until_data(queries)
