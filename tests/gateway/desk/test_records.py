"""The gateway's records of requests, and who may read them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Scope

from kvrelay.common.sampling import SamplingParams
from kvrelay.gateway.desk.records import NUM_KEPT, Records
from kvrelay.gateway.http.api_keys import line_of
from kvrelay.gateway.http.request import ApiRequest
from kvrelay.gateway.relay.request import AttemptNote, GenerationRequest, RequestTimings
from kvrelay.wire.messages import FailureCode, Submit

from ..http_app import CHAT, TEXT, App, app_for, saying
from ..players import Player, failing, in_turn

SAID = "the baton is here"


async def never(_: Any = None) -> Any:
    await asyncio.Event().wait()


def arrived(request_id: str, *sequences: GenerationRequest) -> ApiRequest:
    scope: Scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"x-request-id", request_id.encode())]}
    request = ApiRequest(scope, never)
    request.sequences = sequences
    return request


def sequence(timings: RequestTimings) -> GenerationRequest:
    return GenerationRequest("r", [7] * 5, SamplingParams(max_tokens=3, temperature=0.0, seed=1), timings)


async def known(app: App, request_id: str) -> Any:
    """The record of the request with this id."""
    answer = await app.client.get(f"/debug/requests/{request_id}")
    assert answer.status_code == 200, answer.text
    [request] = answer.json()["requests"]
    return request


async def test_a_request_is_followed_from_its_head_to_its_last_token(model_directory: Path) -> None:
    script = in_turn(failing(FailureCode.INTERNAL, after=1, retry_after_s=0.01), saying(SAID))
    async with app_for(model_directory, script, relay={"max_attempts": 3}) as app:
        answer = await app.client.post(
            TEXT, json={"prompt": "one relay", "max_tokens": 9}, headers={"x-request-id": "me"}
        )
        assert answer.status_code == 200
        request = await known(app, "me")
        assert (request["route"], request["status"], request["error"], request["cut"]) == (TEXT, 200, None, None)
        [one] = request["sequences"]
        assert one["num_prompt_tokens"] == len(app.player.submits[0].token_ids)
        assert one["num_output_tokens"] == answer.json()["usage"]["completion_tokens"]
        steps = [one[name] for name in ("prepared_s", "placed_s", "submitted_s", "first_token_s", "last_token_s")]
        assert steps == sorted(steps)
        assert steps[0] >= 0
        assert steps[-1] <= request["ended_s"]
        assert one["parts_s"]["prefill"] == 0.02
        first, second = one["attempts"]
        assert (first["outcome"], first["num_output_tokens_before"]) == ("internal", 0)
        assert second["num_output_tokens_before"] == 1
        assert first["workers"] == [app.player.address]
        assert first["begun_s"] <= first["ended_s"] <= second["begun_s"] <= second["ended_s"]
        assert (one["num_attempts"], one["num_failures"]) == (2, 1)


async def test_no_text_and_no_token_is_kept(model_directory: Path) -> None:
    async with app_for(model_directory, saying(SAID)) as app:
        body = {"messages": [{"role": "user", "content": "hand over"}], "stop": "hidden"}
        assert (await app.client.post(CHAT, json=body)).status_code == 200
        refused = await app.client.post(CHAT, json={**body, "model": "secret"})
        assert (refused.status_code, "secret" in refused.text) == (404, True)
        told = (await app.client.get("/debug/requests")).text
        assert refused.headers["x-request-id"] in told
        assert not any(word in told for word in ("baton", "hand over", "hidden", "secret"))


async def test_a_request_that_runs_is_told_and_so_is_how_its_client_left(model_directory: Path) -> None:
    begun = asyncio.Event()

    def hang(_player: Player, _submit: Submit) -> None:
        begun.set()

    async with app_for(model_directory, hang) as app:
        headers = {"x-request-id": "slow"}
        asked = asyncio.create_task(app.client.post(TEXT, json={"prompt": "x", "n": 2}, headers=headers))
        await asyncio.wait_for(begun.wait(), 20)
        running = await known(app, "slow")
        assert (running["ended_s"], running["status"], running["num_sequences"]) == (None, 0, 2)
        assert running["sequences"][0]["attempts"][0]["outcome"] == ""
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


async def test_every_error_names_its_request(model_directory: Path) -> None:
    async with app_for(model_directory, failing(FailureCode.INTERNAL), relay={"max_attempts": 1}) as app:
        for path, body in (
            (TEXT, {"prompt": "x"}),
            (TEXT, {"prompt": 7.5}),
            (CHAT, {"messages": [], "model": "other"}),
            ("/generate", {"inputs": "x"}),
            ("/tokenize", {"prompt": "x", "model": "other"}),
            ("/nowhere", {}),
        ):
            answer = await app.client.post(path, json=body, headers={"x-request-id": "mine"})
            assert answer.status_code >= 400
            told = answer.json()
            assert (told if path == "/generate" else told["error"])["request_id"] == "mine", path
        assert len((await app.client.get("/debug/requests/mine")).json()["requests"]) == 6
        failed = await known(app, (await app.client.post(TEXT, json={"prompt": "y"})).headers["x-request-id"])
        assert (failed["status"], failed["error"]) == (502, "attempts_failed")


async def test_a_stream_that_breaks_names_its_request(model_directory: Path) -> None:
    script = failing(FailureCode.INTERNAL, after=2)
    async with app_for(model_directory, script, relay={"max_attempts": 1}) as app:
        for path, body in (
            (TEXT, {"prompt": "x"}),
            ("/v1/responses", {"input": "x"}),
            ("/generate_stream", {"inputs": "x"}),
        ):
            answer = await app.client.post(path, json={**body, "stream": True}, headers={"x-request-id": "cut"})
            assert answer.status_code == 200
            assert '"request_id":"cut"' in answer.text, path
        assert {one["cut"] for one in (await app.client.get("/debug/requests")).json()["requests"]} == {
            "failed_mid_stream"
        }


async def test_who_has_no_operators_key_learns_nothing_of_others(tmp_path: Path, model_directory: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{line_of('alice', 'a')}\n{line_of('olga', 'o')} operator=1\n")
    async with app_for(model_directory, saying("x"), api_keys=str(keys)) as app:
        for path in ("/debug/requests", "/debug/requests/x", "/debug/workers"):
            for key, status in (("a", 403), ("b", 401)):
                refused = await app.client.get(path, headers={"authorization": f"Bearer {key}"})
                assert refused.status_code == status
        told = await app.client.get("/debug/requests", headers={"authorization": "Bearer o"})
        assert (told.status_code, told.json()) == (200, {"requests": []})


@pytest.mark.parametrize("limit", ["0", "1001", "x", "-1", "", "1" * 5000])
async def test_limits(app: App, limit: str) -> None:
    answer = await app.client.get(f"/debug/requests?limit={limit}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")
    assert (await app.client.get("/debug/requests/unheard")).status_code == 404


def test_the_last_ones_are_kept_and_failures_for_longer() -> None:
    records = Records(lambda: 5.0, lambda: 0.0)
    failed = arrived("failed", sequence(RequestTimings(0.0)))
    failed.status = 502
    for request in (failed, *(arrived(f"r{number}", sequence(RequestTimings(0.0))) for number in range(NUM_KEPT + 5))):
        records.begin(request)
        records.end(request, "/")
    told = records.newest(2 * NUM_KEPT)
    assert (len(told), told[0]["request_id"], told[-1]["request_id"]) == (NUM_KEPT, f"r{NUM_KEPT + 4}", "r5")
    assert records.find("failed") == []
    assert [one.request_id for one in records.failed] == ["failed"]


def test_of_many_attempts_the_first_and_the_last_are_kept() -> None:
    timings = RequestTimings(0.0)
    for number in range(100):
        timings.on_attempt(AttemptNote((), "", float(number), 0, number + 1))
    assert [note.begun_s for note in timings.notes] == [*range(8), *range(92, 100)]


def test_of_many_choices_some_are_told() -> None:
    records = Records(lambda: 5.0, lambda: 0.0)
    request = arrived("many", *[sequence(RequestTimings(0.0)) for _ in range(50)])
    records.begin(request)
    [told] = records.find("many")
    assert (told["num_sequences"], len(told["sequences"])) == (50, 8)
