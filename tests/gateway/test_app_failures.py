"""Failures behind the API as clients see them, and the cleanup after clients that leave."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Message

from kvrelay.common.sampling import FinishReason, SampledToken, SamplingParams
from kvrelay.common.settings import build
from kvrelay.gateway.app import create_app
from kvrelay.gateway.errors import ApiError
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.model import Model, ModelFiles
from kvrelay.gateway.relay.attempt import Take
from kvrelay.gateway.relay.request import GenerationRequest, RequestTimings
from kvrelay.gateway.settings import GatewaySettings
from kvrelay.gateway.text.output import Usage
from kvrelay.gateway.text.tokenizer import Tokenizer
from kvrelay.gateway.workers.pool import WorkerPool
from kvrelay.wire.control.client import ControlClient
from kvrelay.wire.messages import FailureCode, TokenDelta

from .http_app import CHAT, TEXT, App, app_for, lifespan, saying
from .players import failing, good, in_turn

USER = [{"role": "user", "content": "hand over"}]


async def no_news() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


# -- failures ------------------------------------------------------------------------------------------------------


async def test_without_workers_every_request_gets_503_at_once(app: App) -> None:
    await app.lose_worker()
    assert "no decode worker is up" in (await app.client.get("/health/ready")).json()["reasons"][0]
    assert (await app.client.get("/health/live")).status_code == 200
    response = await app.client.post(TEXT, json={"prompt": "x"})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
    assert int(response.headers["retry-after"]) >= 1
    assert "tcp://" not in response.text


async def test_a_request_that_no_worker_could_take_has_the_workers_looked_for(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[str] = []
    monkeypatch.setattr(ControlClient, "hurry", lambda client: wanted.append(client.address))
    await app.client.post(TEXT, json={"prompt": "x"})
    assert wanted == []
    await app.player.server.stop()
    async with asyncio.timeout(20):
        while (await app.client.get("/health/ready")).status_code == 200:
            await asyncio.sleep(0.005)  # polls for a state, bounded by the timeout above
    assert wanted == []
    assert (await app.client.post(TEXT, json={"prompt": "x"})).status_code == 503
    assert wanted == [app.player.address]


async def test_workers_that_go_while_a_prompt_is_encoded_are_a_503(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[WorkerPool] = []
    init = WorkerPool.__init__

    def kept(self: WorkerPool, *args: Any, **kwargs: Any) -> None:
        pools.append(self)
        init(self, *args, **kwargs)

    monkeypatch.setattr(WorkerPool, "__init__", kept)
    async with app_for(model_directory, saying("x")) as app:
        encode = Tokenizer.encode
        (pool,) = pools

        def slow(self: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
            monkeypatch.setattr(pool, "limits", None)
            return encode(self, text, add_special_tokens=add_special_tokens)

        monkeypatch.setattr(Tokenizer, "encode", slow)
        answer = await app.client.post(TEXT, json={"prompt": ["one", "two"]})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


async def test_a_failure_before_the_first_token_is_a_status(model_directory: Path) -> None:
    async with app_for(model_directory, failing(FailureCode.INTERNAL), relay={"max_attempts": 1}) as app:
        for stream in (True, False):
            error = (await app.post(TEXT, 502, prompt="x", stream=stream))["error"]
            assert (error["type"], error["code"]) == ("server_error", "attempts_failed")


async def test_one_body_asks_for_a_bounded_number_of_sequences(model_directory: Path) -> None:
    async with app_for(model_directory, good, relay={"max_sequences": 8}) as app:
        for param, fields in (
            ("n", {"n": 3}),
            ("best_of", {"n": 1, "best_of": 3}),
            ("beam_width", {"use_beam_search": True, "n": 3}),
        ):
            error = (await app.post(TEXT, 400, prompt=["x"] * 3, max_tokens=1, **fields))["error"]
            assert error["param"] == param
            assert "are 9 sequences; one request may ask for 8" in error["message"]
        assert len((await app.post(TEXT, prompt=["x"] * 2, n=4, max_tokens=1))["choices"]) == 8


async def test_a_failure_in_the_middle_is_one_event(model_directory: Path) -> None:
    async with app_for(model_directory, failing(FailureCode.INTERNAL, after=2), relay={"max_attempts": 1}) as app:
        events = await app.events(TEXT, prompt="x", max_tokens=9)
        assert [event for event in events if "error" in event] == [events[-1]]
        assert events[-1]["error"]["code"] == "attempts_failed"
        metrics = await app.metrics()
        assert metrics[f'kvrelay_requests_total{{model="tiny",outcome="failed_mid_stream",route="{TEXT}"}}'] == 1
        assert f'kvrelay_requests_total{{model="tiny",outcome="200",route="{TEXT}"}}' not in metrics
        assert metrics['kvrelay_attempts_total{model="tiny",outcome="internal"}'] == 1


async def test_an_unexpected_error_is_logged_and_not_told(
    app: App,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(Tokenizer, "encode", broken)
    with caplog.at_level(logging.ERROR, "kvrelay.gateway"):
        response = await app.client.post(TEXT, json={"prompt": "x"}, headers={"x-request-id": "mine"})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.json()["error"]["code"] == "internal_error"
    assert response.headers["x-request-id"] == "mine"
    record = caplog.records[0]
    assert record.__dict__["request_id"] == "mine"
    assert record.exc_info is not None


# -- streams -------------------------------------------------------------------------------------------------------


async def test_too_much_that_a_client_does_not_take_ends_the_request(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client takes nothing of a long stream. The attempt is given up, and later the client gets the events and an error."""
    monkeypatch.setattr("kvrelay.gateway.http.sse.MAX_WAITING_BYTES", 2000)
    incoming: list[Message] = [
        {"type": "http.request", "body": b'{"prompt": "x", "max_tokens": 90, "stream": true}', "more_body": False}
    ]
    sent: list[bytes] = []
    takes = asyncio.Event()

    async def receive() -> Message:
        return incoming.pop() if incoming else await no_news()

    async def send(message: Message) -> None:
        await takes.wait()
        sent.append(message.get("body", b""))

    async with app_for(model_directory, saying("a baton " * 9, end=None)) as app:
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": TEXT, "headers": headers, "query_string": b""}
        request = asyncio.create_task(app.asgi(scope, receive, send))
        try:
            async with asyncio.timeout(20):
                while 'kvrelay_attempts_total{model="tiny",outcome="given_up"}' not in await app.metrics():
                    await asyncio.sleep(0.005)  # polls for a state, bounded by the timeout above
            takes.set()
            await request
        finally:
            request.cancel()
        *told, done = b"".join(sent).decode().split("\n\n")[:-1]
        *events, last = [json.loads(event.removeprefix("data: ")) for event in told]
        assert done == "data: [DONE]"
        assert all("choices" in event for event in events)
        assert 2000 <= len(b"".join(sent)) <= 3500
        assert last["error"]["code"] == "client_behind"
        metrics = await app.metrics()
        assert metrics[f'kvrelay_requests_total{{model="tiny",outcome="client_behind",route="{TEXT}"}}'] == 1


