"""Periodic calls that sleep while there is nothing to do, and the options that detect dead connections."""

from __future__ import annotations

import asyncio

import pytest
import zmq

from kvrelay.wire.control.ticker import every
from kvrelay.wire.sockets import (
    close_dead_connections,
)


async def test_calls_are_made_only_while_there_is_work(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: asyncio.Queue[float] = asyncio.Queue()
    go_on = asyncio.Semaphore(0)

    async def sleep(seconds: float) -> None:
        slept.put_nowait(seconds)
        await go_on.acquire()

    monkeypatch.setattr("kvrelay.wire.control.ticker.asyncio.sleep", sleep)
    has_work, called = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(every(0.5, called.set, while_set=has_work))
    for _ in range(3):
        loop_turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(loop_turn.set_result, None)
        await loop_turn
    assert slept.empty()  # no timer runs
    has_work.set()
    assert await asyncio.wait_for(slept.get(), 10) == 0.5
    go_on.release()
    await asyncio.wait_for(called.wait(), 10)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_what_a_call_raises_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    calls: asyncio.Queue[None] = asyncio.Queue()

    def call() -> None:
        calls.put_nowait(None)
        raise RuntimeError("once more")

    task = asyncio.create_task(every(0.0, call))
    for _ in range(2):
        await asyncio.wait_for(calls.get(), 10)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert "a periodic call failed" in caplog.text


def test_the_kernel_probes_silent_connections() -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        close_dead_connections(socket, 9.0)
        options = (zmq.TCP_KEEPALIVE, zmq.TCP_KEEPALIVE_IDLE, zmq.TCP_KEEPALIVE_INTVL, zmq.TCP_KEEPALIVE_CNT)
        assert [socket.getsockopt(option) for option in options] == [1, 9, 3, 3]
