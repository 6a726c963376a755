"""The workers' ports that strangers can reach, and crowds at them: many silent connections at a time."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from .figures import cpu_s, wait_until
from .fleet import Fleet, Member

TURNED_AWAY_S = 12.0  # ZeroMQ gives a handshake 5 s; the rest is for a busy machine
MAX_GROWTH_MIB = 24.0  # of a worker, without crowds
MAX_CONNECTION_MIB = 0.06  # of a worker, for each open connection


@dataclass(frozen=True)
class Door:
    """One port of a worker that strangers can reach."""

    worker: Member
    name: str
    keys: Path | None

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.worker.ports[self.name]}"

    def knock(self) -> socket.socket:
        """Open a bare TCP connection."""
        return socket.create_connection(("127.0.0.1", self.worker.ports[self.name]), timeout=TURNED_AWAY_S)


def doors_of(up: Fleet, keys: Path | None) -> list[Door]:
    """All ports: control of both workers, and data of the decode worker."""
    return [Door(worker, name, keys) for worker in up.workers for name in worker.ports]


def crowd(door: Door, num_connections: int) -> str:
    """Open many silent connections; the worker must close nearly all of them. Returns what they cost the worker."""
    before_mib = door.worker.figures().rss_mib
    connections: list[socket.socket] = []
    started_s = time.monotonic()
    try:
        for _ in range(num_connections):
            connections.append(door.knock())
        opened_s = time.monotonic() - started_s
        peak = door.worker.figures().num_descriptors
        growth_mib = door.worker.figures().rss_mib - before_mib
        allowed_mib = MAX_GROWTH_MIB + num_connections * MAX_CONNECTION_MIB
        assert growth_mib < allowed_mib, f"{growth_mib:.0f} MiB for {num_connections} connections"
        # The connections stay open here: the worker must close them.
        gone_s = wait_until(
            lambda: (
                door.worker.figures().num_descriptors < peak - 0.9 * min(num_connections, peak)
                or _is_empty(door, connections)
            ),
            TURNED_AWAY_S + opened_s,
            f"{num_connections} silent connections hung up on",
        )
    finally:
        for connection in connections:
            connection.close()
    return (
        f"{len(connections)} opened in {opened_s:.1f} s, at most {peak} descriptors, +{growth_mib:.0f} MiB, "
        f"gone after {gone_s:.1f} s"
    )


def _is_empty(door: Door, connections: list[socket.socket]) -> bool:
    return door.worker.figures().num_descriptors < len(connections) / 10 + 100


def exhaust(door: Door, num_connections: int) -> str:
    """Open more connections than the worker may have descriptors. Returns what they cost the worker.

    The worker must live, and free the descriptors when the connections are closed.
    """
    process = psutil.Process(door.worker.pid)
    limit = door.worker.figures().num_descriptors + 50
    usual = process.rlimit(psutil.RLIMIT_NOFILE)
    process.rlimit(psutil.RLIMIT_NOFILE, (limit, usual[1]))
    connections = [door.knock() for _ in range(num_connections)]
    try:
        wait_until(
            lambda: door.worker.figures().num_descriptors >= limit - 1, TURNED_AWAY_S, f"{limit} descriptors are in use"
        )
        used_s = cpu_s(door.worker.pid)
        time.sleep(1.0)  # measures the processor time of one second
        used_s = cpu_s(door.worker.pid) - used_s
    finally:
        for connection in connections:
            connection.close()
        wait_until(lambda: door.worker.figures().num_descriptors < limit - 40, TURNED_AWAY_S, "the crowd has gone")
        process.rlimit(psutil.RLIMIT_NOFILE, usual)
    return f"{num_connections} connections at a limit of {limit} descriptors, {used_s:.2f} s of processor time a second"
