"""Grafana's queries and the alerts' conditions, asked of a real Prometheus that scrapes a real deployment under load and faults.

Needs Debian's package ``prometheus``; the alerts also need ``helm``, which renders them. That they fire after their time, and
only then, is tested in :mod:`tests.helm.test_alerts`.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import yaml
import zmq

from kvrelay.launcher.local.deployment import LocalDeployment
from kvrelay.launcher.local.ports import free_ports
from kvrelay.launcher.settings import LocalSettings

from ..helm.alerts import CHART, NAMESPACE, RELEASE, alerts

pytestmark = [
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus"),
    pytest.mark.timeout(180),
]

PATIENCE_S = 40
PODS = {"gateway": "gateway", "prefill-0": "prefill-worker", "decode-0": "decode-worker"}


class Prometheus:
    """One that scrapes every second."""

    def __init__(self, url: str) -> None:
        self._client = httpx.AsyncClient(base_url=url, timeout=10)

    async def is_ready(self) -> bool:
        try:
            return (await self._client.get("/-/ready")).status_code == 200
        except httpx.TransportError:
            return False

    async def ask(self, query: str) -> list[float]:
        """The values of all series that are numbers."""
        answer = await self._client.get("/api/v1/query", params={"query": query})
        assert answer.status_code == 200, f"{query}: {answer.text}"
        values = [float(series["value"][1]) for series in answer.json()["data"]["result"]]
        return [value for value in values if not math.isnan(value)]

    async def until_data(self, queries: dict[str, str]) -> None:
        """Ask until each query, by its name, has given a number at some time."""
        left = dict(queries)

        async def is_all_there() -> bool:
            for name, query in list(left.items()):
                if await self.ask(query):
                    del left[name]
            return not left

        await until(is_all_there, lambda: f"nothing for {left}")


async def until(holds: Callable[[], Awaitable[bool]], missing: Callable[[], str]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not await holds():
        assert time.monotonic() < until_s, f"after {PATIENCE_S} s {missing()}"
        await asyncio.sleep(0.3)


@asynccontextmanager
async def prometheus_of(deployment: LocalDeployment, directory: Path) -> AsyncIterator[Prometheus]:
    """It sees the labels that the chart's pods would have."""
    targets = [
        {
            "targets": [deployment.admin_urls[name].removeprefix("http://")],
            "labels": {"namespace": NAMESPACE, "pod": f"{RELEASE}-kvrelay-{component}-0"},
        }
        for name, component in PODS.items()
    ]
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": [{"job_name": "kvrelay", "static_configs": targets}],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    [port] = free_ports(1)
    command = [
        "prometheus", f"--config.file={directory / 'prometheus.yml'}", f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
    ]  # fmt: skip
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as process:
        try:
            found = Prometheus(f"http://127.0.0.1:{port}")
            await until(found.is_ready, lambda: "Prometheus is not ready")
            yield found
            await found._client.aclose()
        finally:
            process.terminate()


async def ask_again_and_again(client: httpx.AsyncClient, number: int) -> None:
    """One client; of five, one is in a hurry, and is refused."""
    body = {"prompt": list(range(3 + number, 203 + number)), "max_tokens": 40, "ignore_eos": True}
    headers = {"x-request-timeout": "0.4"} if number % 5 == 0 else {}
    while True:
        await client.post("/v1/completions", json=body, headers=headers)
        await asyncio.sleep(0.05)  # who is refused is so at once


async def talk_nonsense(deployment: LocalDeployment) -> None:
    """To every door."""
    [command] = [" ".join(spec.command) for spec in deployment.plan.specs if spec.name == "decode-0"]
    doors = dict(re.findall(r"--(address|data-address)[= ](\S+)", command))
    host, port = deployment.url.removeprefix("http://").split(":")
    with zmq.Context() as context:
        while True:
            for door, frames in (
                (doors["address"], [b"nonsense"]),
                (doors["data-address"], [b"no header", b"no block"]),
            ):
                with context.socket(zmq.DEALER) as dealer:
                    dealer.linger = 1000
                    dealer.connect(door)
                    for _ in range(5):
                        dealer.send_multipart(frames)
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"nonsense\r\n\r\n")
            await writer.drain()
            writer.close()
            await asyncio.sleep(0.5)


def dashboard_queries() -> dict[str, str]:
    """As Grafana would ask them, by panel."""
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


def selectors(query: str) -> list[str]:
    """The series that a query reads, but for the values of labels that only trouble has."""
    found = re.findall(r"kvrelay_\w+\{[^}]*\}", query)
    assert found, query
    return found


async def test_dashboard_and_alerts_find_their_data(model_directory: Path, tmp_path: Path) -> None:
    # The decode worker takes few requests at a time, so that others wait.
    settings = LocalSettings.of(
        port=0, engine="fake", local_prefill="never", fake_step_ms=20, max_num_seqs=2, room_timeout_s=30, max_attempts=1
    )
    with LocalDeployment.from_settings(settings, model_directory) as deployment:
        await asyncio.to_thread(deployment.wait_ready, timeout_s=60)
        async with (
            prometheus_of(deployment, tmp_path) as prometheus,
            httpx.AsyncClient(base_url=deployment.url, timeout=60) as client,
        ):
            busy = [asyncio.create_task(ask_again_and_again(client, number)) for number in range(10)]
            busy.append(asyncio.create_task(talk_nonsense(deployment)))
            try:
                await prometheus.until_data(dashboard_queries())
                if shutil.which("helm") is None:
                    return
                conditions = {name: rule["expr"] for name, rule in alerts().items()}
                await prometheus.until_data({one: one for query in conditions.values() for one in selectors(query)})
                await prometheus.until_data(
                    {name: conditions[name] for name in ("KvrelayBlocksRefused", "KvrelayRequestsRefused")}
                )
                assert not await prometheus.ask(conditions["KvrelayNoWorker"])
                os.kill(deployment.pids["decode-0"], signal.SIGKILL)
                await prometheus.until_data(
                    {name: conditions[name] for name in ("KvrelayNoWorker", "KvrelayRequestsFail")}
                )
            finally:
                assert not [one for one in busy if one.done()], "a client, or a stranger, gave up"
                for one in busy:
                    one.cancel()
                await asyncio.gather(*busy, return_exceptions=True)
