"""OpenAI's routes over HTTP, with a worker that plays a script: shapes, limits, errors and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers

from kvrelay import __version__
from kvrelay.gateway.settings import HttpLimits
from kvrelay.wire.messages import Submit

from .http_app import CHAT, TEXT, App, app_for, saying

USER = [{"role": "user", "content": "hand over"}]
SAID = "the baton, née 🏃 here"


# -- shapes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_message", [1, 3, 100])
async def test_text_is_whole_and_the_same_however_it_comes(model_directory: Path, per_message: int) -> None:
    async with app_for(model_directory, saying(SAID, per_message=per_message)) as app:
        num_tokens = len(app.tokenizer.encode(SAID, add_special_tokens=False))
        whole = await app.post(CHAT, messages=USER)
        assert whole["object"] == "chat.completion"
        assert whole["choices"][0]["message"] == {"role": "assistant", "content": SAID, "refusal": None}
        assert whole["choices"][0]["finish_reason"] == "stop"
        assert whole["usage"]["completion_tokens"] == num_tokens
        assert whole["usage"]["prompt_tokens"] == len(app.player.submits[0].token_ids)
        assert app.tokenizer.decode(app.player.submits[0].token_ids) == "hand over\n"
        events = await app.events(CHAT, messages=USER, stream_options={"include_usage": True})
        assert events[0]["choices"][0]["delta"]["role"] == "assistant"
        assert events[-1]["choices"] == []
        assert events[-1]["usage"] == whole["usage"]
        pieces = [event["choices"][0]["delta"].get("content", "") for event in events[:-1]]
        assert "".join(pieces) == SAID
        assert not any("\ufffd" in piece for piece in pieces)
        texts = [event["choices"][0]["text"] for event in await app.events(TEXT, prompt="x", max_tokens=99)]
        assert "".join(texts) == SAID


async def test_output_goes_on_with_the_prompts_text_and_a_message_begins_one(tmp_path: Path) -> None:
    """A tokenizer of SentencePiece's kind drops the space at the beginning of a text."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁I": 0, "▁am": 1, "▁here": 2, "</s>": 3}, "</s>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    backend.decoder = tokenizers.decoders.Metaspace()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    async with app_for(tmp_path, saying("am here")) as app:
        for echo in (False, True):
            answer = await app.post(TEXT, prompt="I", echo=echo)
            assert answer["choices"][0]["text"] == f"{'I' if echo else ''} am here"
        for goes_on in (False, True):
            messages = [{"role": "assistant", "content": "I"}]
            answer = await app.post(CHAT, messages=messages, continue_final_message=goes_on)
            assert answer["choices"][0]["message"]["content"] == f"{' ' if goes_on else ''}am here"
        assert (await app.post("/generate", inputs="I"))["generated_text"] == " am here"
        events = await app.events("/generate_stream", inputs="I")
        assert [event["token"]["text"] for event in events] == [" am", " here"]


async def test_no_chunk_of_a_chat_is_empty_inside_a_character(model_directory: Path) -> None:
    """A client that prints ``delta.content`` would print None."""
    async with app_for(model_directory, saying("one 🏃 relay")) as app:
        _, *chunks, last = await app.events(CHAT, messages=USER)
    said = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    assert all(said)
    assert "".join(said) + last["choices"][0]["delta"].get("content", "") == "one 🏃 relay"


