"""Periodic calls that sleep while there is nothing to do, connections whose other end is gone, and who moves which bytes."""

from __future__ import annotations

import asyncio

import pytest
import zmq

from kvrelay.common.errors import SettingsError
from kvrelay.common.settings import build
from kvrelay.decode_worker.settings import DecodeSettings
from kvrelay.prefill_worker.settings import PrefillSettings
from kvrelay.wire.control.ticker import every
from kvrelay.wire.settings import DataSettings, LinkSettings
from kvrelay.wire.sockets import (
    choose_data_thread,
    choose_data_threads,
    close_dead_connections,
    configure_control,
    num_network_threads,
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


@pytest.mark.parametrize(
    ("num_data_sockets", "control", "data"), [(1, 0b1, [0b1, 0b1]), (3, 0b1, [0b10, 0b100, 0b1000, 0b10])]
)
def test_blocks_and_control_messages_are_moved_by_different_threads(
    num_data_sockets: int, control: int, data: list[int]
) -> None:
    """With one data socket there is one thread for all, as ZeroMQ has it; with more each has its own."""
    with zmq.Context(num_network_threads(num_data_sockets)) as context, context.socket(zmq.DEALER) as socket:
        configure_control(socket, LinkSettings())
        assert socket.getsockopt(zmq.AFFINITY) == control
        for number, thread in enumerate(data):
            choose_data_thread(socket, context, number)
            assert socket.getsockopt(zmq.AFFINITY) == thread
        choose_data_threads(socket, context)
        assert socket.getsockopt(zmq.AFFINITY) == (0b1110 if num_data_sockets == 3 else 0b1)
        socket.bind("tcp://127.0.0.1:0")  # the threads exist


@pytest.mark.parametrize("settings", [PrefillSettings, DecodeSettings])
def test_the_number_of_data_sockets_is_a_setting_of_workers(settings: type) -> None:
    assert build(settings, {"model": "demo", "data_sockets": "3"}).data.data_sockets == 3
    assert build(settings, {"model": "demo"}).data == DataSettings(data_sockets=1)
    for value in ("0", "17"):
        with pytest.raises(SettingsError, match="--data-sockets is"):
            build(settings, {"model": "demo", "data_sockets": value})
