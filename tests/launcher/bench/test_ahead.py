"""Bodies are made before they are needed and in small steps; nothing that is due together holds up anything else."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import cast

import pytest

from kvrelay.common.settings import build
from kvrelay.launcher.bench.ahead import AHEAD_S, BodiesAhead
from kvrelay.launcher.bench.bodies import BodySpec, BodyWriter
from kvrelay.launcher.bench.client import Answer, StreamingClient
from kvrelay.launcher.bench.load import LoadRunner
from kvrelay.launcher.bench.prepare import making_s
from kvrelay.launcher.bench.settings import BenchSettings
from kvrelay.launcher.bench.spec import workload_spec
from kvrelay.launcher.bench.workload import Piece, PlannedRequest, Workload, plan_workload


def request(number: int, due_s: float | None, num_tokens: int = 4) -> PlannedRequest:
    return PlannedRequest("main", number, False, due_s, (Piece(f"main/{number}", num_tokens, is_shared=False),), 2)


def writer() -> BodyWriter:
    return BodyWriter(BodySpec("m", "completions", 1))


class Noting(BodyWriter):
    """Notes which bodies it has made."""

    def __init__(self, spec: BodySpec) -> None:
        super().__init__(spec)
        self.made: list[int] = []

    async def make(self, request: PlannedRequest) -> bytes:
        body = await super().make(request)
        self.made.append(request.number)
        return body


async def turns_during(work: asyncio.Task[bytes]) -> int:
    """How often others came to run until ``work`` had ended."""
    num = 0
    while not work.done():
        num += 1
        await asyncio.sleep(0)
    return num


@pytest.mark.parametrize("is_shared", [False, True])
async def test_a_long_body_leaves_turns_to_others(is_shared: bool) -> None:
    piece = Piece("long", 100_000, is_shared)
    work = asyncio.create_task(writer().make(PlannedRequest("main", 0, False, None, (piece,), 2)))
    assert await turns_during(work) > 100
    assert work.result().count(b",") >= 99_999


async def test_a_shared_piece_is_made_once() -> None:
    shared, one = writer(), Piece("long", 100_000, is_shared=True)
    first = await shared.make(PlannedRequest("main", 0, False, None, (one,), 2))
    again = asyncio.create_task(shared.make(PlannedRequest("main", 1, False, None, (one,), 2)))
    assert await turns_during(again) < 5
    assert again.result() == first


async def test_bodies_are_there_before_they_are_due_and_no_earlier_than_need_be() -> None:
    """The clock stands still at 0: what is made now is made before its time."""
    requests = [request(0, 0.0), request(1, AHEAD_S - 1), request(2, AHEAD_S + 1000)]
    ahead = BodiesAhead(writer(), requests, lambda: 0.0)
    work = asyncio.create_task(ahead.run())
    given = [await ahead.next() for _ in range(2)]
    assert [ready[0].number for ready in given if ready is not None] == [0, 1]
    third = asyncio.create_task(ahead.next())
    for _ in range(100):
        await asyncio.sleep(0)
    assert not third.done()
    for task in (work, third):
        task.cancel()
    await asyncio.gather(work, third, return_exceptions=True)


async def test_no_more_are_kept_than_a_closed_loop_may_send_at_once() -> None:
    noting = Noting(BodySpec("m", "completions", 1))
    ahead = BodiesAhead(noting, (request(number, None) for number in range(100)), lambda: 0.0, max_num=3)
    work = asyncio.create_task(ahead.run())
    for _ in range(1000):
        await asyncio.sleep(0)
    assert noting.made == [0, 1, 2, 3]  # three are kept, one is in hand
    ready = await ahead.next()
    assert ready is not None
    assert ready[0].number == 0
    for _ in range(100):
        await asyncio.sleep(0)
    assert noting.made[-1] == 4
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


class NotingClient:
    """Answers at once; a chunk, as from a socket, comes in the next turn of the loop."""

    def __init__(self) -> None:
        self.events: list[str] = []

    async def ask(self, body: bytes, *, exact_tokens: int | None, on_chunk: Callable[[], None]) -> Answer:
        number = len(self.events)
        self.events.append("sent")
        asyncio.get_running_loop().call_soon(self.events.append, "chunk")
        return Answer(sent_s=float(number), output_tokens=2)


def runner(client: NotingClient, workload: Workload) -> LoadRunner:
    return LoadRunner(cast(StreamingClient, client), writer(), workload, clock=lambda: 100.0, exact_output=True)


async def test_between_requests_that_are_due_together_chunks_are_noted() -> None:
    noting, client = Noting(BodySpec("m", "completions", 1)), NotingClient()

    def clock() -> float:
        """They are due once all bodies are there: making them is no pause between the sendings."""
        return 1.0 if len(noting.made) == 10 else 0.0

    workload = Workload(tuple(request(number, 0.01) for number in range(10)), None)
    await LoadRunner(cast(StreamingClient, client), noting, workload, clock=clock, exact_output=True).run()
    sent = [place for place, event in enumerate(client.events) if event == "sent"]
    assert len(sent) == 10
    assert max(after - before for before, after in itertools.pairwise(sent)) <= 3
    assert client.events[: sent[-1]].count("chunk") >= 8


async def test_a_closed_loop_that_begins_late_is_late() -> None:
    """Nothing is planned for a time, but its places should have been full from the start of the run on."""
    workload = plan_workload(workload_spec(build(BenchSettings, {"concurrency": 2, "requests": 2, "output_len": "2"})))
    records = await runner(NotingClient(), workload).run()  # its clock says 100 s
    assert [record.due_s for record in records] == [0.0, 0.0]


async def test_a_mistake_in_the_making_ends_the_run() -> None:
    class Failing(BodyWriter):
        async def make(self, request: PlannedRequest) -> bytes:
            raise ZeroDivisionError("a bug")

    failing = Failing(BodySpec("m", "completions", 1))
    for values in ({"rate": 10, "requests": 2}, {"concurrency": 2, "requests": 4}):
        workload = plan_workload(workload_spec(build(BenchSettings, values)))
        load = LoadRunner(
            cast(StreamingClient, NotingClient()), failing, workload, clock=lambda: 100.0, exact_output=True
        )
        with pytest.raises(ZeroDivisionError, match="a bug"):
            await load.run()


def test_the_run_begins_when_the_first_bodies_can_be_there() -> None:
    def seconds(**values: object) -> float:
        return making_s(plan_workload(workload_spec(build(BenchSettings, values))))

    assert seconds(concurrency=8, input_len="100000") == pytest.approx(0.8)
    assert seconds(rate=1, arrival="constant", input_len="100000") == pytest.approx(0.1)
    assert seconds(concurrency=1000, input_len="100000") == 10.0
