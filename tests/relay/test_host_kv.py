"""Chats over real sockets to a prefill worker whose pool holds one of them, with the others in the host's memory.

Fake engines compare every byte of K/V before they sample, here and on the decode worker that gets the blocks.
"""

from __future__ import annotations

import asyncio
import random

import pytest
from prometheus_client import CollectorRegistry

from kvrelay.common.errors import SettingsError
from kvrelay.engine.fake.engine import FakeEngine, fake_card
from kvrelay.gateway.settings import RelaySettings
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings
from kvrelay.prefill_worker.worker import PrefillWorker
from tests.relay.test_multi_turn import BLOCK, full_blocks, tokens

from ..engine.late_device import LateDevice
from .test_on_devices import on_device
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
    while tier.num_queued or tier._out._under_way:
        await asyncio.sleep(0.001)  # polls for a state


@pytest.mark.parametrize("way", ["plain", "slots", "direct"])
async def test_many_chats_at_a_time_get_the_right_tokens(way: str) -> None:
    """Also on a device that copies as late as it may, for the hand-off and for the tier at the same time."""
    registry = CollectorRegistry()
    settings = PrefillSchedulerSettings(max_batched_tokens=32)
    card = fake_card(num_blocks=60, block_size=BLOCK)
    device = LateDevice(random.Random(1), hashes=True, reaches=way == "direct")
    engine = FakeEngine(card) if way == "plain" else on_device(card, device)
    prefill = PrefillWorker(engine, settings, worker_setup("prefill", registry, host_kv_bytes=2**20))
    decode = decode_worker(None, fake_card(num_blocks=1024, block_size=BLOCK, max_model_len=card.max_model_len))

    async def chat(number: int) -> None:
        prompt = tokens(number % 4, 61)  # four of them begin alike
        for turn in range(4):
            output, _ = await generate(relay, f"{number}-{turn}", prompt, 4)
            prompt = [*prompt, *output, *tokens(100 * turn + number, 10)]

    async with gateway([prefill], [decode], FALLBACK) as relay:
        await asyncio.gather(*map(chat, range(12)))
        assert registry.get_sample_value("kvrelay_host_kv_tokens_total")
    assert (device.num_direct > 0) == (way == "direct")
    assert not device.registered


def test_memory_for_less_than_a_block_is_refused() -> None:
    setup = worker_setup("prefill", host_kv_bytes=1)
    with pytest.raises(SettingsError, match=r"--host-kv-mb is 0, less than a KV block of 0\.00 MiB"):
        PrefillWorker(FakeEngine(fake_card()), PrefillSchedulerSettings(), setup)
    setup.network.close()