async def test_the_first_error_of_several_choices_ends_all(model_directory: Path) -> None:
    was_given_up = asyncio.Event()

    class TwoWays:
        metrics = GatewayMetrics(CollectorRegistry()).of_model("tiny")
        clock = time.monotonic

        async def run(self, request: GenerationRequest, take: Take) -> None:
            take(TokenDelta(request_id="r", attempt=1, index=0, tokens=[SampledToken(5)]))
            if request.request_id == "broken":
                raise ApiError("broken")
            try:
                await asyncio.Event().wait()
            finally:
                was_given_up.set()

    relay: Any = TwoWays()
    model = Model("tiny", ModelFiles.load(model_directory), relay)
    sequences = [
        GenerationRequest(name, [1], SamplingParams(max_tokens=9), RequestTimings(0.0))
        for name in ("endless", "broken")
    ]
    taken: list[int] = []
    with pytest.raises(ApiError, match="broken"):
        await model.run(sequences, [Usage(1), Usage(1)], lambda index, delta: taken.append(index))
    assert taken == [0, 1]
    assert was_given_up.is_set()


async def test_the_lifespan_ends_with_workers_that_never_came(model_directory: Path) -> None:
    app = create_app(build(GatewaySettings, {"model": str(model_directory), "decode_workers": "inproc://nobody"}))
    async with lifespan(app), httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        assert (await client.get("/health/ready")).status_code == 503
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == model_directory.name


async def test_every_metric_of_the_gateway_moves(model_directory: Path) -> None:
    script = in_turn(failing(FailureCode.INTERNAL), saying("one relay", end=FinishReason.LENGTH))
    async with app_for(model_directory, script, relay={"max_attempts": 1}) as app:
        await app.post(TEXT, 502, prompt="x")
        await app.post(TEXT, prompt="x")
        await app.post(TEXT, prompt="x", stop="relay")
        metrics = await app.metrics()
        for part in ("queue", "prefill", "transfer", "first_step"):
            assert metrics[f'kvrelay_ttft_part_seconds_count{{model="tiny",part="{part}"}}'] == 2
        moved = {name.split("{")[0] for name in metrics}
        assert moved >= {
            "kvrelay_requests_total",
            "kvrelay_requests_in_flight",  # the request for the metrics itself
            "kvrelay_gateway_prompt_tokens_total",
            "kvrelay_gateway_output_tokens_total",
            "kvrelay_attempts_total",
            "kvrelay_workers_up",
            "kvrelay_time_to_first_token_seconds_count",
            "kvrelay_inter_token_latency_seconds_count",
            "kvrelay_request_duration_seconds_count",
        }


# -- the client's own time -----------------------------------------------------------------------------------------


async def test_a_request_may_say_how_long_it_has(model_directory: Path) -> None:
    body = {"messages": USER, "max_tokens": 2}
    async with app_for(model_directory, lambda player, submit: None) as app:
        late = await app.client.post(CHAT, json=body, headers={"X-Request-Timeout": "0.3"})
        assert late.status_code == 504
        assert late.json()["error"]["code"] == "timeout"
        assert "longer than 0.3 s" in late.json()["error"]["message"]
        assert await asyncio.wait_for(app.player.cancelled.get(), 20)


async def test_a_time_that_is_none_is_refused_by_name(model_directory: Path) -> None:
    async with app_for(model_directory, failing(FailureCode.INTERNAL)) as app:
        for given in ("0", "-1", "soon", "nan", "inf", "1e3", "", "9" * 40, "0.0"):
            refused = await app.client.post(TEXT, json={"prompt": "a"}, headers={"X-Request-Timeout": given})
            assert refused.status_code == 400, given
            assert refused.json()["error"]["param"] == "x-request-timeout"
            assert "must be a number of seconds above 0" in refused.json()["error"]["message"]
        assert not app.player.submits
