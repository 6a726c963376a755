"""Adapters over HTTP: models that follow the contents of a directory, and the routes to load and unload them."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from kvrelay.common.adapter_files import WEIGHTS_FILE, AdapterError, AdapterRef, adapter_digest
from kvrelay.gateway.adapters import AdapterRegistry
from kvrelay.gateway.http.api_keys import hash_key
from tests.adapters import write_adapter
from tests.gateway.http_app import CHAT, TEXT, App, app_for, saying

SHAPES = {"model.layers.0.self_attn.q_proj": (12, 8)}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    (tmp_path / "adapters").mkdir()
    write_adapter(tmp_path / "adapters" / "formal", SHAPES)
    return tmp_path / "adapters"


@pytest.fixture
async def app(model_directory: Path, registry: Path, tmp_path: Path) -> AsyncIterator[App]:
    keys = tmp_path / "keys"
    keys.write_text(f"boss {hash_key('secret')} operator=1\nguest {hash_key('guest')}\n")
    async with app_for(model_directory, saying("yes"), adapters=(str(registry),), api_keys=str(keys)) as app:
        app.client.headers["authorization"] = "Bearer secret"
        yield app


async def served(app: App) -> list[str]:
    return [model["id"] for model in (await app.client.get("/v1/models")).json()["data"]]


def asked(app: App) -> AdapterRef | None:
    return app.player.submits[-1].adapter


async def test_an_adapter_is_a_models_name_in_every_api(app: App, registry: Path) -> None:
    client = openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="secret", http_client=app.client)
    models = (await client.models.list()).data
    assert [model.id for model in models] == ["tiny", "formal"]
    assert models[1].model_dump()["parent"] == "tiny"
    assert (await app.client.get("/v1/models/formal")).json()["id"] == "formal"
    base = await app.post(TEXT, prompt="x", model="tiny")
    assert asked(app) is None
    chat = await client.chat.completions.create(model="formal", messages=[{"role": "user", "content": "x"}])
    assert (chat.model, chat.choices[0].message.content) == ("formal", "yes")
    ref = asked(app)
    assert ref is not None
    assert ref.name == "formal"
    bodies: dict[str, dict[str, Any]] = {
        TEXT: {"prompt": "x", "model": "formal"},
        "/v1/responses": {"input": "x", "model": "formal"},
        "/generate": {"inputs": "x", "parameters": {"adapter_id": "formal"}},
        "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "model": "formal"},
    }
    for path, body in bodies.items():
        answer = await app.post(path, **body)
        assert asked(app) == ref, path
        if path == TEXT:
            assert answer["system_fingerprint"] != base["system_fingerprint"]
    await app.post("/generate", inputs="x")
    assert asked(app) is None
    refusal = await app.post(CHAT, 404, model="absent", messages=[{"role": "user", "content": "x"}])
    assert "'tiny', 'formal'" in refusal["error"]["message"]


async def test_an_operator_brings_and_takes_adapters(app: App, registry: Path, tmp_path: Path) -> None:
    source = tmp_path / "trained"
    ref = write_adapter(source, SHAPES, seed=1)
    answer = await app.client.post(LOAD, json={"lora_name": "new", "lora_path": str(source)})
    assert answer.text == "Success: LoRA adapter 'new' added successfully."
    shutil.rmtree(source)
    assert await served(app) == ["tiny", "formal", "new"]
    await app.post(TEXT, prompt="x", model="new")
    assert asked(app) == AdapterRef("new", ref.digest)
    assert (await app.client.post(UNLOAD, json={"lora_name": "new"})).status_code == 200
    assert await served(app) == ["tiny", "formal"]
    await app.post(TEXT, 404, prompt="x", model="new")
    await app.post(UNLOAD, 404, lora_name="new")
    assert [path.name for path in registry.iterdir()] == ["formal"]


async def test_what_a_killed_gateway_left_is_removed(registry: Path) -> None:
    for name, age_s in ((".adding-a", 4000), (".removing-b", 4000), (".adding-c", 60), (".snapshot", 4000)):
        write_adapter(registry / name / "fresh", SHAPES)
        os.utime(registry / name, (time.time() - age_s,) * 2)
    watching = asyncio.create_task(AdapterRegistry(registry).watch())
    try:
        async with asyncio.timeout(20):
            while any((registry / name).exists() for name in (".adding-a", ".removing-b")):
                await asyncio.sleep(0.005)  # polls for a state, bounded by the timeout above
    finally:
        watching.cancel()
    assert {path.name for path in registry.iterdir()} == {"formal", ".adding-c", ".snapshot"}


async def test_a_gateway_that_is_killed_while_it_replaces_an_adapter_loses_none(
    registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is on the disk before each rename, the next gateway serves the old adapter or the new one."""
    refs = {"formal": AdapterRef("formal", adapter_digest(registry / "formal"))}
    source, moments, rename = tmp_path / "trained", list[Path](), Path.rename
    new = write_adapter(source, SHAPES, seed=1)

    def noting(path: Path, target: Path) -> Path:
        moments.append(Path(shutil.copytree(registry, tmp_path / f"moment {len(moments)}")))
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", noting)
        await AdapterRegistry(registry).add("formal", source, replaces=True)
    assert len(moments) == 2
    for moment in moments:
        found = AdapterRegistry(moment)
        watching = asyncio.create_task(found.watch())
        try:
            async with asyncio.timeout(20):
                while found.refs != refs:
                    await asyncio.sleep(0.005)  # polls for a state, bounded by the timeout above
        finally:
            watching.cancel()
    assert adapter_digest(registry / "formal") == new.digest


