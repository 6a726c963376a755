"""The life of a worker process: admin port up, model loaded, sockets up, ready; on SIGTERM drained, stopped, exit 0.

The admin server answers from the first moment, so that a probe sees "loading" and not a refused connection. A second
SIGTERM or SIGINT during the drain ends the process without waiting for requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from prometheus_client import CollectorRegistry

from kvrelay.common.admin import AdminServer

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Component(Protocol):
    """A loaded worker. Built off the asyncio loop, then used on it."""

    async def start(self) -> None:
        """Open the sockets and start the model loop."""

    def not_live(self) -> list[str]:
        """Reasons to restart the process."""

    def not_ready(self) -> list[str]:
        """Reasons to send no traffic."""

    def debug_kv(self) -> dict[str, Any]:
        """Every block's place and owner."""

    async def drain(self) -> None:
        """Take nothing new; return when nothing is left."""

    async def stop(self) -> None:
        """Close everything."""


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """How the process is run."""

    admin_host: str
    admin_port: int
    drain_s: float


class _Probe:
    """What the admin server sees before, while and after the component runs."""

    def __init__(self) -> None:
        self.component: Component | None = None
        self.is_draining = False

    def not_live(self) -> list[str]:
        return [] if self.component is None else self.component.not_live()

    def not_ready(self) -> list[str]:
        if self.component is None:
            return ["the model is loading"]
        return (["draining"] if self.is_draining else []) + self.component.not_ready()

    def debug_kv(self) -> dict[str, Any]:
        return {"state": "loading"} if self.component is None else self.component.debug_kv()


async def run_process(
    load: Callable[[], Component], settings: ProcessSettings, registry: CollectorRegistry, name: str
) -> int:
    """Run a component until a signal ends it; returns the exit code. What ``load`` raises is raised here."""
    probe = _Probe()
    admin = AdminServer(settings.admin_host, settings.admin_port, probe, registry)
    stop_requested = asyncio.Event()
    hurry = asyncio.Event()

    def on_signal() -> None:
        (hurry if stop_requested.is_set() else stop_requested).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    port = await admin.start()
    try:
        logger.info("%s: health and metrics at http://%s:%d", name, settings.admin_host, port)
        component = await _first(asyncio.to_thread(load), stop_requested)
        if component is None:
            logger.info("%s: stopped while loading", name)
            return 0
        try:
            await component.start()
            probe.component = component
            logger.info("%s: ready", name)
            await stop_requested.wait()
            probe.is_draining = True
            logger.info("%s: draining for at most %.0f s", name, settings.drain_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(_first(component.drain(), hurry), settings.drain_s)
        finally:
            await component.stop()
        logger.info("%s: stopped", name)
        return 0
    finally:
        await admin.stop()


async def _first(work: Awaitable[T], event: asyncio.Event) -> T | None:
    """The result of ``work``, or None if ``event`` is set before it is there."""
    task, waiter = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        waiter.cancel()
        if not task.done():
            task.cancel()
