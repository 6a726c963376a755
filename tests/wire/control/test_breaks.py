"""What a worker's control socket notices of connections that break."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from kvrelay.wire.messages import Hello, Role, Welcome

from ..links import WAIT_S, Net, next_of

NUM_BREAKS = 2500  # a queue of ZeroMQ holds 2000 by default


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "ipc://{tmp_path}/control"])
async def test_a_client_whose_connection_breaks_is_lost_long_before_it_was_silent(
    net: Net, address: str, tmp_path: Path
) -> None:
    worker, _, _, client = await net.linked(address=address.format(tmp_path=tmp_path))
    with net.raw(net.address) as killed:
        assert isinstance(await killed.ask(Hello(role=Role.GATEWAY, peer_id="killed")), Welcome)
    assert await next_of(worker.lost) == "killed"
    assert net.counted("lost_peers") == 1
    assert client.is_up


async def test_a_flood_of_breaks_stops_no_other_connection_while_the_loop_is_busy(net: Net) -> None:
    """A queue of breaks that nobody reads would be full one day, and ZeroMQ's thread would wait there."""
    _, _, initiator, _ = await net.linked()
    place = ("127.0.0.1", int(net.address.rsplit(":", 1)[1]))
    for _ in range(NUM_BREAKS):
        socket.create_connection(place, WAIT_S).close()
    greeting = b""
    with socket.create_connection(place, WAIT_S) as honest, contextlib.suppress(TimeoutError):
        greeting = honest.recv(1)
    while not initiator.statuses.empty():
        initiator.statuses.get_nowait()
    await next_of(initiator.statuses)  # the loop has read all breaks
    assert greeting
