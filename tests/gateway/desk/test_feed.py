"""The feed of events to open consoles, and its cost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Message, Scope

from kvrelay.gateway.desk.feed import MAX_BYTES_PER_S, Feed
from kvrelay.gateway.desk.figures import Figures, Tally
from kvrelay.gateway.desk.records import NUM_KEPT, Records
from kvrelay.gateway.http.request import ApiRequest
from kvrelay.gateway.http.sse import EventStream
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.model import Model, ModelFiles, Models
from kvrelay.gateway.relay.request import AttemptNote, RequestTimings
from kvrelay.wire.messages import FailureCode, Submit

from ..clock import Clock
from ..http_app import TEXT, app_for, http_only
from ..http_port import close, serving
from ..players import PROMPT, Player, Stage, failing, good, stage, until
from .test_records import arrived, never, sequence

Event = tuple[str, Any]


class Looker:
    """A client that follows the feed, over ASGI."""

    def __init__(self, feed: Feed) -> None:
        self.sent: list[bytes] = []
        self.more = asyncio.Event()
        self.may_read = asyncio.Event()
        self.may_read.set()
        arrived_request: ApiRequest = arrived("looker")
        scope: Scope = {"type": "http", "state": {"api_request": arrived_request}}
        self.task = asyncio.create_task(EventStream(feed.follow, lambda _: b"")(scope, never, self.send))

    async def send(self, message: Message) -> None:
        await self.may_read.wait()
        self.sent.append(message.get("body", b""))
        self.more.set()

    async def events(self, number: int) -> list[Event]:
        """The first ``number`` events. Waits until they have arrived."""
        async with asyncio.timeout(20):
            while len(parsed := events_of(b"".join(self.sent))) < number:
                self.more.clear()
                await self.more.wait()
        return parsed[:number]

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def events_of(sent: bytes) -> list[Event]:
    blocks = [block.split(b"\n") for block in sent.split(b"\n\n")[:-1]]
    return [(head.removeprefix(b"event: ").decode(), json.loads(data.removeprefix(b"data: "))) for head, data in blocks]


def feed_of(
    s: Stage, directory: Path, clock: Callable[[], float], is_ending: Callable[[], bool] = lambda: False
) -> tuple[Feed, Records]:
    records = Records(clock, lambda: 1000.0)
    model = Model("tiny", ModelFiles.load(directory), s.relay)
    return Feed(Models([model]), s.metrics, records, clock, is_ending), records


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.gateway.desk.feed.EVERY_S", 0.01)
    monkeypatch.setattr("kvrelay.gateway.desk.feed.MAX_BYTES_PER_S", 1e9)


async def test_what_is_there_and_what_it_does(model_directory: Path, clock: Clock) -> None:
    begun: asyncio.Queue[tuple[Player, Submit]] = asyncio.Queue()
    async with stage(good, prefill=lambda *play: begun.put_nowait(play)) as s:
        prefill, decode = s.pool.workers
        await until(s.pool, lambda: prefill.status is not None and decode.status is not None)
        feed, records = feed_of(s, model_directory, clock)
        first = Looker(feed)
        [(_, known), (_, state)] = await first.events(2)
        assert known["models"] == ["tiny"]
        assert [(one["role"], one["address"]) for one in known["workers"]] == [
            ("prefill", prefill.address), ("decode", decode.address),
        ]  # fmt: skip
        assert [one[:2] for one in state["workers"]] == [["up", "closed"], ["up", "closed"]]
        assert (state["num_running"], state["num_queued"], state["flows"]) == (0, 0, [])
        running = asyncio.create_task(s.run())
        await begun.get()
        request = arrived("r", sequence(RequestTimings(clock())))
        s.relay.metrics.tokens.on_prompt(200 - len(PROMPT))  # beside that of the request that runs
        s.relay.metrics.tokens.on_cached(50)
        s.relay.metrics.tokens.on_tokens(40, 0.004)
        s.relay.metrics.ttft_s.observe(0.2)
        s.relay.metrics.part_s.labels("prefill").observe(0.15)
        records.begin(request)
        clock.now_s += 5
        late = Looker(feed)
        assert [name for name, _ in await late.events(3)] == ["roster", "state", "state"]
        state = (await late.events(3))[2][1]
        assert state["num_running"] == 1
        assert (state["figures"]["prompt_tokens_per_s"], state["figures"]["output_tokens_per_s"]) == (40, 8)
        assert state["figures"]["cached"] == 0.25
        assert 0.1 <= state["figures"]["ttft_s"][0] <= 0.25
        assert 0.0025 <= state["figures"]["itl_s"][1] <= 0.005
        assert state["figures"]["parts_s"]["prefill"] == 0.15
        running.cancel()
        await asyncio.gather(running, first.leave(), late.leave(), return_exceptions=True)


async def test_flows_are_right_when_more_requests_end_than_are_kept(model_directory: Path, clock: Clock) -> None:
    async with stage(good, prefill=good) as s:
        feed, records = feed_of(s, model_directory, clock)
        pair = tuple(worker.address for worker in s.pool.workers)
        for number in range(2 * NUM_KEPT):  # in 10 s, with 5 prompt tokens each
            timings = RequestTimings(clock())
            timings.on_attempt(AttemptNote(pair, "", clock(), 0, 1))
            request = arrived(f"r{number}", sequence(timings))
            records.begin(request)
            records.end(request, "/")
            clock.now_s += 0.005
        looker = Looker(feed)
        [_, (_, state)] = await looker.events(2)
        assert state["flows"] == [[0, 1, 1000]], "prompt tokens a second"
        await looker.leave()


async def test_over_a_socket(model_directory: Path) -> None:
    bad = failing(FailureCode.INTERNAL, times=1)
    async with (
        app_for(model_directory, bad, relay={"max_attempts": 1}) as app,
        serving(http_only(app.asgi)) as port,
    ):
        failed = await app.client.post(TEXT, json={"prompt": "x"}, headers={"x-request-id": "bad"})
        assert failed.status_code == 502
        reader, writer = await port.connect()
        writer.write(b"GET /debug/live HTTP/1.1\r\nhost: x\r\n\r\n")
        said = await asyncio.wait_for(reader.readuntil(b'"errors":[['), 20)
        said += await asyncio.wait_for(reader.readuntil(b"\n\n"), 20)
        assert b"content-type: text/event-stream" in said
        state = json.loads(said[said.rindex(b"data: ") + 6 :])
        assert [one[1:] for one in state["errors"]] == [["bad", 502, "attempts_failed"]]
        assert [pair[:2] for pair in state["flows"]] == [[-1, 0]]
        await close(writer)


async def test_nothing_is_made_while_nobody_looks(model_directory: Path, clock: Clock) -> None:
    async with stage(good) as s:
        feed, _ = feed_of(s, model_directory, clock)
        for _ in range(2):
            lookers = [Looker(feed) for _ in range(3)]
            for looker in lookers:
                await looker.events(4)
            tickers = [task for task in asyncio.all_tasks() if "Feed._run" in repr(task)]
            assert len(tickers) == 1
            for looker in lookers:
                await looker.leave()
            await asyncio.wait(tickers, timeout=20)
            assert tickers[0].done()


async def test_a_worker_that_goes_is_told_at_once(model_directory: Path, clock: Clock) -> None:
    async with stage(good, prefill=good) as s:
        feed, _ = feed_of(s, model_directory, clock)
        looker = Looker(feed)
        await looker.events(2)
        await s.players[0].server.stop()
        await until(s.pool, lambda: not s.pool.prefills[s.players[0].address].is_usable)
        async with asyncio.timeout(20):
            number = 2
            while (event := (await looker.events(number))[-1])[0] != "roster":
                number += 1
        assert event[1]["workers"][0]["problem"]
        assert event[1]["workers"][0]["name"] == "w", "it has another name when it is down"
        assert (await looker.events(number + 1))[-1][1]["workers"][0][0] == "down"
        await looker.leave()


async def test_a_gateway_that_ends_ends_its_streams(model_directory: Path, clock: Clock) -> None:
    async with stage(good) as s:
        is_over = False
        feed, _ = feed_of(s, model_directory, clock, lambda: is_over)
        looker = Looker(feed)
        await looker.events(3)
        is_over = True
        await asyncio.wait_for(looker.task, 20)


async def test_who_is_behind_loses_the_stream_and_nobody_else_does(
    model_directory: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.gateway.http.sse.MAX_WAITING_BYTES", 2000)
    async with stage(good) as s:
        feed, _ = feed_of(s, model_directory, clock)
        deaf, keen = Looker(feed), Looker(feed)
        deaf.may_read.clear()
        await keen.events(20)
        deaf.may_read.set()
        await asyncio.wait_for(deaf.task, 20)
        assert len(b"".join(deaf.sent)) < 4000
        await keen.events(30)
        await keen.leave()


async def test_a_hundred_workers_stay_within_the_bound(model_directory: Path, clock: Clock) -> None:
    async with stage(*[good] * 50, prefill=[good] * 50) as s:
        for player in s.players:
            player.num_running, player.num_waiting_tokens = 128, 123_456
        await until(s.pool, lambda: all(w.status is not None and w.status.num_running for w in s.pool.workers))
        feed, records = feed_of(s, model_directory, clock)
        await asyncio.gather(*[s.run(request_id=f"r{number}") for number in range(3)])
        for number in range(200):
            request = arrived(f"{number:036}", sequence(RequestTimings(0.0)))
            request.status = 502
            records.begin(request)
            records.end(request, "/")
        looker = Looker(feed)
        [_, (name, state)] = await looker.events(2)
        assert (name, len(state["workers"])) == ("state", 100)
        assert len(json.dumps(state, separators=(",", ":"))) < MAX_BYTES_PER_S
        await looker.leave()


def test_figures_of_nothing() -> None:
    metrics = GatewayMetrics(CollectorRegistry())
    metrics.of_model("tiny")
    tally = Tally.of(metrics, 1.0)
    figures = Figures.between(tally, tally)
    assert (figures.cached, figures.ttft_s, figures.itl_s, figures.parts_s) == (None, (None, None), (None, None), {})


def test_quantiles_lie_in_their_buckets() -> None:
    metrics = GatewayMetrics(CollectorRegistry())
    of_model = metrics.of_model("tiny")
    before = Tally.of(metrics, 0.0)
    for _ in range(90):
        of_model.tokens.on_tokens(1, 0.009)
    for _ in range(10):
        of_model.tokens.on_tokens(1, 60.0)
    median, high = Figures.between(before, Tally.of(metrics, 1.0)).itl_s
    assert median is not None
    assert 0.005 < median <= 0.01
    assert high == 5.0  # more is not known
