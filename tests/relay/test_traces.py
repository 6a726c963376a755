"""Traces of requests on real workers: all spans and fields, and the same times as in the metrics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from kvrelay import __version__
from kvrelay.gateway.settings import RelaySettings, TraceSettings

from ..gateway.collector import Collector, Told, collector
from .http_gateway import deployment

PROMPT = list(range(3, 103))
NUM_CACHED = 48  # of the hundred prompt tokens: an earlier prompt has left them in the cache
BODY = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "seed": 5}


@pytest.fixture
def heard() -> Iterator[Collector]:
    with collector() as found:
        yield found


async def ask(model: Path, heard: Collector, *, hands_over: bool) -> tuple[dict[str, float], list[str]]:
    """Send a warm-up request and a traced one. Returns the changes of metrics by the latter, and its workers' addresses."""
    parts = ("accept", "queue", "prefill", "transfer", "first_step")
    names = {
        "ttft": 'kvrelay_time_to_first_token_seconds_sum{model="tiny"}',
        **{part: f'kvrelay_ttft_part_seconds_sum{{model="tiny",part="{part}"}}' for part in parts},
    }
    settings = TraceSettings(trace_endpoint=heard.url, trace_sample=0.0)
    relay = RelaySettings(local_prefill="fallback", room_timeout_s=5.0)
    async with deployment(model, relay=relay, traces=settings, chunk_tokens=16, hands_over=hands_over) as up:

        async def counted() -> dict[str, float]:
            lines = (await up.client.get("/metrics")).text.splitlines()
            samples = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
            return {name: float(samples.get(key, 0.0)) for name, key in names.items()}

        warm_up = {**BODY, "prompt": PROMPT[: NUM_CACHED + 1], "max_tokens": 1}
        assert (await up.client.post("/v1/completions", json=warm_up)).status_code == 200
        before = await counted()
        headers = {"x-request-id": "me", "traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
        assert (await up.client.post("/v1/completions", json=BODY, headers=headers)).status_code == 200
        after = await counted()
        workers = [up.prefill.address, up.decode.address] if hands_over else [up.decode.address]
    return {name: value - before[name] for name, value in after.items()}, workers


def shape(heard: Collector, span: Told) -> Any:
    """The names of a span and all spans below it."""
    children = [shape(heard, one) for one in heard.below(span)]
    return (span.name, children) if children else span.name


async def test_a_hand_off_step_by_step(model: Path, heard: Collector) -> None:
    counted, workers = await ask(model, heard, hands_over=True)
    root = heard.root("me")
    chunks = ["chunk"] * 4
    assert shape(heard, root) == (
        "text_completion tiny",
        [
            ("accept", ["tokenize", "admission"]),
            ("attempt", ["queue", ("prefill", chunks), "hand_off", ("decode", ["first_step"])]),
        ],
    )
    assert {one.proto.trace_id.hex() for one in heard.spans} == {"ab" * 16}
    assert root.proto.parent_span_id.hex() == "cd" * 8
    assert root.proto.kind == root.proto.SPAN_KIND_SERVER
    ttft_s = root.attributes["kvrelay.time_to_first_token"]
    assert root.attributes == {
        "http.request.method": "POST", "http.route": "/v1/completions", "http.response.status_code": 200,
        "kvrelay.request_id": "me", "kvrelay.outcome": "200", "kvrelay.time_to_first_token": ttft_s,
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "kvrelay",
        "gen_ai.request.model": "tiny", "gen_ai.response.model": "tiny", "gen_ai.request.choice.count": 1,
        "gen_ai.request.max_tokens": 6, "gen_ai.request.temperature": 0.0, "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0, "gen_ai.request.frequency_penalty": 0.0, "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.seed": 5, "gen_ai.usage.input_tokens": 100, "gen_ai.usage.output_tokens": 6,
        "gen_ai.usage.cache_read.input_tokens": NUM_CACHED,
    }  # fmt: skip
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    assert {name for name in root.attributes if name.startswith("gen_ai.")} <= known
    by_name = {one.name: one for one in heard.spans}
    assert by_name["attempt"].attributes == {
        "kvrelay.attempt": 1, "kvrelay.workers": workers, "kvrelay.reason": "only_way", "kvrelay.outcome": "finished",
        "kvrelay.num_output_tokens_before": 0,
    }  # fmt: skip
    told = [one.attributes["kvrelay.num_tokens"] for one in heard.below(by_name["prefill"])]
    assert (sum(told), max(told)) == (100 - NUM_CACHED, 16)
    assert (root.resource["service.name"], root.resource["service.version"]) == ("kvrelay-gateway", __version__)
    assert root.resource["service.instance.id"]
    assert all(one.proto.status.code == one.proto.status.STATUS_CODE_UNSET for one in heard.spans)
    assert not root.proto.events

    # Spans and metrics have the same times. With the gap between accept and queue they add up to the time to first token.
    for part, name in (
        ("accept", "accept"),
        ("queue", "queue"),
        ("prefill", "prefill"),
        ("transfer", "hand_off"),
        ("first_step", "first_step"),
    ):
        assert by_name[name].took_s == pytest.approx(counted[part], abs=1e-6), part
    assert counted["ttft"] == pytest.approx(ttft_s, abs=1e-6)
    on_the_way_s = (by_name["queue"].proto.start_time_unix_nano - by_name["accept"].proto.end_time_unix_nano) / 1e9
    assert on_the_way_s >= 0
    parts_s = sum(by_name[name].took_s for name in ("accept", "queue", "prefill"))
    assert parts_s + on_the_way_s == pytest.approx(counted["ttft"], abs=1e-6)


async def test_spans_lie_within_those_above(model: Path, heard: Collector) -> None:
    await ask(model, heard, hands_over=True)
    by_id = {one.proto.span_id: one for one in heard.spans}
    below = [one for one in heard.spans if one.proto.parent_span_id in by_id]
    assert len(below) == len(heard.spans) - 1
    for one in below:
        above, rounding_ns = by_id[one.proto.parent_span_id], 1_000
        assert one.proto.start_time_unix_nano >= above.proto.start_time_unix_nano - rounding_ns, (one.name, above.name)
        assert one.proto.end_time_unix_nano <= above.proto.end_time_unix_nano + rounding_ns, (one.name, above.name)


async def test_a_prompt_that_its_decode_worker_computes(model: Path, heard: Collector) -> None:
    counted, workers = await ask(model, heard, hands_over=False)
    root = heard.root("me")
    [_, attempt] = heard.below(root)
    assert (attempt.attributes["kvrelay.workers"], attempt.attributes["kvrelay.reason"]) == (workers, "only_way")
    queue, prefill, decode = heard.below(attempt)
    assert [one.name for one in (queue, prefill, decode)] == ["queue", "prefill", "decode"]
    told = [one.attributes["kvrelay.num_tokens"] for one in heard.below(prefill)]
    assert (sum(told), max(told)) == (100 - NUM_CACHED, 16)
    assert prefill.took_s == pytest.approx(counted["prefill"], abs=1e-6)
    assert decode.proto.start_time_unix_nano == prefill.proto.end_time_unix_nano
