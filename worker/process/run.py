"""The life of a worker process: admin port up, model loaded, sockets up, ready; on SIGTERM drained, stopped, exit 0.

The admin server answers from the first moment, so that a probe sees "loading" and not a refused connection. A second SIGTERM or
SIGINT during the drain ends the process without waiting for requests. If the component is no longer live, the process ends with the
component's exit code. Its peers notice at once, and its supervisor restarts it. If another part of the worker is about to end
(``is_leaving``), the process drains as after SIGTERM.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from prometheus_client import CollectorRegistry

from kvrelay.common.errors import ModelError
from kvrelay.common.listening import host_port
from kvrelay.common.system import keep_freed_memory, raise_descriptor_limit, return_freed_memory
from kvrelay.engine.step.interface import Profiler
from kvrelay.worker.process.admin import AdminProbe, AdminServer

logger = logging.getLogger(__name__)

T = TypeVar("T")

_WATCH_S = 1.0  # how often a running component is asked whether it is live


class Component(AdminProbe, Protocol):
    """A loaded worker. Built off the asyncio loop, then used on it."""

    @property
    def exit_code(self) -> int:
        """The exit code of a process that ends because the component is no longer live."""

    async def start(self) -> None:
        """Open the sockets and start the model loop."""

    async def drain(self) -> None:
        """Take no new requests, and return when none is left."""

    async def stop(self) -> None:
        """Close everything."""


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """The admin server's address, and how the process ends."""

    admin_host: str
    admin_port: int
    drain_s: float
    is_leaving: Callable[[], bool] = lambda: False  # whether to drain and end without a signal; any thread may set it


class _Probe:
    """The admin server's view of the component, before, while and after it runs."""

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

    @property
    def profiler(self) -> Profiler | None:
        return None if self.component is None else self.component.profiler


def serve_process(
    load: Callable[[], Component], settings: ProcessSettings, registry: CollectorRegistry, name: str
) -> int:
    """Run a worker process from its entry point. Returns the exit code, or exits with it if a daemon thread does not end.

    Raises the errors of ``load``; where a thread goes on that reads weights, they are logged, and the process exits with code 1.
    """

    def load_and_freeze() -> Component:
        component = load()
        # Loaded objects stay. Unfrozen, they make each garbage collection stop all threads for up to 0.1 s.
        gc.collect()
        gc.freeze()
        keep_freed_memory()
        return component

    return_freed_memory()
    raise_descriptor_limit()
    try:
        code = asyncio.run(run_process(load_and_freeze, settings, registry, name))
    except ModelError as error:
        if not _busy_threads():
            raise
        logger.error("%s: %s", name, error)
        code = 1
    if busy := _busy_threads():
        # These threads still read weights, or are in a step that does not end. The interpreter's normal exit would stop
        # them inside torch, which aborts the process. A stopped worker needs nothing of that exit.
        logger.info("%s: leaving without waiting for %s", name, ", ".join(busy))
        logging.shutdown()
        os._exit(code)
    return code


def _busy_threads() -> list[str]:
    """Daemon threads that have not ended."""
    return [thread.name for thread in threading.enumerate() if thread.daemon]


async def run_process(
    load: Callable[[], Component], settings: ProcessSettings, registry: CollectorRegistry, name: str
) -> int:
    """Run a component until a signal ends it, and return the exit code. Exceptions of ``load`` are raised here.

    ``load`` runs on a daemon thread, so a signal ends the process without waiting for it.
    """
    probe = _Probe()
    admin = AdminServer(settings.admin_host, settings.admin_port, probe, registry)
    stop_requested = asyncio.Event()
    signalled, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if signalled.is_set() else signalled).set()
        stop_requested.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    port = await admin.start()
    began_s = loop.time()
    leaving = asyncio.create_task(_when(settings.is_leaving, stop_requested))
    try:
        logger.info("%s: health and metrics at http://%s", name, host_port(settings.admin_host, port))
        component = await _first(_in_thread(load, f"{name}-loader"), _after(stop_requested, None))
        if component is None:
            logger.info("%s: stopped while loading", name)
            return 0
        try:
            await component.start()
            probe.component = component
            logger.info("%s: ready after %.1f s", name, loop.time() - began_s)
            failure = await _first(_failure(component), _after(stop_requested, ""))
            if not failure:
                probe.is_draining = True
                logger.info("%s: draining for at most %.0f s", name, settings.drain_s)
                with contextlib.suppress(TimeoutError):
                    work = _first(_drained(component), _after(hurry, ""), _failure(component))
                    failure = await asyncio.wait_for(work, settings.drain_s)
            if failure:
                logger.error("%s: %s; ending, to be started anew", name, failure)
        finally:
            await component.stop()
        logger.info("%s: stopped", name)
        return component.exit_code if failure else 0
    finally:
        leaving.cancel()
        await admin.stop()


async def _first(*works: Awaitable[T]) -> T:
    """The result of the work that is done first; of several, of the first argument. Cancels the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task.done()).result()
    finally:
        for task in tasks:
            task.cancel()


async def _after(event: asyncio.Event, result: T) -> T:
    await event.wait()
    return result


async def _when(condition: Callable[[], bool], event: asyncio.Event) -> None:
    """Set ``event`` once the condition holds."""
    while not condition():  # noqa: ASYNC110 - other threads know
        await asyncio.sleep(_WATCH_S)
    event.set()


async def _failure(component: Component) -> str:
    """Wait until the component is no longer live, and return why."""
    while not (reasons := component.not_live()):  # noqa: ASYNC110 - a thread that dies or hangs tells nobody
        await asyncio.sleep(_WATCH_S)
    return "; ".join(reasons)


async def _drained(component: Component) -> str:
    await component.drain()
    return ""


def _in_thread(call: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run ``call`` on its own daemon thread and return its result. At exit the process would wait for an executor's thread."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # a cancelled wait does not end the thread

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return asyncio.wrap_future(future)
