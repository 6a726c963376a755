"""Sending: the open loop does not wait, the closed loop does, and nothing is lost or left behind."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvrelay.common.settings import build
from kvrelay.launcher.bench.bodies import BodySpec, BodyWriter
from kvrelay.launcher.bench.client import StreamingClient
from kvrelay.launcher.bench.http_stream import HttpStreams, ServerAddress
from kvrelay.launcher.bench.load import LoadRunner
from kvrelay.launcher.bench.records import RequestRecord
from kvrelay.launcher.bench.settings import BenchSettings
from kvrelay.launcher.bench.spec import workload_spec
from kvrelay.launcher.bench.workload import plan_workload
from tests.launcher.bench.stub_server import Answer, Request, StubServer, as_asked

BODY = BodySpec("stub", "completions", 1)


@pytest.fixture
async def server() -> AsyncIterator[StubServer]:
    async with StubServer().running() as stub:
        yield stub


def runner_for(streams: HttpStreams, client: type[StreamingClient] = StreamingClient, **values: Any) -> LoadRunner:
    started_s = time.monotonic()

    def clock() -> float:
        return time.monotonic() - started_s

    return LoadRunner(
        client(streams, "completions", timeout_s=20, clock=clock),
        BodyWriter(BODY),
        plan_workload(
            workload_spec(build(BenchSettings, {"output_len": "2", "input_len": "4", "warmup": "0", **values}))
        ),
        clock=clock,
        exact_output=True,
    )


class Holding:
    """Answers that wait until ``num`` requests are there at a time."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.running = 0
        self.most = 0
        self.enough = asyncio.Event()

    def __call__(self, request: Request) -> Answer:
        self.running += 1
        self.most = max(self.most, self.running)
        if self.running >= self.num:
            self.enough.set()
        answer = as_asked(request)
        answer.wait = self.wait
        return answer

    async def wait(self) -> None:
        await self.enough.wait()
        self.running -= 1


async def test_the_open_loop_does_not_wait_for_answers(server: StubServer) -> None:
    server.answer = holding = Holding(12)  # nothing is answered before all have come
    streams = HttpStreams(ServerAddress(server.url), {})
    runner = runner_for(streams, rate=100, requests=12)
    records = await runner.run()
    await streams.close()
    assert holding.most == 12
    assert sorted(record.index for record in records) == list(range(12))
    assert all(record.error is None and record.sent_s >= record.due_s for record in records)
    assert (runner.counts.sent, runner.counts.answered, runner.counts.chunks) == (12, 12, 24)
    assert {(record.prompt_tokens, record.output_tokens, len(record.chunk_s)) for record in records} == {(4, 2, 2)}


async def test_the_closed_loop_keeps_its_concurrency(server: StubServer) -> None:
    ends: list[float] = []

    class Client(StreamingClient):
        async def ask(self, *args: Any, **values: Any) -> Any:
            answer = await super().ask(*args, **values)
            ends.append(answer.ended_s)
            return answer

    server.answer = holding = Holding(3)
    streams = HttpStreams(ServerAddress(server.url), {})
    records = await runner_for(streams, Client, concurrency=3, requests=20, warmup="4").run()
    await streams.close()
    assert holding.most == 3
    assert len(records) == 24
    assert sum(record.is_warmup for record in records) == 4
    assert server.num_connections == 3
    # Each place is free when its answer before has ended: what passes until the next sending is the generator's.
    assert all(record.due_s in {0.0, *ends} for record in records)
    for place in places_of(records):
        assert place[0].due_s == 0.0
        assert all(before.finished_s <= after.due_s <= after.sent_s for before, after in itertools.pairwise(place))


def places_of(records: list[RequestRecord]) -> list[list[RequestRecord]]:
    """The requests of each place in their order: a request follows the answer that ended last before it was due."""
    places: list[list[RequestRecord]] = []
    for record in sorted(records, key=lambda one: one.sent_s):
        free = [place for place in places if place[-1].finished_s <= record.due_s]
        if record.due_s == 0.0:
            places.append([record])
        else:
            max(free, key=lambda place: place[-1].finished_s).append(record)
    return places


async def test_stop_gives_up_what_is_under_way_and_keeps_what_ended(server: StubServer) -> None:
    arrived = asyncio.Event()

    def answer(request: Request) -> Answer:
        given = as_asked(request)
        if len(server.requests) > 2:
            given.wait = asyncio.Event().wait  # type: ignore[assignment]
            arrived.set()
        return given

    server.answer = answer
    streams = HttpStreams(ServerAddress(server.url), {})
    runner = runner_for(streams, concurrency=1, duration_s=600)
    task = asyncio.create_task(runner.run())
    await arrived.wait()
    runner.stop()
    records = await task
    await streams.close()
    assert [record.error for record in records] == [None, None]
    assert runner.is_stopped