async def test_an_adapter_that_cannot_be_replaced_stays(
    registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = adapter_digest(registry / "formal")
    source, rename = tmp_path / "trained", Path.rename
    write_adapter(source, SHAPES, seed=1)

    def failing(path: Path, target: Path) -> Path:
        if path.name == "fresh":
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(AdapterError, match="Input/output error"):
        await AdapterRegistry(registry).add("formal", source, replaces=True)
    assert [path.name for path in registry.iterdir()] == ["formal"]
    assert adapter_digest(registry / "formal") == digest


async def test_a_name_that_is_taken_is_replaced_only_if_asked(app: App, registry: Path, tmp_path: Path) -> None:
    source = tmp_path / "trained"
    ref = write_adapter(source, SHAPES, seed=1)
    body = {"lora_name": "formal", "lora_path": str(source)}
    assert "already" in (await app.post(LOAD, 400, **body))["error"]["message"]
    assert "a model's name" in (await app.post(LOAD, 400, **{**body, "lora_name": "tiny"}))["error"]["message"]
    assert (await app.client.post(LOAD, json={**body, "load_inplace": True})).status_code == 200
    await app.post(TEXT, prompt="x", model="formal")
    assert asked(app) == AdapterRef("formal", ref.digest)


async def test_adapters_are_replaced_in_turn(
    app: App, registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_adapter(tmp_path / "trained", SHAPES, seed=1)
    copy, num_inside, together = shutil.copyfile, 0, threading.Event()

    def watched(source: Path, target: Path) -> Path:
        nonlocal num_inside
        num_inside += 1
        if num_inside > 1:
            together.set()
        together.wait(0.1)  # for the other one, if that may come
        num_inside -= 1
        return Path(copy(source, target))

    monkeypatch.setattr(shutil, "copyfile", watched)
    body = {"lora_name": "formal", "lora_path": str(tmp_path / "trained"), "load_inplace": True}
    answers = await asyncio.gather(*(app.client.post(LOAD, json=body) for _ in range(2)))
    assert {answer.status_code for answer in answers} == {200}
    assert not together.is_set()
    assert [path.name for path in registry.iterdir()] == ["formal"]


async def test_only_adapters_are_taken_away(app: App, registry: Path) -> None:
    (registry / "note.txt").write_text("not an adapter")
    (registry / "backup").mkdir()
    for name in ("note.txt", "backup"):
        await app.post(UNLOAD, 404, lora_name=name)
    assert sorted(path.name for path in registry.iterdir()) == ["backup", "formal", "note.txt"]


async def test_a_directory_that_is_away_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The directory disappears twice. Each time there is one warning, and its adapters stay known."""
    there, away = tmp_path / "adapters", tmp_path / "away"
    write_adapter(there / "formal", SHAPES)
    registry = AdapterRegistry(there)
    for num_times in (1, 2):
        await registry.scan()
        there.rename(away)
        await registry.scan()
        await registry.scan()
        assert list(registry.refs) == ["formal"]
        assert sum("cannot be read" in one.getMessage() for one in caplog.records) == num_times
        away.rename(there)


async def test_a_folders_name_makes_no_line_of_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_adapter(tmp_path / "two\nlines", SHAPES)
    await AdapterRegistry(tmp_path).scan()
    [record] = caplog.records
    assert "two\\nlines" in record.getMessage()
    assert "\n" not in record.getMessage()


async def test_what_cannot_be_served_is_not_brought(app: App, registry: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "dora", SHAPES, use_dora=True)
    write_adapter(tmp_path / "cut", SHAPES)
    weights = tmp_path / "cut" / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:-1])
    for name, path, why in (
        ("a", tmp_path / "dora", "DoRA"),
        ("a", tmp_path / "cut", WEIGHTS_FILE),
        ("a", tmp_path / "absent", "cannot be read"),
        ("../a", tmp_path / "cut", "no name of an adapter"),
        (".a", tmp_path / "cut", "no name of an adapter"),
    ):
        refusal = await app.post(LOAD, 400, lora_name=name, lora_path=str(path))
        assert why in refusal["error"]["message"]
    assert "no name of an adapter" in (await app.post(UNLOAD, 400, lora_name="../keys"))["error"]["message"]
    assert [path.name for path in registry.iterdir()] == ["formal"]


async def test_only_operators_bring_adapters(app: App, registry: Path) -> None:
    app.client.headers["authorization"] = "Bearer guest"
    for path, body in (
        (LOAD, {"lora_name": "a", "lora_path": str(registry / "formal")}),
        (UNLOAD, {"lora_name": "formal"}),
    ):
        assert "operator=1" in (await app.post(path, 403, **body))["error"]["message"]
    assert await served(app) == ["tiny", "formal"]


async def test_without_keys_or_a_directory_nobody_brings_adapters(model_directory: Path, registry: Path) -> None:
    async with app_for(model_directory, saying("yes"), adapters=(str(registry),)) as app:
        await app.post(UNLOAD, 403, lora_name="formal")
    async with app_for(model_directory, saying("yes")) as app:
        await app.post(TEXT, 404, prompt="x", model="formal")
        refusal = await app.post("/generate", 422, inputs="x", parameters={"adapter_id": "formal"})
        assert "adapter_id='formal' is not served here" in refusal["error"]


async def test_the_directory_is_watched(app: App, registry: Path) -> None:
    """New adapters in the directory are served, and removed ones are not. Broken adapters and other files are left out."""
    write_adapter(registry / "broken", SHAPES, use_dora=True)
    write_adapter(registry / "informal", SHAPES, seed=2)
    (registry / "note.txt").write_text("not an adapter")
    async with asyncio.timeout(20):
        while await served(app) != ["tiny", "formal", "informal"]:
            await asyncio.sleep(0.05)  # polls for a state, bounded by the timeout above
        shutil.rmtree(registry / "formal")
        while await served(app) != ["tiny", "informal"]:
            await asyncio.sleep(0.05)
