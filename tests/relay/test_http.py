"""Requests over HTTP through the whole relay: formats, bad input, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvrelay.engine.fake.language import expected_output

from .gate import Gate
from .http_gateway import VOCAB, Deployment, deployment

GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture
async def up(model: Path) -> AsyncIterator[Deployment]:
    async with deployment(model) as running:
        yield running


async def events(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    """The parsed events of a stream, without the final [DONE], which is checked."""
    async with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_a_completion_is_what_the_engine_says(up: Deployment) -> None:
    prompt = list(range(3, 40))
    response = await up.client.post("/v1/completions", json={**GREEDY, "prompt": prompt, "max_tokens": 20})
    body = response.json()
    expected = expected_output(prompt, 20, VOCAB)
    assert body["choices"][0]["token_ids"] == expected
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["prompt_tokens"] == 37
    assert body["usage"]["completion_tokens"] == 20
    again = await events(up.client, "/v1/completions", {**GREEDY, "prompt": prompt, "max_tokens": 20})
    assert [token for event in again for token in event["choices"][0]["token_ids"]] == expected
    assert "".join(event["choices"][0]["text"] for event in again) == body["choices"][0]["text"]
    await up.settled()
    for name, value in COUNTED_FOR_TWO.items():
        assert await up.metric(name) == value, name


# The gateway's metrics after two completions of 37 prompt and 20 output tokens.
COUNTED_FOR_TWO = {
    "kvrelay_attempts_total": 2,
    "kvrelay_gateway_prompt_tokens_total": 74,
    "kvrelay_gateway_output_tokens_total": 40,
    "kvrelay_time_to_first_token_seconds_count": 2,
    "kvrelay_request_duration_seconds_count": 2,
    "kvrelay_ttft_part_seconds_count": 10,  # accept, queue, prefill, transfer, first step
    "kvrelay_requests_in_flight": 1,  # the request for /metrics
    "kvrelay_workers_up": 2,
    "kvrelay_client_disconnects_total": 0,
}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_takes_its_request_along(model: Path, stream: bool) -> None:
    gate = Gate(num_tokens=20)
    async with deployment(model, gate=gate) as up:
        body = {**GREEDY, "prompt": [5] * 40, "max_tokens": 400, "stream": stream}
        if stream:
            async with up.client.stream("POST", "/v1/completions", json=body) as response:
                await anext(response.aiter_lines())
        else:
            request = asyncio.create_task(up.client.post("/v1/completions", json=body))
            while not up.decode.service.entries:
                await asyncio.sleep(0.002)  # polls for a state: the request runs
            request.cancel()
        while await up.metric("kvrelay_client_disconnects_total") == 0:
            await asyncio.sleep(0.01)  # polls for a state: the gateway has noticed
        gate.open()
        await up.settled()
        assert await up.metric("kvrelay_client_disconnects_total") == 1


CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


RAW = {
    "invalid JSON": (b'{"messages": [', 400),
    "invalid UTF-8": (b'{"prompt": "\xff\xfe"}', 400),
    "no JSON at all": (b"\x00\x01\x02", 400),
    "a number": (b"7", 400),
    "empty": (b"", 400),
    "a lone surrogate": (b'{"prompt": "\\ud800", "max_tokens": 1}', 400),
    "NUL characters": (b'{"prompt": "a\\u0000b", "max_tokens": 1}', 200),
    "nested deeply": (b'{"prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", 400),
    "10 MB": (b'{"prompt": "' + b"x" * 10_000_000 + b'"}', 413),
}


async def test_raw_bodies(up: Deployment) -> None:
    async def pieces(body: bytes) -> AsyncIterator[bytes]:
        for start in range(0, max(1, len(body)), 50_000):
            yield body[start : start + 50_000]

    headers = {"content-type": "application/json"}
    for name, (body, status) in RAW.items():
        for content in (body, pieces(body)):
            try:
                response = await up.client.post(TEXT, content=content, headers=headers)
            except httpx.TransportError:
                assert status == 413, name  # the server may close while the client still sends
                continue
            assert response.status_code == status, (name, response.text)
            if status != 200:
                assert set(response.json()["error"]) == {"message", "type", "param", "code", "request_id"}
    await up.settled()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_timings_come_to_those_who_ask(path: str, up: Deployment) -> None:
    asked = (
        {"prompt": list(range(3, 40))}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "hi"}]}
    )
    body: dict[str, Any] = {**GREEDY, **asked, "max_tokens": 5, "stream_options": {"include_usage": True}}
    up.client.headers["x-kvrelay-timings"] = "1"
    streamed = (await events(up.client, path, body))[-1]
    del body["stream_options"]
    whole = (await up.client.post(path, json=body)).json()
    for answer in (streamed, whole):
        assert answer["usage"]["completion_tokens"] == 5
        timings = answer["kvrelay"]
        assert timings["attempts"] == 1
        parts = [timings[name] for name in ("accept_s", "queue_s", "prefill_s")]
        assert all(part >= 0 for part in parts)
        assert sum(parts) <= timings["ttft_s"]
        gap_s = timings["second_token_s"] - timings["ttft_s"]
        assert 0 <= timings["first_step_s"] <= timings["second_token_s"]
        assert gap_s >= 0
        assert timings["transfer_s"] >= 0
    up.client.headers["x-kvrelay-timings"] = "0"
    assert "kvrelay" not in (await up.client.post(path, json=body)).json()
