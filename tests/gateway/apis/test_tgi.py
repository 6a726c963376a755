"""TGI's generate routes: whole answers and streams, in front of a worker that plays a script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvrelay.common.sampling import FinishReason, SampledToken
from kvrelay.wire.messages import FailureCode, Submit

from ..http_app import App, app_for, saying, tokens_of
from ..players import Player, failing

SAID = "the baton, née 🏃 here"


@pytest.mark.parametrize("per_message", [1, 3, 100])
async def test_an_event_for_each_token_however_they_come(model_directory: Path, per_message: int) -> None:
    async with app_for(model_directory, saying(SAID, per_message=per_message, has_eos=True)) as app:
        expected = tokens_of(app.tokenizer, SAID, has_eos=True)
        body: dict[str, Any] = {"inputs": "hand over", "parameters": {"details": True, "top_n_tokens": 2, "seed": 7}}
        events = await app.events("/generate_stream", **body)
        assert [event["token"]["id"] for event in events] == [token.token_id for token in expected]
        assert [event["index"] for event in events] == list(range(1, len(expected) + 1))
        assert [event["token"]["logprob"] for event in events] == [token.logprob for token in expected]
        assert [event["token"]["special"] for event in events] == [False] * (len(expected) - 1) + [True]
        # The tokens' texts add up. A character of several tokens is in the last one's text; special tokens have texts, too.
        assert "".join(event["token"]["text"] for event in events) == f"{SAID}<eos>"
        assert not any("\ufffd" in event["token"]["text"] for event in events)
        assert all([top["id"] for top in event["top_tokens"]][1] == 5 for event in events)
        assert all(event["generated_text"] is None and event["details"] is None for event in events[:-1])
        assert events[-1]["generated_text"] == SAID
        assert events[-1]["details"] == {
            "finish_reason": "eos_token",
            "generated_tokens": len(expected),
            "seed": None,
            "input_length": len(app.player.submits[0].token_ids),
        }
        whole = await app.post("/generate", **body)
        assert whole["generated_text"] == SAID
        details = whole["details"]
        assert details["tokens"] == [event["token"] for event in events]
        assert details["top_tokens"] == [event["top_tokens"] for event in events]
        assert details["prefill"] == []
        assert details["finish_reason"] == "eos_token"
        assert details["generated_tokens"] == len(expected)
        sampling = app.player.submits[0].sampling
        assert (sampling.num_logprobs, sampling.temperature, sampling.max_tokens) == (2, 0.0, 100)


async def test_without_details_there_is_the_text_alone(model_directory: Path) -> None:
    async with app_for(model_directory, saying(SAID, has_eos=True)) as app:
        assert await app.post("/generate", inputs="x", parameters={}) == {"generated_text": SAID}
        events = await app.events("/generate_stream", inputs="x")
        assert events[-1]["generated_text"] == SAID
        assert events[-1]["details"] is None
        assert "top_tokens" not in events[-1]
        # Every token has a log probability, asked for or not.
        assert all(isinstance(event["token"]["logprob"], float) for event in events)
        assert app.player.submits[-1].sampling.num_logprobs == 0


async def test_the_compatible_route_gives_a_list_with_the_prompt(model_directory: Path) -> None:
    async with app_for(model_directory, saying(SAID, has_eos=True)) as app:
        prompt, bare = {"inputs": "Say: "}, {"return_full_text": False}
        assert await app.post("/", **prompt) == [{"generated_text": f"Say: {SAID}"}]
        assert await app.post("/", **prompt, parameters=bare) == [{"generated_text": SAID}]
        streamed = await app.events("/", **prompt)
        assert streamed[-1]["generated_text"] == f"Say: {SAID}"
        full = await app.post("/generate", **prompt, parameters={"return_full_text": True})
        assert full == {"generated_text": f"Say: {SAID}"}


async def test_a_stop_string_is_part_of_the_text(model_directory: Path) -> None:
    async with app_for(model_directory, saying(SAID, end=None)) as app:
        body = {"inputs": "x", "parameters": {"stop": ["zzz", "n, n"], "details": True}}
        whole = await app.post("/generate", **body)
        assert whole["generated_text"] == "the baton, n"
        assert whole["details"]["finish_reason"] == "stop_sequence"
        events = await app.events("/generate_stream", **body)
        assert events[-1]["generated_text"] == "the baton, n"
        assert events[-1]["details"]["finish_reason"] == "stop_sequence"
        # Each token has its whole text, although that may be the beginning of a stop string.
        assert "".join(event["token"]["text"] for event in events) == "the baton, n"
        assert [event["token"] for event in events] == whole["details"]["tokens"]
        for submit in app.player.submits:
            assert await app.player.cancelled.get() == (submit.request_id, 1)


async def test_length(model_directory: Path) -> None:
    async with app_for(model_directory, saying("one relay", end=FinishReason.LENGTH)) as app:
        details = (await app.post("/generate", inputs="x", parameters={"max_new_tokens": 5, "details": True}))[
            "details"
        ]
        assert details["finish_reason"] == "length"
        assert app.player.submits[0].sampling.max_tokens == 5
        await app.post("/generate", inputs="x", parameters={"max_new_tokens": None})
        submit = app.player.submits[1]
        assert submit.sampling.max_tokens == app.player.card.max_model_len - len(submit.token_ids)  # what fits


async def test_prefill(model_directory: Path) -> None:
    async with app_for(model_directory, saying(SAID, has_eos=True)) as app:
        parameters: dict[str, Any] = {"decoder_input_details": True}
        details = (await app.post("/generate", inputs="hand over", parameters=parameters))["details"]
        ids = app.player.submits[0].token_ids
        assert ids == app.tokenizer.encode("hand over", add_special_tokens=True)
        assert [token["id"] for token in details["prefill"]] == ids
        assert [token["logprob"] for token in details["prefill"]] == [None] + [-0.25] * (len(ids) - 1)
        assert "".join(token["text"] for token in details["prefill"]) == "hand over"
        cut = (await app.post("/generate", inputs="hand over", parameters={**parameters, "truncate": 2}))["details"]
        assert [token["id"] for token in cut["prefill"]] == ids[-2:]


async def test_best_of_tells_all_sequences(model_directory: Path) -> None:
    texts = ["one relay", "the baton", "hands"]

    def script(player: Player, submit: Submit) -> None:
        tokens = tokens_of(player.tokenizer, texts[submit.sampling.choice], has_eos=True)
        logprob = (-0.9, -0.1, -0.5)[submit.sampling.choice]
        player.tokens(submit, 0, [SampledToken(token.token_id, logprob) for token in tokens], FinishReason.STOP)

    async with app_for(model_directory, script) as app:
        body = {"inputs": "x", "parameters": {"best_of": 3, "do_sample": True, "details": True}}
        whole = await app.post("/generate", **body)
        assert whole["generated_text"] == "the baton"
        others = whole["details"]["best_of_sequences"]
        assert [other["generated_text"] for other in others] == ["one relay", "hands"]
        assert {other["finish_reason"] for other in others} == {"eos_token"}
        assert [token["logprob"] for token in others[1]["tokens"]] == [-0.5] * len(others[1]["tokens"])
        seeds = {submit.sampling.seed for submit in app.player.submits}
        assert seeds == {whole["details"]["seed"], others[0]["seed"]}


async def test_the_seed_that_was_drawn_is_told(model_directory: Path) -> None:
    async with app_for(model_directory, saying("x", has_eos=True)) as app:
        for parameters, is_told in (
            ({"do_sample": True}, True),
            ({"seed": 2**64 - 1, "do_sample": True}, True),
            ({"top_k": 4}, True),
            ({"seed": 3}, False),  # greedy: the seed does not matter
        ):
            whole = await app.post("/generate", inputs="x", parameters={**parameters, "details": True})
            sampling = app.player.submits[-1].sampling
            assert whole["details"]["seed"] == (sampling.seed if is_told else None)
            assert parameters.get("seed") in (None, sampling.seed)


async def test_an_end_that_comes_late_is_told_with_the_last_token(model_directory: Path) -> None:
    """A worker fails after the last token, before it has sent the end. The last token's event tells the end."""

    def script(player: Player, submit: Submit) -> None:
        player.tokens(submit, 0, tokens_of(player.tokenizer, "one relay")[: submit.sampling.max_tokens])
        player.fail(submit, FailureCode.PEER_LOST)

    async with app_for(model_directory, script) as app:
        expected = tokens_of(app.tokenizer, "one relay")
        body = {"inputs": "x", "parameters": {"details": True, "max_new_tokens": len(expected)}}
        events = await app.events("/generate_stream", **body)
        assert [event["token"]["id"] for event in events] == [token.token_id for token in expected]
        assert events[-1]["generated_text"] == "one relay"
        assert events[-1]["details"]["finish_reason"] == "length"


