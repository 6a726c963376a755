"""`kvrelay local --engine fake`: the whole relay in seconds, without a model's weights."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from kvrelay.engine.fake.language import expected_output
from kvrelay.launcher.client import counter_values
from kvrelay.launcher.local.deployment import LocalDeployment
from kvrelay.launcher.settings import LocalSettings
from kvrelay.wire.security.keys import make_keys

from .conftest import wait_until_idle
from .test_demo import http, prompt, stream_ids

pytestmark = pytest.mark.timeout(300)


@pytest.mark.fast
async def test_fakes_hand_over_real_blocks(model_directory: Path, tmp_path: Path) -> None:
    """Keys and sealed blocks are on here; the other deployments of these tests have neither."""
    make_keys(tmp_path)
    secured = {"keys": str(tmp_path), "seal_kv": True}
    settings = LocalSettings.of(port=0, engine="fake", local_prefill="fallback", fake_step_ms=1, **secured)
    with LocalDeployment.from_settings(settings, model_directory) as deployment:
        await asyncio.to_thread(deployment.wait_ready, timeout_s=180)
        prompts = [prompt(seed, 40 + 30 * seed) for seed in range(8)]
        async with http(deployment) as client:
            answers = await asyncio.gather(*(stream_ids(client, tokens, 20) for tokens in prompts))
        vocab_size = 49_152  # the demo model's vocabulary
        assert answers == [expected_output(tokens, 20, vocab_size) for tokens in prompts]
        received = counter_values(deployment.admin_urls["decode-0"], "kvrelay_kv_blocks_received_total", {})
        # All blocks of every prompt, including a last one that is not full.
        assert sum(received) == sum(-(-len(tokens) // 16) for tokens in prompts)
        await asyncio.to_thread(wait_until_idle, deployment)


@pytest.mark.fast
async def test_two_models_behind_one_gateway(model_directory: Path, tmp_path: Path) -> None:
    """Each model has its own workers and vocabulary. When one model's decode worker hangs, the other model still
    answers."""
    other = tmp_path / "other"
    other.mkdir()
    for path in (*model_directory.glob("*.json"), *model_directory.glob("*.jinja")):
        (other / path.name).write_bytes(path.read_bytes())
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 1000}))
    models = (f"demo={model_directory}", str(other))
    settings = LocalSettings.of(
        port=0,
        model=models,
        engine="fake",
        local_prefill="fallback",
        fake_step_ms=1,
        alias="chat=other",
        room_timeout_s=1,
    )
    with LocalDeployment.from_settings(settings, model_directory, other) as deployment:
        await asyncio.to_thread(deployment.wait_ready, timeout_s=180)
        tokens = [number % 900 for number in range(7, 60)]
        body = {"prompt": tokens, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
        async with http(deployment) as client:

            async def ids(model: str) -> list[int]:
                answer = await client.post("/v1/completions", json={**body, "model": model})
                assert answer.status_code == 200, answer.text
                return list(answer.json()["choices"][0]["token_ids"])

            assert await ids("demo") == expected_output(tokens, 12, 49_152)
            assert await ids("chat") == await ids("other") == expected_output(tokens, 12, 1000)
            received = counter_values(deployment.admin_urls["decode-other-1"], "kvrelay_kv_blocks_received_total", {})
            assert sum(received) > 0
            lost = deployment.pids["decode-other-1"]
            os.kill(lost, signal.SIGSTOP)  # stopped, because the launcher would restart a killed one
            try:
                answer = await client.post(
                    "/v1/completions", json={**body, "model": "chat"}, headers={"x-request-timeout": "2"}
                )
                assert answer.status_code in (503, 504)
                assert await ids("demo") == expected_output(tokens, 12, 49_152)
            finally:
                os.kill(lost, signal.SIGCONT)
        await asyncio.to_thread(wait_until_idle, deployment)