async def test_every_chunk_tells_the_usage_so_far(model_directory: Path) -> None:
    async with app_for(model_directory, saying("one relay hands on")) as app:
        options = {"include_usage": True, "continuous_usage_stats": True}
        for path, fields in ((CHAT, {"messages": USER}), (TEXT, {"prompt": ["x", "one relay"], "max_tokens": 99})):
            *chunks, last = await app.events(path, **fields, stream_options=options)
            prompts = {len(submit.token_ids) for submit in app.player.submits[-len(fields.get("prompt", "x")) :]}
            for index in {chunk["choices"][0]["index"] for chunk in chunks}:
                told = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
                assert len({usage["prompt_tokens"] for usage in told}) == 1
                counts = [usage["completion_tokens"] for usage in told]
                assert counts == list(range(1 - (path == CHAT), len(counts) + 1 - (path == CHAT)))
            assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == prompts
            ends = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
            assert sum(usage["total_tokens"] for usage in ends) == last["usage"]["total_tokens"]
        *before, last = await app.events(CHAT, messages=USER, stream_options={"include_usage": True})
        assert all(chunk["usage"] is None for chunk in before)
        assert last["usage"]["completion_tokens"] > 0
        assert not any("usage" in chunk for chunk in await app.events(CHAT, messages=USER))


async def test_log_probabilities(model_directory: Path) -> None:
    async with app_for(model_directory, saying("one relay")) as app:
        ids = app.tokenizer.encode("one relay", add_special_tokens=False)
        texts = [app.tokenizer.token_text(token_id) for token_id in ids]
        chat = (await app.post(CHAT, messages=USER, logprobs=True, top_logprobs=2))["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in chat] == texts
        assert all(entry["logprob"] == -0.5 and len(entry["top_logprobs"]) == 2 for entry in chat)
        assert [bytes(entry["bytes"]).decode() for entry in chat] == texts
        assert app.player.submits[-1].sampling.num_logprobs == 2
        text = (await app.post(TEXT, prompt="x", logprobs=1))["choices"][0]["logprobs"]
        assert text["tokens"] == texts
        assert text["token_logprobs"] == [-0.5] * len(ids)
        assert text["text_offset"] == [len("".join(texts[:index])) for index in range(len(texts))]
        streamed = await app.events(TEXT, prompt="x", logprobs=1)
        assert [o for event in streamed for o in event["choices"][0]["logprobs"]["text_offset"]] == text["text_offset"]
        await app.post(TEXT, prompt="x")
        assert app.player.submits[-1].sampling.num_logprobs is None


async def test_a_stop_string_over_tokens_ends_the_work(model_directory: Path) -> None:
    """A stop string spans several tokens. The client sees nothing of it, and the worker gets a cancel."""
    async with app_for(model_directory, saying(SAID, end=None)) as app:
        for run in (1, 2):
            if run == 1:
                text = (await app.post(CHAT, messages=USER, stop=["n, n", "zzz"]))["choices"][0]["message"]["content"]
            else:
                events = await app.events(CHAT, messages=USER, stop="n, n")
                assert events[-1]["choices"][0]["finish_reason"] == "stop"
                text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
            assert text == "the bato"
            submit = app.player.submits[-1]
            assert await app.player.cancelled.get() == (submit.request_id, 1)
        metrics = await app.metrics()
        assert metrics['kvrelay_attempts_total{model="tiny",outcome="stopped"}'] == 2
        assert metrics['kvrelay_request_duration_seconds_count{model="tiny"}'] == 2


@pytest.mark.parametrize(
    ("path", "body", "max_tokens"),
    [
        (CHAT, {"messages": USER, "max_completion_tokens": 7, "max_tokens": 9}, 7),
        (CHAT, {"messages": USER, "max_tokens": 9}, 9),
        (CHAT, {"messages": USER}, None),  # as many as fit
        (TEXT, {"prompt": [5, 6]}, 16),
    ],
)
async def test_defaults_are_openais(app: App, path: str, body: dict[str, Any], max_tokens: int | None) -> None:
    await app.post(path, **body)
    await app.post(path, **body, seed=-3, ignore_eos=True)
    first, second = app.player.submits
    assert first.sampling.max_tokens == (max_tokens or 512 - len(first.token_ids))
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.top_k) == (1.0, 1.0, 0)
    assert 0 <= first.sampling.seed < 2**63
    assert first.sampling.stop_token_ids == app.tokenizer.eos_ids
    assert second.sampling.seed == 2**64 - 3
    assert second.sampling.stop_token_ids == ()


