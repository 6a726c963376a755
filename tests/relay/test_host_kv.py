"""Chats over real sockets to a prefill worker whose pool holds one of them, with the others in the host's memory.

Fake engines compare every byte of K/V before they sample, here and on the decode worker that gets the blocks.
"""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from kvrelay.common.errors import SettingsError
from kvrelay.engine.fake.engine import FakeEngine, fake_card
from kvrelay.gateway.settings import RelaySettings
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings
from kvrelay.prefill_worker.worker import PrefillWorker
from tests.host_tier import has_copied_out
from tests.relay.test_multi_turn import BLOCK, full_blocks, tokens

from .workers import decode_worker, gateway, generate, prefill_worker, worker_setup

FALLBACK = RelaySettings(local_prefill="fallback")


@pytest.mark.parametrize("windows", [(None,), (None, 10)], ids=["all full", "with a window"])
async def test_a_chats_next_turn_finds_its_blocks_in_the_hosts_memory(windows: tuple[int | None, ...]) -> None:
    registry = CollectorRegistry()
    small = fake_card(num_blocks=40, block_size=BLOCK, windows=windows)
    large = fake_card(num_blocks=1024, block_size=BLOCK, windows=windows, max_model_len=small.max_model_len)
    prefill = prefill_worker(registry, small, host_kv_bytes=2**20)
    decode = decode_worker(None, large)

    def blocks(event: str) -> float:
        return registry.get_sample_value("kvrelay_host_kv_blocks_total", {"event": event}) or 0.0

    async with gateway([prefill], [decode], FALLBACK) as relay:
        chats = {number: tokens(number, 101) for number in range(5)}
        for turn in range(3):
            for number, prompt in chats.items():
                output, num_cached = await generate(relay, f"{number}-{turn}", prompt, 4)
                await copied_out(prefill)  # blocks that the next chat takes before would be missed
                assert num_cached == (full_blocks(len(prompt) - 1 - 4 - 10) if turn else 0)
                chats[number] = [*prompt, *output, *tokens(100 * turn + number, 10)]
        assert registry.get_sample_value("kvrelay_host_kv_tokens_total") == pytest.approx(10 * 104, rel=0.2)
        assert prefill.debug_kv()["host_kv"]["used"] == registry.get_sample_value("kvrelay_host_kv_used_blocks")
        assert min(blocks("kept"), blocks("returned")) > 0
        assert blocks("wrong") == 0


async def copied_out(prefill: PrefillWorker) -> None:
    """Wait until the tier has all blocks that are published."""
    tier = prefill._tier
    assert tier is not None
    while not has_copied_out(tier):
        await asyncio.sleep(0.001)  # polls for a state


def test_memory_for_less_than_a_block_is_refused() -> None:
    setup = worker_setup("prefill", host_kv_bytes=1)
    with pytest.raises(SettingsError, match=r"--host-kv-mb is 0, less than a KV block of 0\.00 MiB"):
        PrefillWorker(FakeEngine(fake_card()), PrefillSchedulerSettings(), setup)
    setup.network.close()
