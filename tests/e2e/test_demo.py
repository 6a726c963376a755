"""The demo model through the whole relay, as users see it."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from kvrelay.launcher.local.deployment import LocalDeployment

from .conftest import wait_until_idle

pytestmark = pytest.mark.timeout(300)

BLOCK = 16  # tokens
CHAT = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(100, 40000), k=length)


async def stream_ids(client: httpx.AsyncClient, tokens: list[int], max_tokens: int) -> list[int]:
    """The greedy output of one streamed completion."""
    body = {
        "prompt": tokens, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True,
    }  # fmt: skip
    ids: list[int] = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                ids += event["choices"][0]["token_ids"]
    return ids


def http(deployment: LocalDeployment) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=deployment.url, timeout=240, limits=httpx.Limits(max_connections=64))


@pytest.mark.fast
def test_the_unmodified_openai_client(deployment: LocalDeployment) -> None:
    with openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="unused", max_retries=0) as client:
        model = client.models.list().data[0].id
        whole = client.chat.completions.create(model=model, messages=CHAT, max_tokens=24, temperature=0)
        assert "Paris" in (whole.choices[0].message.content or "")
        assert whole.usage is not None
        assert whole.usage.completion_tokens <= 24
        chunks = list(
            client.chat.completions.create(
                model=model,
                messages=CHAT,
                max_tokens=24,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="nobody", messages=CHAT)
        with pytest.raises(openai.BadRequestError, match="8192"):
            client.completions.create(model=model, prompt=[5] * 9000)


@pytest.mark.fast
def test_it_says_what_transformers_says(deployment: LocalDeployment, model_directory: Path, tmp_path: Path) -> None:
    """`kvrelay verify` passes against the running deployment with three prompts. `make verify` runs all of it."""
    prompts = ["Hello", "The three primary colours are", "Once upon a time " * 90]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    arguments = ["--prompts", str(path), "--max-tokens", "16", "--url", deployment.url, "--concurrency", "3"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "kvrelay.launcher", "verify", "--model", str(model_directory), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


async def test_a_chats_second_turn_is_the_same_cached_and_anew(deployment: LocalDeployment) -> None:
    """The second turn of a chat has the same text with cached blocks as without them, under a cache salt."""
    question = {
        "role": "user",
        "content": "Name the three primary colours, and say in one sentence what each is used for.",
    }
    more = {"role": "user", "content": "And which colour do the first two of them give when they are mixed?"}

    async def ask(
        client: httpx.AsyncClient, messages: list[dict[str, str]], **fields: str
    ) -> tuple[str, dict[str, Any]]:
        body = {"messages": messages, "max_tokens": 40, "temperature": 0, **fields}
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        answer = response.json()
        return answer["choices"][0]["message"]["content"], answer["usage"]

    async with http(deployment) as client:
        first, usage = await ask(client, [question])
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        num_first = usage["prompt_tokens"]
        turn = [question, {"role": "assistant", "content": first}, more]
        second, usage = await ask(client, turn)
        assert usage["prompt_tokens_details"]["cached_tokens"] >= num_first // BLOCK * BLOCK > num_cached
        again, usage = await ask(client, turn)
        assert again == second
        assert usage["prompt_tokens_details"]["cached_tokens"] == (usage["prompt_tokens"] - 1) // BLOCK * BLOCK
        anew, usage = await ask(client, turn, cache_salt="nobody shares these blocks")
        assert anew == second
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    await asyncio.to_thread(wait_until_idle, deployment)