# -- refusals ------------------------------------------------------------------------------------------------------


async def test_bodies(model_directory: Path) -> None:
    async def chunked(size: int) -> AsyncIterator[bytes]:
        for _ in range(size // 500):
            yield b" " * 500

    async def unfinished() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    limits = HttpLimits(client_timeout_s=0.2)
    async with app_for(model_directory, saying("x"), max_body_bytes=2000, http=limits) as app:
        response = await app.client.post(TEXT, content=unfinished())
        assert (response.status_code, response.json()["error"]["code"]) == (408, "request_too_slow")
        for content in (b" " * 2001, chunked(3000)):
            response = await app.client.post(TEXT, content=content)
            assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
            assert "2000" in response.text
        response = await app.client.post(TEXT, content=b'{"prompt": "x"}', headers={"content-type": "text/plain"})
        assert response.status_code == 400
        assert "content-type: application/json" in response.text
        response = await app.client.get(CHAT)
        assert (response.status_code, response.headers["allow"]) == (405, "POST")
        assert response.json()["error"]["code"] == "method_not_allowed"
        assert response.json()["error"]["message"] == f"'{CHAT}' does not take 'GET'; send POST"
        nowhere = (await app.client.get(f"/nowhere{'x' * 1000}")).json()["error"]
        assert nowhere["code"] == "not_found"
        assert nowhere["message"] == f"there is no '/nowhere{'x' * 72}' here; /docs lists all paths"
        for path in ("/v1/completions%0A", "/v1/chat/completions%0A", "/generate%0A"):  # the framework accepts them
            answer = await app.client.post(path, json={"prompt": "x", "inputs": "x", "messages": []})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_nothing_in_a_request_chooses_a_worker_a_path_or_an_address(model_directory: Path) -> None:
    """Fields and headers with addresses and paths are ignored. The worker gets the same request as without them."""
    evil = "tcp://evil.example:1"
    fields = {"decode": {"address": evil}, "address": evil, "worker": evil, "data_address": evil, "attempt": 7}
    fields |= {"request_id": "../../etc/passwd", "adapter": "/etc/passwd", "tokenizer": "/etc/passwd", "lora": evil}
    headers = {"x-worker": evil, "x-forwarded-host": "evil.example", "x-request-id": "../../etc/passwd"}
    async with app_for(model_directory, saying("a")) as app:
        for path, body in ((TEXT, {"prompt": "a"}), (CHAT, {"messages": [{"role": "user", "content": "a"}]})):
            plain = await app.client.post(path, json={**body, "max_tokens": 3, "temperature": 0})
            laden = await app.client.post(
                path, json={**body, **fields, "max_tokens": 3, "temperature": 0}, headers=headers
            )
            assert (plain.status_code, laden.status_code) == (200, 200)
            assert laden.json()["choices"] == plain.json()["choices"]
            assert "passwd" not in laden.headers["x-request-id"]
        for first, second in _pairs(app.player.submits):
            assert (second.token_ids, second.decode, second.attempt) == (first.token_ids, first.decode, 1)
            assert "passwd" not in second.request_id


def _pairs(submits: list[Submit]) -> list[tuple[Submit, Submit]]:
    return list(zip(submits[::2], submits[1::2], strict=True))


async def test_readiness_tells_nothing_of_single_workers(app: App) -> None:
    """Anybody may ask whether a gateway is ready. What is wrong with its workers is for operators."""
    await app.lose_worker()
    assert (await app.client.get("/health/ready")).json() == {
        "status": "unavailable",
        "reasons": ["no decode worker is up"],
    }
    (model,) = (await app.client.get("/debug/workers")).json()["models"]
    (problem,) = model["problems"]
    assert problem.startswith("no decode worker is up (")


async def test_the_version(app: App) -> None:
    answer = await app.client.get("/version")
    assert (answer.status_code, answer.json()) == (200, {"version": __version__})
