"""Deployments of the demo model for the whole session: with a hand-off, and without one. Real sockets, fp32 on the
CPU."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvrelay.launcher.local.deployment import LocalDeployment
from kvrelay.launcher.models import resolve_model
from kvrelay.launcher.settings import LocalSettings
from tests.reliability.figures import wait_until

from .promises import FEW, LONG, Answer, ask_alone

PATIENCE_S = 240  # a slow machine may take minutes for dozens of concurrent requests


@pytest.fixture(scope="session")
def model_directory() -> Path:
    """The demo model's directory, converted on first use."""
    return resolve_model("demo")


@contextmanager
def serving(directory: Path, **chosen: Any) -> Iterator[LocalDeployment]:
    """A gateway and workers on one CPU thread each. Every prompt is handed over, if nothing else is ``chosen``."""
    settings: dict[str, Any] = {
        "port": 0, "device": "cpu", "dtype": "float32", "threads": 1, "local_prefill": "fallback", "room_timeout_s": PATIENCE_S
    }  # fmt: skip
    with LocalDeployment.from_settings(LocalSettings.of(**{**settings, **chosen}), directory) as running:
        running.wait_ready(timeout_s=180)
        yield running


@pytest.fixture(scope="session")
def deployment(model_directory: Path) -> Iterator[LocalDeployment]:
    """A gateway, one prefill worker and one decode worker. Every prompt is handed over."""
    with serving(model_directory, kv_memory_mb=1024) as running:
        yield running


@pytest.fixture(scope="session")
def of_one_rank(deployment: LocalDeployment) -> dict[str, Answer]:
    """The answers of one-rank workers to ``FEW`` and ``LONG``, one at a time. Workers of several ranks, nodes or stages
    must equal them."""
    return asyncio.run(ask_alone(deployment.url, {**FEW, "long": LONG}))


@pytest.fixture(scope="session")
def local_deployment(model_directory: Path) -> Iterator[LocalDeployment]:
    """A gateway and one decode worker, which computes every prompt itself, without a hand-off."""
    with serving(model_directory, prefill=0, local_prefill="sooner", kv_memory_mb=256) as running:
        yield running


def wait_restarted(deployment: LocalDeployment, name: str, lost: int) -> None:
    """Wait until another process than ``lost``, which was killed, is the component, and all are ready. Until the launcher looks
    at it again, one that was killed still counts as ready.
    """
    wait_until(
        lambda: deployment.pids.get(name) not in (None, lost), PATIENCE_S, f"{name} is another process than {lost}"
    )
    deployment.wait_ready(timeout_s=120)


def ledger(deployment: LocalDeployment, name: str) -> dict[str, int]:
    """A worker's block ledger, from /debug/kv."""
    response = httpx.get(f"{deployment.admin_urls[name]}/debug/kv", timeout=30)
    counts: dict[str, int] = response.json()["ledger"]
    return counts


def wait_until_idle(deployment: LocalDeployment, timeout_s: float = 60.0) -> None:
    """Wait until every block on all workers is free or cached. Fails after ``timeout_s``."""
    deadline_s = time.monotonic() + timeout_s
    workers = [name for name in deployment.admin_urls if name != "gateway"]
    while True:
        ledgers = {name: ledger(deployment, name) for name in workers}
        if all(one["leased"] == one["running"] == 0 and one["balances"] for one in ledgers.values()):
            return
        assert time.monotonic() < deadline_s, f"blocks are still in use: {ledgers}"
