"""A real Prometheus that scrapes real components twice a second, under the chart's pod names, and evaluates the chart's alerts.

All durations of the rules (``for`` and the ranges of rates) are divided by 60, so that a minute takes a second. No threshold is
changed. Needs Debian's package ``prometheus``, and ``helm`` for the rules.
"""

from __future__ import annotations

import asyncio
import math
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from kvrelay.launcher.local.ports import free_ports

from ..helm.alerts import sooner
from ..helm.chart import NAMESPACE, RELEASE

PATIENCE_S = 60
TIMES_SOONER = 60


class Prometheus:
    """A running Prometheus, queried over HTTP."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def is_ready(self) -> bool:
        try:
            return (await self._client.get("/-/ready")).status_code == 200
        except httpx.TransportError:
            return False

    async def ask(self, query: str) -> list[float]:
        """The values of all series of the query's result, without NaN."""
        answer = await self._client.get("/api/v1/query", params={"query": query})
        assert answer.status_code == 200, f"{query}: {answer.text}"
        values = [float(series["value"][1]) for series in answer.json()["data"]["result"]]
        return [value for value in values if not math.isnan(value)]

    async def without_data(self, queries: Mapping[str, str]) -> dict[str, str]:
        """The queries, by name, that have no data now."""
        return {name: query for name, query in queries.items() if not await self.ask(query)}

    async def until_data(self, queries: Mapping[str, str]) -> None:
        """Poll until each query, by name, has had data once."""
        left = dict(queries)

        async def is_all_there() -> bool:
            nonlocal left
            left = await self.without_data(left)
            return not left

        await until(is_all_there, lambda: f"nothing for {left}")

    async def firing(self) -> set[str]:
        """Names of the alerts that fire now."""
        found = (await self._client.get("/api/v1/alerts")).json()["data"]["alerts"]
        return {one["labels"]["alertname"] for one in found if one["state"] == "firing"}

    async def until_fired(self, names: Collection[str]) -> None:
        """Poll until each of these alerts has fired once. None of them may fire at the start."""
        assert not (await self.firing()).intersection(names), f"one of {names} fires before its cause"
        left = set(names)

        async def have_all_fired() -> bool:
            left.difference_update(await self.firing())
            return not left

        await until(have_all_fired, lambda: f"{left} did not fire")

    async def until_silent(self) -> None:
        """Poll until no alert fires."""

        async def is_silent() -> bool:
            return not await self.firing()

        await until(is_silent, lambda: "alerts fire still")


async def until(holds: Callable[[], Awaitable[bool]], missing: Callable[[], str]) -> None:
    """Poll ``holds`` until it is true. Fails after ``PATIENCE_S`` with the text of ``missing``."""
    until_s = time.monotonic() + PATIENCE_S
    while not await holds():
        assert time.monotonic() < until_s, f"after {PATIENCE_S} s {missing()}"
        await asyncio.sleep(0.3)


@asynccontextmanager
async def prometheus_of(
    urls: Mapping[str, str], directory: Path, groups: Mapping[str, Any] | None = None
) -> AsyncIterator[Prometheus]:
    """A Prometheus for the block. ``urls``: the base URL of /metrics by the pod's name in the release, such as
    ``gateway-0``. ``groups``: the chart's alerts."""
    targets = [
        {
            "targets": [url.removeprefix("http://")],
            "labels": {"namespace": NAMESPACE, "pod": f"{RELEASE}-kvrelay-{pod}"},
        }
        for pod, url in urls.items()
    ]
    config: dict[str, Any] = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
        "scrape_configs": [{"job_name": "kvrelay", "static_configs": targets}],
    }
    if groups is not None:
        (directory / "rules.yml").write_text(yaml.safe_dump(sooner(groups, TIMES_SOONER)))
        config["rule_files"] = ["rules.yml"]
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    [port] = free_ports(1)
    command = [
        "prometheus", f"--config.file={directory / 'prometheus.yml'}", f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
    ]  # fmt: skip
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as process:
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
                found = Prometheus(client)
                await until(found.is_ready, lambda: "Prometheus is not ready")
                yield found
        finally:
            process.terminate()
