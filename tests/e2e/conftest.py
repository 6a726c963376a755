"""Two deployments of the demo model for the whole session, with and without a hand-off: real sockets, fp32 on the CPU."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvrelay.launcher.local.deployment import LocalDeployment
from kvrelay.launcher.models import resolve_model
from kvrelay.launcher.settings import LocalSettings

from .promises import FEW, LONG, Answer, ask_alone

PATIENCE_S = 240  # dozens of requests at a time may take a slow machine minutes


@pytest.fixture(scope="session")
def model_directory() -> Path:
    """The demo model, converted if it is not yet."""
    return resolve_model("demo")


@pytest.fixture(scope="session")
def deployment(model_directory: Path) -> Iterator[LocalDeployment]:
    """Gateway, one prefill worker, one decode worker; every prompt takes the relay."""
    settings = LocalSettings.of(
        port=0,
        device="cpu",
        dtype="float32",
        threads=1,
        local_prefill="fallback",
        kv_memory_mb=1024,
        room_timeout_s=PATIENCE_S,
    )
    with LocalDeployment.from_settings(settings, model_directory) as running:
        running.wait_ready(timeout_s=180)
        yield running


@pytest.fixture(scope="session")
def of_one_rank(deployment: LocalDeployment) -> dict[str, Answer]:
    """What workers of one rank say to ``FEW`` and ``LONG``, alone: those of several ranks, nodes and stages must say the same."""
    return asyncio.run(ask_alone(deployment.url, {**FEW, "long": LONG}))


@pytest.fixture(scope="session")
def local_deployment(model_directory: Path) -> Iterator[LocalDeployment]:
    """Gateway, and one decode worker that reads every prompt itself: nothing is handed over."""
    settings = LocalSettings.of(
        port=0, device="cpu", dtype="float32", threads=1, prefill=0, kv_memory_mb=256, room_timeout_s=PATIENCE_S
    )
    with LocalDeployment.from_settings(settings, model_directory) as running:
        running.wait_ready(timeout_s=180)
        yield running


def ledger(deployment: LocalDeployment, name: str) -> dict[str, int]:
    """A worker's ledger, as /debug/kv shows it."""
    response = httpx.get(f"{deployment.admin_urls[name]}/debug/kv", timeout=30)
    counts: dict[str, int] = response.json()["ledger"]
    return counts


def wait_until_idle(deployment: LocalDeployment, timeout_s: float = 10.0) -> None:
    """Until every block on all workers is free or cached; fails if that takes longer than ``timeout_s``."""
    deadline_s = time.monotonic() + timeout_s
    workers = [name for name in deployment.admin_urls if name != "gateway"]
    while True:
        ledgers = {name: ledger(deployment, name) for name in workers}
        if all(one["leased"] == one["running"] == 0 and one["balances"] for one in ledgers.values()):
            return
        assert time.monotonic() < deadline_s, f"blocks are still in use: {ledgers}"
