"""Fixtures of hand-offs over real sockets (:mod:`tests.wire.rig`) and of control links."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import zmq

from .links import Net
from .rig import Rig


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """Says which test leaves a socket open, and closes it: a failed test must not hang the run."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.socket(zmq.PAIR).close()  # what it opens for itself is open from here on
    yield context
    left_open = [socket for socket in context._sockets if not socket.closed]
    context.destroy(linger=0)
    assert left_open == []


@pytest.fixture(params=["tcp", "shared_memory"])
def path(request: pytest.FixtureRequest) -> str:
    """How blocks go."""
    return str(request.param)


@pytest.fixture
def rig(context: zmq.Context[zmq.Socket[bytes]], path: str) -> Iterator[Rig]:
    rig = Rig(context, "tcp://127.0.0.1:0", path=path)
    yield rig
    rig.close()


@pytest.fixture
def tcp_rig(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Rig]:
    """For what only a data socket can be sent."""
    rig = Rig(context, "tcp://127.0.0.1:0")
    yield rig
    rig.close()


@pytest.fixture
def sealed_rig(context: zmq.Context[zmq.Socket[bytes]], path: str) -> Iterator[Rig]:
    rig = Rig(context, "tcp://127.0.0.1:0", seals_kv=True, path=path)
    yield rig
    rig.close()


@pytest.fixture
async def net(context: zmq.Context[zmq.Socket[bytes]]) -> AsyncIterator[Net]:
    net = Net(context)
    yield net
    await net.stop(*reversed(net.to_stop))
    assert asyncio.all_tasks() == {asyncio.current_task()}, "a task is left"
