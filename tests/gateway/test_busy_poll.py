"""A loop that does not sleep for a while after something happened, on a clock that the test turns."""

from __future__ import annotations

import asyncio
import os
import selectors
import socket
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import uvloop
from prometheus_client import CollectorRegistry

from kvrelay.common.settings import build
from kvrelay.gateway import serving as serving_module
from kvrelay.gateway.busy_poll import BusyPoll
from kvrelay.gateway.gathered_writes import GatheredWrites
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.reply import Exchange
from kvrelay.gateway.settings import GatewaySettings

from .http_port import GET, Recorder, answer, close, serving, until
from .test_gathered_writes import connections, turn_of_the_loop

_LOOK_S = 0.001  # that one look at the kernel takes


class Selector(selectors.DefaultSelector):
    """Sleeps in no time; ``slept`` has what it was asked to, and it turns the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.slept: list[float] = []

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "the loop waits for ever"
        self.slept.append(timeout)
        self.now_s += max(timeout, _LOOK_S)
        return super().select(0)


class Loop(asyncio.SelectorEventLoop):
    """One with that clock."""

    def __init__(self) -> None:
        self.clock = Selector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now_s


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


def _sleeps(loop: Loop, poll_s: float, touches: int, *, apart_s: float) -> list[float]:
    """How long the loop slept at a time, while there was a touch now and then, and 10 s behind the last one."""

    async def run() -> None:
        poll = BusyPoll(poll_s)
        for _ in range(touches):
            poll.touch()
            await asyncio.sleep(apart_s)
        await asyncio.sleep(10)
        assert not poll.is_polling

    loop.run_until_complete(run())
    return [slept for slept in loop.clock.slept if slept > 0]


def test_it_looks_for_so_long_behind_each_touch_and_then_sleeps(loop: Loop) -> None:
    sleeps = _sleeps(loop, 0.05, 3, apart_s=0.03)
    assert sleeps == [pytest.approx(10 - 0.02, abs=0.005)]  # the rest of the 10 s, in one piece
    assert len(loop.clock.slept) > 3 * 0.03 / _LOOK_S


def test_between_touches_that_are_far_apart_it_sleeps(loop: Loop) -> None:
    assert _sleeps(loop, 0.05, 2, apart_s=1.0) == [
        pytest.approx(0.95, abs=0.005),
        pytest.approx(0.95, abs=0.005),
        pytest.approx(10, abs=0.005),
    ]


def test_without_a_time_it_always_sleeps(loop: Loop) -> None:
    assert _sleeps(loop, 0.0, 2, apart_s=1.0) == [pytest.approx(1), pytest.approx(1), pytest.approx(10)]


def test_between_two_looks_the_core_is_offered_to_others(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    offered: list[float] = []
    monkeypatch.setattr(os, "sched_yield", lambda: offered.append(loop.time()))
    _sleeps(loop, 0.05, 1, apart_s=0.0)
    assert len(offered) >= 0.9 * 0.05 / _LOOK_S
    assert len(set(offered)) >= 0.9 * len(offered)  # once a look


@pytest.mark.parametrize("new_loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_what_comes_between_two_looks_is_read(
    monkeypatch: pytest.MonkeyPatch, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """The gateway's loop is uvloop's: there, too, callbacks that follow each other leave room for what the kernel has."""
    ours, theirs = socket.socketpair()
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            theirs.send(b"a token")

    async def run() -> tuple[bytes, bool]:
        loop = asyncio.get_running_loop()
        came: asyncio.Future[bytes] = loop.create_future()
        loop.add_reader(ours, lambda: came.set_result(ours.recv(100)))
        poll = BusyPoll(60)
        poll.touch()
        async with asyncio.timeout(30):
            data = await came
        loop.remove_reader(ours)
        return data, poll.is_polling

    monkeypatch.setattr(os, "sched_yield", look)
    loop = new_loop()
    try:
        assert loop.run_until_complete(run()) == (b"a token", True)
    finally:
        loop.close()
        ours.close()
        theirs.close()
    assert looks < 10


async def test_what_is_written_keeps_it_looking() -> None:
    (cycle,), log = connections(1)
    poll = BusyPoll(60)
    writes = GatheredWrites(poll)
    writes.add(cycle, b"a")
    assert not poll.is_polling
    await turn_of_the_loop()
    assert (log, poll.is_polling) == ([("0", b"a")], True)


async def test_a_first_token_keeps_it_looking() -> None:
    """It goes past the gathered ones, and may come long behind its request."""
    cycle = Mock(disconnected=False, response_started=False, default_headers=[], keep_alive=True)
    cycle.flow.write_paused = False
    poll = BusyPoll(60)
    assert Exchange(cycle, GatheredWrites(poll)).begin((), b"a")
    assert poll.is_polling
    assert cycle.transport.write.call_count == 1


@pytest.mark.parametrize("poll_s", [0.0, 60.0])
async def test_what_comes_keeps_a_server_looking(poll_s: float) -> None:
    async with serving(Recorder(), busy_poll_s=poll_s) as port:
        poll = port.server._busy_poll
        reader, writer = await port.connect()
        assert not poll.is_polling  # somebody only connected
        writer.write(GET[:10])
        await writer.drain()
        if poll_s:
            await until(lambda: poll.is_polling)
        writer.write(GET[10:])
        assert b"200 OK" in await answer(reader)
        assert poll.is_polling == (poll_s > 0)
        await close(writer)


def test_the_setting_is_in_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(serving_module, "create_app", lambda *_, **__: None)
    monkeypatch.setattr(serving_module, "HttpServer", lambda *_, busy_poll_s, **__: asked.append(busy_poll_s))
    monkeypatch.setattr(serving_module, "gc", Mock())  # what the tests have loaded is not to stay
    for given in ({"busy_poll_ms": 50}, {}):
        serving_module.make_server(build(GatewaySettings, given), GatewayMetrics(CollectorRegistry()))
    assert asked == [pytest.approx(0.05), 0]
