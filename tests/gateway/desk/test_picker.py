"""The metrics that endpoint pickers scrape: vLLM's names with this gateway's numbers."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvrelay.wire.messages import Submit

from ..http_app import TEXT, App, app_for, saying
from ..players import Player

CONFIG = 'vllm:cache_config_info{block_size="4",num_gpu_blocks="64"}'


async def until_scraped(app: App, **expected: float) -> None:
    """Wait until vLLM's metrics are these, without zeros and beside the size of the KV memory."""
    wanted = {CONFIG: 1.0, **{f"vllm:{name}": value for name, value in expected.items()}}
    found: dict[str, float] = {}
    async with asyncio.timeout(20):
        while found != wanted:
            found = {name: value for name, value in (await app.metrics()).items() if name.startswith("vllm:")}
            await asyncio.sleep(0.005)  # polls for a state, bounded by the timeout above


async def test_queue_and_memory(model_directory: Path) -> None:
    begun: asyncio.Queue[tuple[Player, Submit]] = asyncio.Queue()
    async with app_for(model_directory, lambda *play: begun.put_nowait(play), relay={"room_timeout_s": 20}) as app:
        await until_scraped(app)
        assert "vllm:num_requests_waiting 0.0" in (await app.client.get("/metrics")).text
        first = asyncio.create_task(app.client.post(TEXT, json={"prompt": [5] * 40, "max_tokens": 4}))
        play = await begun.get()
        app.player.num_free_blocks, app.player.num_running = 8, 1
        await until_scraped(app, num_requests_running=1, kv_cache_usage_perc=0.875)
        # This request finds too few blocks.
        other = asyncio.create_task(app.client.post(TEXT, json={"prompt": [6] * 60, "max_tokens": 4}))
        await until_scraped(app, num_requests_running=1, num_requests_waiting=1, kv_cache_usage_perc=0.875)
        app.player.num_free_blocks, app.player.num_running = 64, 0
        saying("x")(*play)
        saying("y")(*await begun.get())
        assert [answer.status_code for answer in await asyncio.gather(first, other)] == [200, 200]
        await until_scraped(app)
