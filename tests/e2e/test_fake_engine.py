"""`kvrelay local --engine fake`: the whole relay without a model, in seconds."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvrelay.engine.fake.engine import expected_output
from kvrelay.launcher.client import counter_values
from kvrelay.launcher.local.deployment import LocalDeployment
from kvrelay.launcher.settings import LocalSettings
from kvrelay.wire.security.keys import make_keys

from .conftest import wait_until_idle
from .test_demo import http, prompt, stream_ids

pytestmark = pytest.mark.timeout(120)


@pytest.mark.fast
async def test_fakes_hand_over_real_blocks(model_directory: Path, tmp_path: Path) -> None:
    """With keys, and sealed: the other deployments here have neither."""
    make_keys(tmp_path)
    secured = {"keys": str(tmp_path), "seal_kv": True}
    settings = LocalSettings.of(port=0, engine="fake", local_prefill="fallback", fake_step_ms=1, **secured)
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
