"""One of several serving processes of a gateway: ``python -m kvrelay.gateway.process LINK LISTENER MEMORY PARENT_PID``.

Started by :mod:`kvrelay.gateway.processes` with three inherited descriptors: its link to the parent, the listening socket, and the
memory that all processes share. It is a gateway like one that serves alone, with its own links to the workers under its own id;
what is bounded for the whole gateway it bounds to its share, or counts together with its siblings. It ends with its parent.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import socket
import sys

from prometheus_client import CollectorRegistry

from kvrelay.common.errors import KvrelayError, SettingsError
from kvrelay.common.lifeline import end_with_parent
from kvrelay.common.logs import configure_logs
from kvrelay.gateway.http_server import HttpServer
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.process_link import Assignment, CannotServe, childs_link
from kvrelay.gateway.serving import make_server
from kvrelay.gateway.settings import GatewaySettings
from kvrelay.gateway.shared_memory import SharedMemory
from kvrelay.gateway.siblings import Siblings

logger = logging.getLogger(__name__)


def main() -> int:
    """Serve until SIGTERM; returns the exit code. What the operator has to know is told by the parent."""
    link_fd, listener_fd, memory_fd, parent_pid = map(int, sys.argv[1:])
    end_with_parent(parent_pid)
    link = childs_link(socket.socket(fileno=link_fd))
    assignment = link.receive_now()
    if not isinstance(assignment, Assignment):
        return 1  # the parent has ended
    settings, index = assignment.settings, assignment.index
    configure_logs(settings.log_level, settings.log_format, gateway_process=index)
    metrics = GatewayMetrics(CollectorRegistry())
    siblings = Siblings(link, SharedMemory(memory_fd, assignment.num_processes), index, metrics.registry)
    try:
        server = make_server(share_of(settings, index, assignment.num_processes), metrics, siblings)
    except KvrelayError as error:
        link.send_now(CannotServe(str(error), isinstance(error, SettingsError)))
        return 1
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(_serve(server, siblings, socket.socket(fileno=listener_fd)))
    return 0


async def _serve(server: HttpServer, siblings: Siblings, listener: socket.socket) -> None:
    async def until_the_parent_ends() -> None:
        await siblings.listen()
        server.should_exit = True

    await siblings.open()
    listening = asyncio.create_task(until_the_parent_ends())
    await server.serve(sockets=[listener])
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    siblings.close()


def share_of(settings: GatewaySettings, index: int, num_processes: int) -> GatewaySettings:
    """What of the whole gateway's bounds the process ``index`` may take: equal parts, at least one of each.

    Connections are spread evenly over the processes, and so are the requests that wait.
    """
    http, relay = settings.http, settings.relay
    return dataclasses.replace(
        settings,
        http=dataclasses.replace(http, max_connections=part(http.max_connections, index, num_processes)),
        relay=dataclasses.replace(relay, max_queued=part(relay.max_queued, index, num_processes)),
    )


def part(whole: int, index: int, num_parts: int) -> int:
    """The ``index``-th of ``num_parts`` parts that add up to ``whole``; at least 1."""
    return max(1, whole // num_parts + (index < whole % num_parts))


if __name__ == "__main__":
    sys.exit(main())
