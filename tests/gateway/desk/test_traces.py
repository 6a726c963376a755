"""Traces as a collector receives them, with scripted workers: retries, errors, and requests that are not traced."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvrelay.common.errors import SettingsError
from kvrelay.gateway.app import create_app
from kvrelay.gateway.settings import DiscoverySettings, GatewaySettings, RelaySettings, TraceSettings
from kvrelay.wire.messages import FailureCode

from ..collector import Collector, collector
from ..http_app import CHAT, TEXT, app_for, saying
from ..players import failing, in_turn

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=x"}
BODY = {"prompt": "one relay", "max_tokens": 9}


@pytest.fixture
def heard() -> Iterator[Collector]:
    with collector() as found:
        yield found


def traced(heard: Collector, sample: float = 1.0) -> dict[str, Any]:
    return {"traces": TraceSettings(trace_endpoint=heard.url, trace_sample=sample)}


async def test_a_failover_is_one_trace(
    model_directory: Path, heard: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    script = in_turn(failing(FailureCode.INTERNAL, after=1, retry_after_s=0.01), saying("the baton is here"))
    async with app_for(model_directory, script, relay={"max_attempts": 3}, **traced(heard, 0.0)) as app:
        answer = await app.client.post(TEXT, json=BODY, headers={"x-request-id": "me", **SAMPLED})
        assert answer.status_code == 200
        address, submits = app.player.address, app.player.submits
    assert {path for path, _ in heard.posts} == {"/v1/traces"}
    assert set(heard.traces()) == {TRACE}
    root = heard.root("me")
    assert (root.proto.parent_span_id.hex(), root.proto.trace_state) == (PARENT, "vendor=x")
    first, second = (one for one in heard.below(root) if one.name == "attempt")
    assert first.attributes == {
        "kvrelay.attempt": 1, "kvrelay.workers": [address], "kvrelay.reason": "only_way", "kvrelay.outcome": "internal",
        "kvrelay.num_output_tokens_before": 0, "error.type": "internal",
    }  # fmt: skip
    assert first.proto.status.code == first.proto.status.STATUS_CODE_ERROR
    assert second.attributes["kvrelay.outcome"] == "finished"
    assert second.attributes["kvrelay.num_output_tokens_before"] == 1
    assert second.proto.status.code == second.proto.status.STATUS_CODE_UNSET
    assert first.proto.end_time_unix_nano <= second.proto.start_time_unix_nano
    [retry] = root.proto.events
    assert (retry.name, retry.time_unix_nano) == ("retry", second.proto.start_time_unix_nano)
    assert root.proto.status.code == root.proto.status.STATUS_CODE_UNSET
    # Workers and log lines know the trace.
    assert [submit.trace_id for submit in submits] == [TRACE, TRACE]
    lines = [one for one in caplog.records if "attempt" in one.getMessage()]
    assert {one.__dict__["trace_id"] for one in lines} == {TRACE}
    assert any(one.levelno == logging.WARNING for one in lines)


async def test_what_fails_is_an_error_and_a_clients_mistake_is_none(model_directory: Path, heard: Collector) -> None:
    async with app_for(
        model_directory, failing(FailureCode.INTERNAL), relay={"max_attempts": 1}, **traced(heard)
    ) as app:
        for name, path, body, status in (
            ("broken", TEXT, BODY, 502),
            ("wrong", TEXT, {"prompt": 7.5}, 400),
            ("lost", "/nowhere", {}, 404),
        ):
            answer = await app.client.post(path, json=body, headers={"x-request-id": name})
            assert answer.status_code == status
    broken, wrong, lost = heard.root("broken"), heard.root("wrong"), heard.root("lost")
    assert broken.proto.status.code == broken.proto.status.STATUS_CODE_ERROR
    assert broken.proto.status.message == broken.attributes["error.type"] == "attempts_failed"
    assert (wrong.name, wrong.attributes) == (
        f"POST {TEXT}",
        {
            "http.request.method": "POST", "http.route": TEXT, "http.response.status_code": 400,
            "kvrelay.request_id": "wrong", "kvrelay.outcome": "400", "error.type": "invalid_value",
        },
    )  # fmt: skip
    assert wrong.proto.status.code == wrong.proto.status.STATUS_CODE_UNSET
    assert (heard.below(wrong), lost.attributes["http.route"]) == ([], "other")


async def test_a_stream_that_breaks_is_an_error(model_directory: Path, heard: Collector) -> None:
    script = failing(FailureCode.INTERNAL, after=2)
    async with app_for(model_directory, script, relay={"max_attempts": 1}, **traced(heard)) as app:
        answer = await app.client.post(TEXT, json={**BODY, "stream": True}, headers={"x-request-id": "cut"})
        assert answer.status_code == 200
    root = heard.root("cut")
    assert root.attributes["kvrelay.outcome"] == "failed_mid_stream"
    assert root.proto.status.code == root.proto.status.STATUS_CODE_ERROR


async def test_choices_are_told_apart(model_directory: Path, heard: Collector) -> None:
    async with app_for(model_directory, saying("x"), **traced(heard)) as app:
        body = {"messages": [{"role": "user", "content": "hi"}], "n": 2}
        answer = await app.client.post(CHAT, json=body, headers={"x-request-id": "two"})
        usage = answer.json()["usage"]
    root = heard.root("two")
    assert (root.name, root.attributes["gen_ai.request.choice.count"]) == ("chat tiny", 2)
    assert root.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert root.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    below = [(one.name, one.attributes["kvrelay.sequence"]) for one in heard.below(root)]
    assert sorted(below) == [("accept", 0), ("accept", 1), ("attempt", 0), ("attempt", 1)]


async def test_a_negative_seed_is_told_as_it_came(model_directory: Path, heard: Collector) -> None:
    async with app_for(model_directory, saying("x"), **traced(heard)) as app:
        await app.client.post(TEXT, json={**BODY, "seed": -1}, headers={"x-request-id": "seeded"})
    assert heard.root("seeded").attributes["gen_ai.request.seed"] == -1


@pytest.mark.parametrize(
    ("sample", "header", "is_traced"),
    [
        (1.0, None, True),
        (0.0, None, False),
        (0.0, f"00-{TRACE}-{PARENT}-01", True),
        (1.0, f"00-{TRACE}-{PARENT}-00", False),  # the client's header decides
        (1.0, "no traceparent", True),
        (0.0, f"00-{'0' * 32}-{PARENT}-01", False),  # an invalid trace id
    ],
)
async def test_who_is_traced(
    model_directory: Path, heard: Collector, sample: float, header: str | None, is_traced: bool
) -> None:
    async with app_for(model_directory, saying("x"), **traced(heard, sample)) as app:
        headers = {} if header is None else {"traceparent": header}
        assert (await app.client.post(TEXT, json=BODY, headers=headers)).status_code == 200
        assert (await app.client.get("/metrics")).status_code == 200
        [submit] = app.player.submits
    assert bool(submit.trace_id) is is_traced
    assert set(heard.traces()) == ({submit.trace_id} if is_traced else set())


async def test_no_text_is_told(model_directory: Path, heard: Collector) -> None:
    async with app_for(model_directory, saying("the baton"), **traced(heard)) as app:
        body = {"messages": [{"role": "user", "content": "hand over"}], "stop": "hidden", "user": "alice"}
        assert (await app.client.post(CHAT, json=body)).status_code == 200
        await app.client.post(CHAT, json={**body, "model": "secret"})
    told = str(heard.spans)
    assert len(heard.traces()) == 2
    assert not any(word in told for word in ("baton", "hand over", "hidden", "alice", "secret"))


async def test_a_collector_that_is_away_costs_no_request_and_no_end(
    model_directory: Path, heard: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    gone = {"traces": TraceSettings(trace_endpoint="http://127.0.0.1:9", trace_sample=1.0)}
    async with app_for(model_directory, saying("x"), **gone) as app:
        assert (await app.client.post(TEXT, json=BODY)).status_code == 200
    assert "127.0.0.1" in caplog.text


def test_who_does_not_trace_imports_nothing_of_it(model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "kvrelay.gateway.desk.traces", raising=False)
    workers = DiscoverySettings(decode_workers=("tcp://127.0.0.1:9",))
    settings = GatewaySettings(relay=RelaySettings(), model=(str(model_directory),), workers=workers)
    create_app(settings)
    wanted = TraceSettings(trace_endpoint="http://127.0.0.1:9")
    with pytest.raises(SettingsError, match="kvrelay\\[tracing\\]"):
        create_app(
            GatewaySettings(relay=RelaySettings(), model=(str(model_directory),), workers=workers, traces=wanted)
        )


@pytest.mark.parametrize("url", ["collector:4318", "grpc://collector:4317", "http://", "http://c:4318/?x=1"])
def test_an_endpoint_that_is_none(url: str) -> None:
    with pytest.raises(SettingsError, match="trace-endpoint"):
        TraceSettings(trace_endpoint=url)
