"""The gateway's report on its workers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvrelay.gateway.desk.report import Activity, Unheard
from kvrelay.gateway.errors import OverloadedError
from kvrelay.gateway.model import Model, ModelFiles
from kvrelay.gateway.workers.pool import FoundWorker
from kvrelay.wire.messages import FailureCode, Role, Submit

from ..clock import Clock
from ..http_app import TEXT, app_for
from ..players import ALL, Player, failing, good, stage, until

NOBODY = "tcp://127.0.0.1:1"  # nobody listens there


async def test_workers_and_their_breakers_are_shown(model_directory: Path) -> None:
    relay = {"max_attempts": 1, "room_timeout_s": 0.2}
    async with app_for(model_directory, failing(FailureCode.INTERNAL), relay=relay) as app:
        asked = [app.client.post(TEXT, json={"prompt": "x"}) for _ in range(3)]
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {502}
        known = (await app.client.get("/debug/workers")).json()
        assert (known["pairs"], known["num_queued"]) == ([], 0)
        [worker] = known["workers"]
        assert worker["address"] == app.player.address
        assert (worker["role"], worker["model"], worker["state"], worker["breaker"]) == ("decode", "tiny", "up", "open")
        assert 0 <= worker["num_used_blocks"] < worker["num_blocks"]
        assert known["prompt_ways"] == {"local: only_way": 3}
        refused = ""
        async with asyncio.timeout(20):
            while "failed all of several requests" not in refused:  # a request is a probe if a second has passed
                refused = (await app.client.post(TEXT, json={"prompt": "x"})).json()["error"]["message"]


async def test_a_line_says_what_was_done_since_the_last_one_and_nothing_of_nothing(
    model_directory: Path, clock: Clock
) -> None:
    begun: asyncio.Queue[tuple[Player, Submit]] = asyncio.Queue()
    async with stage(lambda *play: begun.put_nowait(play)) as s:
        worker = s.pool.decodes[s.players[0].address]
        await until(s.pool, lambda: worker.status is not None)
        model = Model("tiny", ModelFiles.load(model_directory), s.relay)
        activity = Activity(model, clock)
        assert activity.line() is None
        running = asyncio.create_task(s.run())
        play = await begun.get()
        s.relay.metrics.tokens.on_prompt(200)
        s.relay.metrics.tokens.on_cached(50)
        s.relay.metrics.tokens.on_tokens(40, None)
        clock.now_s += 10
        assert activity.line() == (
            "1 requests running, 0 waiting; 20 prompt and 4 output tokens/s; KV in use: decode 0%; 25% of prompt tokens were cached"
        )
        clock.now_s += 10
        assert activity.line() == "1 requests running, 0 waiting; 0 prompt and 0 output tokens/s; KV in use: decode 0%"
        good(*play)
        assert await running == ALL
        assert activity.line() is None
        with pytest.raises(OverloadedError):
            raise s.relay.admission._full()
        line = "0 requests running, 0 waiting, 1 refused for lack of room or time; 0 prompt and 0 output tokens/s; "
        assert activity.line() == f"{line}KV in use: decode 0%"
        assert activity.line() is None


async def test_a_worker_that_never_answers_is_told_once(model_directory: Path, clock: Clock) -> None:
    async with stage(good) as s:
        at = s.players[0].address
        await until(s.pool, lambda: s.pool.decodes[at].status is not None)
        unheard = Unheard(Model("tiny", ModelFiles.load(model_directory), s.relay), clock)
        s.pool.update([FoundWorker(Role.DECODE, at), FoundWorker(Role.DECODE, NOBODY)])
        assert unheard.lines() == []
        clock.now_s += 59
        assert unheard.lines() == []
        clock.now_s += 1
        [line] = unheard.lines()
        assert line.startswith(f"decode worker at {NOBODY} has not answered for 60 s: ")
        clock.now_s += 100
        assert unheard.lines() == []
        s.pool.update([FoundWorker(Role.DECODE, at)])
        assert unheard.lines() == []
        s.pool.update([FoundWorker(Role.DECODE, at), FoundWorker(Role.DECODE, NOBODY)])
        assert unheard.lines() == [], "it is known anew"
        clock.now_s += 60
        assert len(unheard.lines()) == 1


async def test_a_gateway_logs_the_line_now_and_then(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvrelay.gateway.desk.report._EVERY_S", 0.001)
    caplog.set_level("INFO", "kvrelay.gateway.desk.report")
    async with app_for(model_directory, good) as app:
        await app.post(TEXT, prompt="x")
        async with asyncio.timeout(20):
            while "requests running" not in caplog.text:
                await asyncio.sleep(0.001)  # polls for a state, bounded by the timeout above
