"""`kvrelay local --engine fake`: the whole relay without a model, in seconds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvrelay.engine.fake import expected_output
from kvrelay.launcher.client import counter_values
from kvrelay.launcher.local import LocalDeployment
from kvrelay.launcher.settings import LocalSettings
from kvrelay.wire.keys import make_keys

from .conftest import wait_until_idle
from .test_demo import http, prompt, stream_ids

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("security", ["plain", "sealed", pytest.param("keys", marks=pytest.mark.fast)])
async def test_fakes_hand_over_real_blocks(security: str, model_directory: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"plain": {}, "sealed": {"seal_kv": True}, "keys": {"keys": str(tmp_path)}}[security]
    if security == "keys":
        make_keys(tmp_path)
    settings = LocalSettings.of(port=0, engine="fake", local_prefill_max_tokens=0, fake_step_ms=1, **options)
    with LocalDeployment.from_settings(settings, model_directory) as deployment:
        await asyncio.to_thread(deployment.wait_ready, timeout_s=60)
        prompts = [prompt(seed, 40 + 30 * seed) for seed in range(8)]
        async with http(deployment) as client:
            answers = await asyncio.gather(*(stream_ids(client, tokens, 20) for tokens in prompts))
        vocab_size = 49_152  # the demo model's
        assert answers == [expected_output(tokens, 20, vocab_size) for tokens in prompts]
        received = counter_values(deployment.admin_urls["decode-0"], "kvrelay_kv_blocks_received_total", {})
        # Every prompt's blocks: those of its tokens, the last one maybe in part.
        assert sum(received) == sum(-(-len(tokens) // 16) for tokens in prompts)
        await asyncio.to_thread(wait_until_idle, deployment)


async def test_a_client_that_hangs_up_frees_both_workers(
    model_directory: Path,
) -> None:
    """While the prompt is computed, which takes two seconds, and in the middle of the stream."""
    pace = {"fake_step_ms": 50, "fake_token_us": 5000}
    settings = LocalSettings.of(port=0, engine="fake", local_prefill_max_tokens=0, **pace)
    with LocalDeployment.from_settings(settings, model_directory) as deployment:
        await asyncio.to_thread(deployment.wait_ready, timeout_s=60)
        async with http(deployment) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/v1/completions", json={"prompt": prompt(1, 400), "stream": True}, timeout=0.5)
            body = {"prompt": prompt(2, 2), "max_tokens": 1000, "stream": True, "ignore_eos": True}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.aiter_lines()
                for _ in range(4):
                    await anext(lines)
        await asyncio.to_thread(wait_until_idle, deployment)
