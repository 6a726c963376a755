"""Images in chats, with fake engines: real blocks are handed over, and a fake answer depends on the images' files."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvrelay.launcher.client import counter_values
from kvrelay.launcher.local.deployment import LocalDeployment
from kvrelay.launcher.settings import LocalSettings

from ..images import png
from ..tokenizer_files import save_tokenizer
from .conftest import wait_restarted, wait_until_idle
from .test_demo import http

pytestmark = pytest.mark.timeout(300)

TEMPLATE = """{% for m in messages %}<user>{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}
{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %};{% endfor %}"""
SHOWN, OTHER = png(200, 130, 1), png(200, 130, 2)  # of one size
NUM_OUTPUT = 24


def write_model(directory: Path) -> Path:
    """A model directory without weights, whose tokenizer has a token for images."""
    text = "what is in this picture, and what is in the other one: a fox, or a dog?"
    save_tokenizer(directory, 320, ["<eos>", "<user>", "<pad>"], text, TEMPLATE)
    (directory / "config.json").write_text(json.dumps({"vocab_size": 320, "max_position_embeddings": 2048}))
    return directory


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalDeployment]:
    """A gateway, one prefill worker and one decode worker."""
    directory = write_model(tmp_path_factory.mktemp("sees"))
    # Steps take their time, so that a worker can be killed between two tokens.
    settings = LocalSettings.of(port=0, engine="fake", fake_step_ms=20, room_timeout_s=60)
    with LocalDeployment.from_settings(settings, directory) as running:
        running.wait_ready(timeout_s=180)
        yield running


def shown(*parts: str | bytes) -> dict[str, Any]:
    """A user's message of texts and PNG files."""
    content: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        else:
            url = f"data:image/png;base64,{base64.b64encode(part).decode()}"
            content.append({"type": "image_url", "image_url": {"url": url}})
    return {"role": "user", "content": content}


