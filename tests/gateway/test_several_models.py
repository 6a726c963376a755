"""Several models behind one gateway, over HTTP: which one answers, how they are listed, and one that is down."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvrelay.engine.fake.engine import fake_card
from kvrelay.gateway.http.api_keys import hash_key
from tests.adapters import write_adapter

from .http_app import CHAT, TEXT, App, apps_for, saying

USER = [{"role": "user", "content": "hand over"}]
ALIASES = ("chat=large", "canary=small:3+large:1")


def two_models(directory: Path, **settings: Any) -> AbstractAsyncContextManager[dict[str, App]]:
    """Applications of two models, each with a played worker that answers its model's name."""
    names = ("small", "large")
    cards = {name: fake_card(vocab_size=300, num_blocks=128, model_id=name) for name in names}
    return apps_for(directory, {name: saying(name) for name in names}, cards, alias=ALIASES, **settings)


async def test_each_request_goes_to_the_model_that_it_names(model_directory: Path) -> None:
    async with two_models(model_directory) as apps:
        app = apps["small"]
        named_answers = {"small": "small", "large": "large", "chat": "large", None: "small", "tgi": "small"}
        for name, answers in named_answers.items():
            named = {} if name is None else {"model": name}
            chat = await app.post(CHAT, messages=USER, **named)
            assert (chat["model"], chat["choices"][0]["message"]["content"]) == (answers, answers)
            text = await app.post(TEXT, prompt="x", max_tokens=20, **named)
            assert (text["model"], text["choices"][0]["text"]) == (answers, answers)
            response = await app.post("/v1/responses", input="x", **named)
            assert (response["model"], response["output"][-1]["content"][0]["text"]) == (answers, answers)
            message = await app.post("/v1/messages", messages=USER, max_tokens=20, **named)
            assert (message["model"], message["content"][0]["text"]) == (answers, answers)
            assert (await app.post("/generate", inputs="x", **named))["generated_text"] == answers
            assert (await app.client.get("/info", params=named)).json()["model_id"] == answers
            assert (await app.post("/tokenize", prompt="x", **named))["count"] == 1
        for path, body in ((CHAT, {"messages": USER}), ("/v1/responses", {"input": "x"})):
            error = (await app.post(path, status=404, model="medium", **body))["error"]
            assert error["code"] == "model_not_found"
            assert "'small', 'large', 'chat', 'canary'" in error["message"]


async def test_models_and_aliases_are_listed(model_directory: Path) -> None:
    async with two_models(model_directory, default_model="chat") as apps:
        client = apps["small"].client
        entries = {entry["id"]: entry for entry in (await client.get("/v1/models")).json()["data"]}
        assert list(entries) == ["small", "large", "chat", "canary"]
        assert entries["chat"]["root"] == "large"
        assert entries["canary"]["split"] == {"small": 0.75, "large": 0.25}
        assert all(entry["max_model_len"] == entries["small"]["max_model_len"] for entry in entries.values())
        assert (await client.get("/v1/models/canary")).json() == entries["canary"]
        assert (await apps["small"].post(CHAT, messages=USER))["model"] == "large"  # the default model


@pytest.mark.parametrize("field", ["prompt_cache_key", "user", "messages"])
async def test_a_conversation_stays_with_its_share(model_directory: Path, field: str) -> None:
    async with two_models(model_directory) as apps:
        app, counts = apps["small"], Counter[str]()

        async def ask(number: int, turn: int) -> str:
            first = f"question {number}" if field == "messages" else f"turn {turn}"
            messages = [{"role": "user", "content": first}]
            messages += [{"role": "assistant", "content": "so"}, {"role": "user", "content": f"turn {turn}"}] * turn
            named = {} if field == "messages" else {field: f"conversation {number}"}
            body = {"model": "canary", "messages": messages, "max_tokens": 1, **named}
            return str((await app.post(CHAT, **body))["model"])

        for number in range(64):
            turns = {await ask(number, turn) for turn in range(2)}
            assert len(turns) == 1
            counts.update(turns)
        assert 5 <= counts["large"] <= 28  # a quarter of 64; each bound fails with a chance of 1 in 1,000


LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SHAPES = {"model.layers.0.self_attn.q_proj": (12, 8)}


@pytest.fixture
def with_adapters(tmp_path: Path) -> dict[str, Any]:
    """Settings with adapters: each of two models has its own one, one with a name that both have, and one named as an alias."""
    for number, name in enumerate(("small", "large")):
        for adapter in (f"of-{name}", "of-both", "chat"):
            write_adapter(tmp_path / name / adapter, SHAPES, seed=number)
    keys = tmp_path / "keys"
    keys.write_text(f"boss {hash_key('secret')} operator=1\n")
    return {"adapters": tuple(f"{name}={tmp_path / name}" for name in ("large", "small")), "api_keys": str(keys)}


@asynccontextmanager
async def as_operator(directory: Path, settings: dict[str, Any]) -> AsyncIterator[dict[str, App]]:
    async with two_models(directory, **settings) as apps:
        apps["small"].client.headers["authorization"] = "Bearer secret"
        yield apps


async def test_each_model_has_adapters(model_directory: Path, with_adapters: dict[str, Any]) -> None:
    async with as_operator(model_directory, with_adapters) as apps:
        app = apps["small"]
        listed = {one["id"]: one.get("parent") for one in (await app.client.get("/v1/models")).json()["data"]}
        # A name that two have is the first model's, and none takes an alias.
        assert {name: parent for name, parent in listed.items() if parent is not None} == {
            "of-both": "small", "of-small": "small", "of-large": "large"
        }  # fmt: skip
        for name, base in (("of-small", "small"), ("of-large", "large"), ("of-both", "small")):
            for path, body in ((CHAT, {"messages": USER}), (TEXT, {"prompt": "x", "max_tokens": 20})):
                answer = await app.post(path, model=name, **body)
                assert answer["model"] == name
                said = answer["choices"][0]
                assert (said.get("text") or said["message"]["content"]) == base
                submitted = apps[base].player.submits[-1].adapter
                assert submitted is not None
                assert submitted.name == name
        await app.post(CHAT, model="large", messages=USER)
        assert apps["large"].player.submits[-1].adapter is None
        refusal = await app.post(CHAT, 404, model="of-none", messages=USER)
        assert "'of-large'" in refusal["error"]["message"]


