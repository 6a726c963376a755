"""Fixtures of hand-offs over real sockets (:mod:`tests.wire.rig`) and of control links."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import zmq

from .links import Net
from .rig import Rig
from .sending import NOWHERE, Sending


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """A context that fails the test if it leaves a socket open, and closes such sockets so that the run does not hang."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    # The context and pyzmq (for frames without a copy) open their own descriptors here, before a test counts any.
    context.socket(zmq.PAIR).close()
    zmq.Frame(bytes(1), copy=False, copy_threshold=0)
    yield context
    left_open = [socket for socket in context._sockets if not socket.closed]
    context.destroy(linger=0)
    assert left_open == []


@pytest.fixture(params=["tcp", "shared_memory"])
def path(request: pytest.FixtureRequest) -> str:
    """The path of KV blocks."""
    return str(request.param)


@pytest.fixture
def make_rig(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Callable[..., Rig]]:
    """Makes rigs, and closes them after the test, even if it fails: their threads must end before the context does."""
    with ExitStack() as rigs:

        def make(**options: Any) -> Rig:
            rig = Rig(context, **options)
            rigs.callback(rig.close)
            return rig

        yield make


@pytest.fixture
def rig(make_rig: Callable[..., Rig], path: str) -> Rig:
    return make_rig(path=path)


@pytest.fixture
def one_rig(make_rig: Callable[..., Rig]) -> Rig:
    """A rig over TCP, for tests to which the path of blocks makes no difference or that need a data socket."""
    return make_rig()


@pytest.fixture
def sealed_rig(make_rig: Callable[..., Rig], path: str) -> Rig:
    return make_rig(seals_kv=True, path=path)


@pytest.fixture
def sending(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Callable[..., Sending]]:
    """Makes block senders, and closes them after the test."""
    made: list[Sending] = []

    def make(address: str = NOWHERE, **options: Any) -> Sending:
        made.append(Sending(context, address, **options))
        return made[-1]

    yield make
    for one in made:
        one.sender.close()
        one.sender.join()


@pytest.fixture
def peer(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[zmq.Socket[bytes]]:
    """A socket that plays a sender's decode worker, with small receive buffers."""
    with context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        socket.rcvhwm = 1
        socket.rcvbuf = 2**16
        yield socket


@pytest.fixture
async def net(context: zmq.Context[zmq.Socket[bytes]]) -> AsyncIterator[Net]:
    net = Net(context)
    yield net
    await net.stop(*reversed(net.to_stop))
    assert asyncio.all_tasks() == {asyncio.current_task()}, "a task is left"