async def chat(client: httpx.AsyncClient, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A greedy answer, as JSON."""
    body = {"messages": messages, "max_tokens": NUM_OUTPUT, "temperature": 0, "ignore_eos": True, **fields}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def num_cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.fast
async def test_another_image_of_the_same_size_gives_another_answer(deployment: LocalDeployment) -> None:
    async with http(deployment) as client:
        question = "what is in this picture? " * 6
        first = await chat(client, shown(SHOWN, question))
        again = await chat(client, shown(SHOWN, question))
        other = await chat(client, shown(OTHER, question))
        assert text_of(first) == text_of(again) != text_of(other)
        assert first["usage"]["prompt_tokens"] == other["usage"]["prompt_tokens"]
        assert num_cached(first) == num_cached(other) == 0 < num_cached(again)
        received = counter_values(deployment.admin_urls["decode-0"], "kvrelay_kv_blocks_received_total", {})
        assert sum(received) > 0
        await asyncio.to_thread(wait_until_idle, deployment)


@pytest.mark.fast
async def test_a_second_turn_finds_the_first_one_cached(deployment: LocalDeployment) -> None:
    async with http(deployment) as client:
        asked = shown("a fox, or a dog? " * 5, SHOWN, "and the other one? ", OTHER)
        first = await chat(client, asked)
        turn = [asked, {"role": "assistant", "content": text_of(first)}, shown("and in this one?", SHOWN)]
        second = await chat(client, *turn)
        assert num_cached(second) >= first["usage"]["prompt_tokens"] // 16 * 16 - 16
        swapped = shown("a fox, or a dog? " * 5, OTHER, "and the other one? ", SHOWN)
        assert text_of(await chat(client, swapped)) != text_of(first)
        await asyncio.to_thread(wait_until_idle, deployment)


@pytest.mark.fast
async def test_several_choices_see_the_image_however_large_its_file_is(deployment: LocalDeployment) -> None:
    large = SHOWN[:-12] + bytes(20 * 10**6) + SHOWN[-12:]
    async with http(deployment) as client:
        alone = await chat(client, shown(large, "a dog?"))
        three = await chat(client, shown(large, "a dog?"), n=3)
        assert [choice["message"]["content"] for choice in three["choices"]] == [text_of(alone)] * 3
        await asyncio.to_thread(wait_until_idle, deployment)


@pytest.mark.fast
async def test_a_file_that_breaks_off_is_the_clients_error(deployment: LocalDeployment) -> None:
    async with http(deployment) as client:
        body = {"messages": [shown(SHOWN[:-6], "a dog?")], "max_tokens": 3}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400, answer.text
        assert "cut off" in answer.text
        await asyncio.to_thread(wait_until_idle, deployment)


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
async def test_a_killed_worker_costs_time_but_no_token(deployment: LocalDeployment, victim: str) -> None:
    """A worker is killed with SIGKILL while streams with images run. Each one gets the text that it gets without that."""
    prompts = [shown("a fox, or a dog? " * 9, png(200, 130, shade), f"number {shade}") for shade in range(10, 14)]
    async with http(deployment) as client:
        alone = [text_of(await chat(client, prompt, max_tokens=60)) for prompt in prompts]
        lost = deployment.pids[victim]

        async def stream(prompt: dict[str, Any]) -> str:
            body = {
                "messages": [prompt], "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True
            }  # fmt: skip
            text, num_chunks = "", 0
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                assert answer.status_code == 200, await answer.aread()
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    for choice in json.loads(line[6:])["choices"]:
                        text += choice["delta"].get("content") or ""
                    num_chunks += 1
                    if num_chunks == 8 and deployment.pids.get(victim) == lost:  # not yet killed for another stream
                        os.kill(lost, signal.SIGKILL)
            return text

        # A prefill worker is idle while these are decoded. So further prompts come meanwhile.
        late = [asyncio.create_task(chat(client, prompt, max_tokens=60)) for prompt in prompts]
        assert await asyncio.gather(*(stream(prompt) for prompt in prompts)) == alone
        assert [text_of(answer) for answer in await asyncio.gather(*late)] == alone
        await asyncio.to_thread(wait_restarted, deployment, victim, lost)
        await asyncio.to_thread(wait_until_idle, deployment)


async def test_requests_wait_while_the_only_prefill_worker_restarts(deployment: LocalDeployment) -> None:
    """They come before, while and after it is away. None fails, in any API, and each gets the text that it gets otherwise."""
    async with http(deployment) as client:
        prompt = shown(SHOWN, "a fox, or a dog?")
        alone = text_of(await chat(client, prompt))
        lost = deployment.pids["prefill-0"]
        answers: list[asyncio.Task[dict[str, Any]]] = []
        counts: list[asyncio.Task[httpx.Response]] = []
        image = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png(120, 90, 7)).decode()}
        counted = {"messages": [{"role": "user", "content": [{"type": "image", "source": image}]}]}
        os.kill(lost, signal.SIGKILL)

        def ask() -> None:
            answers.append(asyncio.create_task(chat(client, prompt)))
            counts.append(asyncio.create_task(client.post("/v1/messages/count_tokens", json=counted)))

        ask()
        while counter_values(deployment.admin_urls["gateway"], "kvrelay_workers_up", {"role": "prefill"}) != [0.0]:
            await asyncio.sleep(0.01)  # polls for a state
        num_before = len(answers)
        while deployment.pids.get("prefill-0") in (None, lost) or len(answers) < num_before + 10:
            ask()
            await asyncio.sleep(0.1)  # further requests come meanwhile
        text = await client.post("/v1/completions", json={"prompt": "a fox", "max_tokens": 3})
        assert text.status_code == 200, text.text  # a decode worker computes it
        assert [text_of(answer) for answer in await asyncio.gather(*answers)] == [alone] * len(answers)
        assert [answer.status_code for answer in await asyncio.gather(*counts)] == [200] * len(counts)
        await asyncio.to_thread(deployment.wait_ready, timeout_s=120)
        await asyncio.to_thread(wait_until_idle, deployment)