async def test_an_operator_says_whose_adapter_is_brought(
    model_directory: Path, with_adapters: dict[str, Any], tmp_path: Path
) -> None:
    write_adapter(tmp_path / "trained", SHAPES, seed=5)
    async with as_operator(model_directory, with_adapters) as apps:
        app, body = apps["small"], {"lora_name": "new", "lora_path": str(tmp_path / "trained")}
        assert "base_model_name is needed" in (await app.post(LOAD, 400, **body))["error"]["message"]
        refusal = await app.post(LOAD, 400, **body, base_model_name="chat")
        assert (
            "'chat', which has no --adapters; models with adapters are 'small', 'large'" in refusal["error"]["message"]
        )
        assert (await app.client.post(LOAD, json={**body, "base_model_name": "large"})).status_code == 200
        assert (tmp_path / "large" / "new" / "adapter_config.json").is_file()
        assert (await app.post(TEXT, prompt="x", model="new", max_tokens=20))["choices"][0]["text"] == "large"
        for of in ({}, {"load_inplace": True}):
            refusal = await app.post(LOAD, 400, **body, base_model_name="small", **of)
            assert "is an adapter of model 'large'; take another" in refusal["error"]["message"]
        for name in ("large", "canary"):
            refusal = await app.post(LOAD, 400, **{**body, "lora_name": name}, base_model_name="small")
            assert "take another" in refusal["error"]["message"]
        for name, path in (("new", "large"), ("of-both", "small"), ("of-both", "large")):
            assert (tmp_path / path / name).is_dir()
            assert (await app.client.post(UNLOAD, json={"lora_name": name})).status_code == 200
            assert not (tmp_path / path / name).exists()
        await app.post(UNLOAD, 404, lora_name="of-both")


async def test_a_model_without_adapters_serves_beside_one_that_has_some(
    model_directory: Path, with_adapters: dict[str, Any]
) -> None:
    settings = {**with_adapters, "adapters": with_adapters["adapters"][:1]}
    async with as_operator(model_directory, settings) as apps:
        app = apps["small"]
        assert (await app.post(TEXT, prompt="x", model="of-both", max_tokens=20))["choices"][0]["text"] == "large"
        await app.post(TEXT, 404, prompt="x", model="of-small")


async def test_a_prompt_is_told_apart_by_more_than_its_first_character(model_directory: Path) -> None:
    async with two_models(model_directory) as apps:
        ask = apps["small"].post
        answers = {(await ask(TEXT, model="canary", prompt=f"question {n}", max_tokens=1))["model"] for n in range(32)}
        assert answers == {"small", "large"}
        for prompt in ("", [1, 2], ["", "x"], [[1], [2]]):
            await ask(TEXT, model="canary", prompt=prompt, max_tokens=1)


async def test_a_model_that_is_down_fails_alone_with_its_name(model_directory: Path) -> None:
    async with two_models(model_directory) as apps:
        app = apps["small"]
        await apps["large"].player.server.stop()
        async with asyncio.timeout(20):
            while not (ready := (await app.client.get("/health/ready")).json()).get("unavailable"):
                await asyncio.sleep(0.005)  # polls for a state, bounded
        assert (ready["status"], list(ready["unavailable"])) == ("ok", ["large"])
        response = await app.client.post(CHAT, json={"model": "chat", "messages": USER})
        assert (response.status_code, "retry-after" in response.headers) == (503, True)
        assert response.json()["error"]["message"].startswith("model 'large': no decode worker is up")
        assert (await app.post(CHAT, model="small", messages=USER))["choices"][0]["message"]["content"] == "small"
        assert (await app.client.get("/health")).status_code == 200
        known = (await app.client.get("/debug/workers")).json()
        assert [(one["model"], bool(one["problems"])) for one in known["models"]] == [("small", False), ("large", True)]
        assert {one["model"]: one["state"] for one in known["workers"]} == {"small": "up", "large": "down"}
        await app.lose_worker()


async def test_metrics_are_told_by_model(model_directory: Path) -> None:
    async with two_models(model_directory) as apps:
        app = apps["small"]
        await app.post(CHAT, messages=USER, model="chat")
        await app.post(TEXT, prompt="x", model="small", max_tokens=20)
        await app.post(TEXT, prompt="x", model="small", max_tokens=20)
        await app.post(CHAT, status=404, messages=USER, model="medium")
        metrics = await app.metrics()
        for model, num in (("small", 2), ("large", 1)):
            assert metrics[f'kvrelay_attempts_total{{model="{model}",outcome="finished"}}'] == num
            assert metrics[f'kvrelay_time_to_first_token_seconds_count{{model="{model}"}}'] == num
            assert metrics[f'kvrelay_workers_up{{model="{model}",role="decode"}}'] == 1
        assert metrics[f'kvrelay_requests_total{{model="large",outcome="200",route="{CHAT}"}}'] == 1
        assert metrics[f'kvrelay_requests_total{{model="",outcome="404",route="{CHAT}"}}'] == 1
        tokens = {model: metrics[f'kvrelay_gateway_output_tokens_total{{model="{model}"}}'] for model in apps}
        assert tokens["small"] > tokens["large"] > 0