async def test_an_error_in_the_middle_is_the_last_event(model_directory: Path) -> None:
    async with app_for(model_directory, failing(FailureCode.INTERNAL, after=2), relay={"max_attempts": 1}) as app:
        events = await app.events("/generate_stream", inputs="x")
        assert [event["token"]["id"] for event in events[:2]] == [100, 101]
        assert events[2]["error_type"] == "generation"
        assert events[2]["error"].startswith("Request failed during generation: 1 attempts failed")
        assert len(events) == 3
        assert (await app.metrics())[
            'kvrelay_requests_total{model="tiny",outcome="failed_mid_stream",route="/generate_stream"}'
        ] == 1


async def test_info_and_health(app: App) -> None:
    info = (await app.client.get("/info")).json()
    card = app.player.card
    assert info["model_id"] == "tiny"
    assert info["max_total_tokens"] == card.max_model_len
    assert info["max_input_tokens"] == card.max_model_len - 1
    assert info["model_device_type"] == "cpu"
    assert info["max_concurrent_requests"] == 1024
    assert info["router"] == "kvrelay"
    for path in ("/health", "/ping"):
        response = await app.client.get(path)
        assert (response.status_code, response.content) == (200, b"")
    await app.lose_worker()
    response = await app.client.get("/health")
    assert response.status_code == 503
    assert response.json()["error_type"] == "unhealthy"
    assert "no decode worker is up" in response.json()["error"]
