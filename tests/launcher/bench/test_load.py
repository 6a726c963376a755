"""Sending: the open loop does not wait, the closed loop does, and no request is lost or left running."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest

from kvrelay.common.settings import build
from kvrelay.launcher.bench import load
from kvrelay.launcher.bench.bodies import BodyWriter
from kvrelay.launcher.bench.client import Answer as ClientAnswer
from kvrelay.launcher.bench.client import StreamingClient
from kvrelay.launcher.bench.load import LoadRunner, Vain
from kvrelay.launcher.bench.records import RequestRecord
from kvrelay.launcher.bench.settings import BenchSettings
from kvrelay.launcher.bench.workload import plan_workload
from tests.launcher.bench.results import result
from tests.launcher.bench.stub_server import Answer, Request, StubServer, as_asked


@pytest.fixture
def server(own_server: StubServer) -> StubServer:
    return own_server


async def run(server: StubServer, client: type[StreamingClient] = StreamingClient, **values: Any) -> LoadRunner:
    """Run a load to its end and return its runner."""
    runner, made = runner_for(server, client, **values)
    await runner.run()
    await made.close()
    return runner


def runner_for(
    server: StubServer, client: type[StreamingClient] = StreamingClient, **values: Any
) -> tuple[LoadRunner, StreamingClient]:
    started_s = time.monotonic()

    def clock() -> float:
        return time.monotonic() - started_s

    settings = build(BenchSettings, {"output_len": "2", "input_len": "4", "warmup": "0", "prompt_seed": 1, **values})
    made = client(server.url, "completions", timeout_s=20, clock=clock)
    writer = BodyWriter(settings, "stub")
    return LoadRunner(made, writer, plan_workload(settings), clock=clock, exact_output=True), made


class Holding:
    """Answers that wait until ``num`` requests are running."""

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
    server.answer = holding = Holding(12)  # no request is answered before all twelve have arrived
    runner = await run(server, rate=100, requests=12)
    records = runner.records
    assert holding.most == 12
    assert sorted(record.index for record in records) == list(range(12))
    assert all(record.error is None and record.sent_s >= record.due_s for record in records)
    assert runner.num_sent == 12
    assert {(record.prompt_tokens, record.output_tokens, len(record.chunk_s)) for record in records} == {(4, 2, 2)}


async def test_the_closed_loop_keeps_its_concurrency(server: StubServer) -> None:
    ends: list[float] = []

    class Client(StreamingClient):
        async def ask(self, *args: Any, **values: Any) -> Any:
            answer = await super().ask(*args, **values)
            ends.append(answer.ended_s)
            return answer

    server.answer = holding = Holding(3)
    records = (await run(server, Client, concurrency=3, requests=20)).records
    assert holding.most == 3
    assert len(records) == 20
    assert server.num_connections == 3
    # A request is due when the answer before it ended. The time from then to its sending is the generator's delay.
    assert all(record.due_s in {0.0, *ends} for record in records)
    for place in places_of(records):
        assert place[0].due_s == 0.0
        assert all(before.finished_s <= after.due_s <= after.sent_s for before, after in itertools.pairwise(place))


def places_of(records: list[RequestRecord]) -> list[list[RequestRecord]]:
    """The requests of each place in order. A request follows the answer that ended last before it was due."""
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
    runner, client = runner_for(server, concurrency=1, duration_s=600)
    task = asyncio.create_task(runner.run())
    await arrived.wait()
    runner.stop()
    await task
    await client.close()
    assert [record.error for record in runner.records] == [None, None]
    assert runner.is_stopped


async def test_a_closed_loop_that_begins_late_is_late() -> None:
    """Requests of a closed loop have no planned times. The first ones are due at the start of the run, so sending them
    late counts."""
    runner = simple_runner(concurrency=2, requests=2)
    await runner.run()
    assert [record.due_s for record in runner.records] == [0.0, 0.0]


async def test_between_requests_that_are_due_together_chunks_are_noted() -> None:
    """Each request schedules a chunk for the loop's next turn. Chunks are handled between the requests that are due
    together."""
    events: list[str] = []

    def on_ask() -> None:
        events.append("sent")
        asyncio.get_running_loop().call_soon(events.append, "chunk")

    await simple_runner(on_ask, rate=100, requests=10).run()
    assert events.count("sent") == 10
    assert "sent sent sent sent" not in " ".join(events)


async def test_a_mistake_of_ours_ends_the_run() -> None:
    def on_ask() -> None:
        raise ZeroDivisionError("a bug")

    for values in ({"rate": 10, "requests": 2}, {"concurrency": 2, "requests": 4}):
        with pytest.raises(ExceptionGroup):
            await simple_runner(on_ask, **values).run()


def simple_runner(on_ask: Callable[[], None] = lambda: None, client: Any = None, **values: Any) -> LoadRunner:
    """A runner whose clock stands at 100 s. Without ``client`` every request is answered at once."""

    class Client:
        async def ask(self, body: bytes, *, exact_tokens: int | None) -> ClientAnswer:
            on_ask()
            return ClientAnswer(sent_s=100.0, output_tokens=2)

    settings = build(BenchSettings, {"warmup": "0", "prompt_seed": 1, **values})
    made, writer = cast(StreamingClient, client or Client()), BodyWriter(settings, "stub")
    return LoadRunner(made, writer, plan_workload(settings), clock=lambda: 100.0, exact_output=True)


def failing(*errors: str | None, gap_s: float = 0.2, oldest: int | None = None) -> list[str | None]:
    """What is said after each of the requests that end ``gap_s`` apart with these errors, while ``oldest`` is under way."""
    vain, plain = Vain(), result().requests[0]
    ended = [
        msgspec.structs.replace(plain, finished_s=gap_s * place, error=error, error_text="why")
        for place, error in enumerate(errors)
    ]
    return [vain.reason(record, number, oldest) for number, record in enumerate(ended)]


def test_requests_are_in_vain_if_many_in_a_row_are_refused_or_find_nobody() -> None:
    assert failing(*["http 400"] * 19, "connection")[18:] == [
        None,
        "the last 20 requests failed, at the end with connection: why",
    ]
    assert not any(failing(*["http 400"] * 19, None, *["connection"] * 19)), "one is answered in between"
    for passing in ("http 429", "http 503", "timeout", "broken stream", "short answer"):
        assert not any(failing(*[passing] * 40)), "a server with too much to do is measured"
    assert not any(failing(*["connection"] * 40, gap_s=0.01)), "a server restarts"


def test_requests_are_not_in_vain_while_an_earlier_one_may_be_answered() -> None:
    assert not any(failing(*["http 400"] * 40, oldest=10))
    assert failing(*["http 400"] * 20, oldest=20)[-1] is not None, "20 before it were refused"


async def test_a_run_goes_on_while_others_are_being_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_IN_VAIN_S", 0.0)
    asked = itertools.count()
    all_refused = asyncio.Event()

    class Client:
        async def ask(self, body: bytes, *, exact_tokens: int | None) -> ClientAnswer:
            number = next(asked)
            if number % 2 == 0:
                await all_refused.wait()
            elif number >= 79:
                all_refused.set()
            return ClientAnswer(sent_s=100.0, output_tokens=2, error="http 400" if number % 2 else None)

    runner = simple_runner(client=Client(), rate=100, requests=80)
    await runner.run()
    assert (len(runner.records), runner.in_vain) == (80, None)
