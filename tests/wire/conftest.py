"""Fixtures of hand-offs over real sockets (:mod:`tests.wire.rig`) and of control links."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import zmq

from kvrelay.wire.sockets import num_network_threads

from .links import Net
from .rig import Rig

NUM_SOCKETS = 3


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """Says which test leaves a socket open, and closes it: a failed test must not hang the run."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=num_network_threads(NUM_SOCKETS))
    # What both open for themselves is open from here on: the context, and pyzmq for frames that are not copied.
    context.socket(zmq.PAIR).close()
    zmq.Frame(bytes(1), copy=False, copy_threshold=0)
    yield context
    left_open = [socket for socket in context._sockets if not socket.closed]
    context.destroy(linger=0)
    assert left_open == []


@pytest.fixture(
    params=[1, pytest.param(NUM_SOCKETS, marks=pytest.mark.full)], ids=["1_socket", f"{NUM_SOCKETS}_sockets"]
)
def num_sockets(request: pytest.FixtureRequest) -> int:
    """Data sockets of a link, and receiving threads."""
    return int(request.param)


_FULL = [pytest.param(name, marks=pytest.mark.full) for name in ("tcp_3_sockets", "shared_memory_3_sockets")]


@pytest.fixture(params=["tcp", "shared_memory", *_FULL])
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    """How blocks go, as a rig's arguments."""
    path, several, _ = request.param.partition("_3_sockets")
    return {"path": path, "num_sockets": NUM_SOCKETS if several else 1}


@pytest.fixture
def rig(context: zmq.Context[zmq.Socket[bytes]], way: dict[str, Any]) -> Iterator[Rig]:
    rig = Rig(context, "tcp://127.0.0.1:0", **way)
    yield rig
    rig.close()


@pytest.fixture
def one_rig(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Rig]:
    """For what no way of blocks makes a difference to."""
    rig = Rig(context, "tcp://127.0.0.1:0")
    yield rig
    rig.close()


@pytest.fixture
def tcp_rig(context: zmq.Context[zmq.Socket[bytes]], num_sockets: int) -> Iterator[Rig]:
    """For what only a data socket can be sent."""
    rig = Rig(context, "tcp://127.0.0.1:0", num_sockets=num_sockets)
    yield rig
    rig.close()


@pytest.fixture
def sealed_rig(context: zmq.Context[zmq.Socket[bytes]], way: dict[str, Any]) -> Iterator[Rig]:
    rig = Rig(context, "tcp://127.0.0.1:0", seals_kv=True, **way)
    yield rig
    rig.close()


@pytest.fixture
async def net(context: zmq.Context[zmq.Socket[bytes]]) -> AsyncIterator[Net]:
    net = Net(context)
    yield net
    await net.stop(*reversed(net.to_stop))
    assert asyncio.all_tasks() == {asyncio.current_task()}, "a task is left"
