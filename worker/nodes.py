"""A worker on several nodes: the processes of its other nodes, and the data that all nodes share.

On node 0 the process is the worker (:mod:`kvrelay.worker.main`). On every other node the process runs ranks for it. Gateways never
connect to these nodes, so their processes have no wire sockets and no model, only health and metrics.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry

from kvrelay.common.listening import host_port
from kvrelay.engine.ranks.host import RankHost
from kvrelay.engine.ranks.nodes import HostDirectories, NodePlace
from kvrelay.wire.messages import Role
from kvrelay.wire.security.keys import WireKeys, keys_of
from kvrelay.worker.process.run import ProcessSettings, serve_process
from kvrelay.worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

_LOOK_S = 0.2  # period of the check whether a drain is over


class Leaving:
    """Whether a node of this worker was asked to end, which ends the whole worker. Thread-safe."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def because(self, reason: str) -> None:
        """Set it, and log the first reason."""
        if not self._event.is_set():
            logger.info("%s, and so this worker", reason)
        self._event.set()

    def is_set(self) -> bool:
        """Whether a node was asked to end."""
        return self._event.is_set()


def node_addresses(place: NodePlace | None) -> tuple[str, ...]:
    """The addresses of the worker's nodes."""
    if place is None:
        return ()
    return (f"tcp://{host_port(*place.leader)}",)


def ranks_secret(keys: WireKeys | None) -> bytes:
    """The secret that all nodes of a worker share; empty without keys."""
    return b"" if keys is None else keys.derived("ranks of one worker")


def serve_ranks(role: Role, settings: WorkerSettings, place: NodePlace) -> int:
    """Run a node's ranks until SIGTERM; returns the exit code. Raises KvrelayError if it cannot start."""
    name = f"{settings.worker_id or role.value} (node {place.node_rank})"
    secret = ranks_secret(keys_of(settings.security, role, node_addresses(place)))
    process = ProcessSettings(settings.admin_host, settings.admin_port, settings.drain_s)
    return serve_process(
        lambda: _Ranks(place, secret, HostDirectories.of(settings.model)), process, CollectorRegistry(), name
    )


class _Ranks:
    """The ranks of one node. Implements :class:`kvrelay.worker.process.run.Component`."""

    def __init__(self, place: NodePlace, secret: bytes, directories: HostDirectories) -> None:
        self._start = partial(RankHost, place, secret, directories)
        self._host: RankHost | None = None

    @property
    def exit_code(self) -> int:
        """See Component."""
        return 1

    async def start(self) -> None:
        """See Component."""
        self._host = self._start()

    async def drain(self) -> None:
        """See Component. The worker ends with this node. It gets time to finish its requests."""
        assert self._host is not None
        self._host.leave()
        while not self._host.wait(0):  # noqa: ASYNC110 - threads end without a word
            await asyncio.sleep(_LOOK_S)

    async def stop(self) -> None:
        """See Component."""
        if self._host is not None:
            await asyncio.to_thread(self._host.close)

    def not_live(self) -> list[str]:
        """See Component. Ranks that end are restarted here; reported are those that cannot be."""
        return [] if self._host is None else self._host.not_live()

    def not_ready(self) -> list[str]:
        """See Component. Only node 0 reports whether the worker takes requests."""
        return []

    def debug_kv(self) -> dict[str, Any]:
        """See Component. Node 0 has the blocks, this node only its ranks."""
        return {"ranks": {} if self._host is None else self._host.pids}

    @property
    def profiler(self) -> None:
        """See Component. The worker tells all its ranks."""
        return None
