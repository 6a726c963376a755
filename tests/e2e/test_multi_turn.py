"""A chat's next turn through a whole deployment: where it is computed, what of it is not, and that its text is the same."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvrelay.engine.fake import expected_output
from kvrelay.launcher.client import counter_values
from kvrelay.launcher.local import LocalDeployment
from kvrelay.launcher.settings import LocalSettings

from .conftest import wait_until_idle
from .test_demo import http, prompt

pytestmark = pytest.mark.timeout(300)

BLOCK = 16
VOCAB = 49_152  # the demo model's


async def complete(client: httpx.AsyncClient, tokens: list[int], max_tokens: int) -> tuple[list[int], int]:
    """Greedy output, and the cached tokens of the usage."""
    body = {"prompt": tokens, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_eight_chats_come_back_to_their_workers(model_directory: Path) -> None:
    """Two workers of each kind, all chats at a time: no block of a first turn is sent, or computed from its prompt, again."""
    settings = LocalSettings.of(port=0, engine="fake", prefill=2, decode=2, local_prefill_max_tokens=16, fake_step_ms=1)
    with LocalDeployment.from_settings(settings, model_directory) as deployment:
        await asyncio.to_thread(deployment.wait_ready, timeout_s=60)

        def sums(name: str, *roles: str) -> list[float]:
            return [sum(counter_values(deployment.admin_urls[role], name, {})) for role in roles]

        prompts = [prompt(seed, 400 + 10 * seed) for seed in range(8)]
        async with http(deployment) as client:
            firsts = await asyncio.gather(*(complete(client, tokens, 20) for tokens in prompts))
            assert [cached for _, cached in firsts] == [0] * 8
            decodes = ("decode-0", "decode-1")
            assert min(sums("kvrelay_sampled_tokens_total", "prefill-0", "prefill-1", *decodes)) > 0
            reused_before = sum(sums("kvrelay_kv_blocks_reused_total", *decodes))
            turns = [[*tokens, *output, *prompt(99, 60)] for tokens, (output, _) in zip(prompts, firsts, strict=True)]
            seconds = await asyncio.gather(*(complete(client, tokens, 20) for tokens in turns))
            assert [output for output, _ in seconds] == [expected_output(tokens, 20, VOCAB) for tokens in turns]
            assert [cached for _, cached in seconds] == [len(tokens) // BLOCK * BLOCK for tokens in prompts]
            reused = sum(sums("kvrelay_kv_blocks_reused_total", *decodes)) - reused_before
            assert reused == sum((len(tokens) + 20 - 1) // BLOCK for tokens in prompts)
            # Asked again, the rest is less than a block: the decode worker computes it, nothing is handed over.
            before = sum(sums("kvrelay_kv_blocks_received_total", *decodes))
            thirds = await asyncio.gather(*(complete(client, tokens, 20) for tokens in turns))
            assert [output for output, _ in thirds] == [output for output, _ in seconds]
            assert [cached for _, cached in thirds] == [(len(tokens) - 1) // BLOCK * BLOCK for tokens in turns]
            assert sum(sums("kvrelay_kv_blocks_received_total", *decodes)) == before
        await asyncio.to_thread(wait_until_idle, deployment)


async def test_a_chat_of_the_demo_model(deployment: LocalDeployment) -> None:
    """Two turns; the second one's text is the same with the cache, and without: on workers that start anew."""
    question = {
        "role": "user",
        "content": "Name the three primary colours, and say in one sentence what each is used for.",
    }
    more = {"role": "user", "content": "And which colour do the first two of them give when they are mixed?"}

    async def ask(client: httpx.AsyncClient, messages: list[dict[str, str]]) -> tuple[str, dict[str, Any]]:
        body = {"messages": messages, "max_tokens": 40, "temperature": 0}
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
        for name in ("prefill-0", "decode-0"):
            os.kill(deployment.pids[name], signal.SIGKILL)
        await asyncio.to_thread(deployment.wait_ready, timeout_s=120)
        anew, usage = await ask(client, turn)
        assert anew == second
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    await asyncio.to_thread(wait_until_idle, deployment)
