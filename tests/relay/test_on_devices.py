"""The whole relay over pools on devices that copy late, hash their blocks, and reach the ring that both workers share.

The fake engines read what is in the pool. So a step that sees a block before its copy is over, or another block, fails.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
import torch

from kvrelay.common.late_bytes import Register
from kvrelay.common.model_card import ModelCard
from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.decode_worker.worker import DecodeWorker
from kvrelay.engine.fake.engine import FakeEngine, MemoryStore, fake_card
from kvrelay.engine.kv.device.copies import StagingPlan
from kvrelay.engine.kv.device.staged_read import StagedRead
from kvrelay.engine.kv.device.staging import Staging
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings
from kvrelay.prefill_worker.worker import PrefillWorker
from kvrelay.wire.lines.shared.place import SharedPlace

from ..engine.late_device import LateDevice
from .test_relay import prompt
from .workers import ADDRESS, gateway, generate, worker_setup


class DeviceStore(MemoryStore):
    """A fake engine's pool, which only its device can reach."""

    def __init__(self, card: ModelCard, device: LateDevice) -> None:
        geometry = card.layout.geometry
        super().__init__(card.num_blocks * len(geometry.groups), geometry.physical_nbytes)
        blocks = torch.frombuffer(self._memory, dtype=torch.uint8).view(self.num_blocks, -1)
        self._nbytes = [geometry.block_size * group.token_nbytes for group in geometry.groups]
        self._staging = Staging(blocks, StagingPlan(device, 4 * self.block_nbytes), self._nbytes)

    @property
    def register(self) -> Register | None:  # type: ignore[override]
        return None if self._staging.registered is None else self._staging.registered.register

    def open_read(self, block_id: int, group: int = 0) -> StagedRead:  # type: ignore[override]
        return self._staging.open_read(block_id, self._nbytes[group])

    def close_read(self, block_id: int) -> None:
        self._staging.close_read(block_id)

    def begin_write(self, block_id: int, group: int, payload: memoryview) -> Callable[[], bytes]:
        return self._staging.begin_write(block_id, payload)

    def open_write(self, block_id: int, group: int = 0) -> memoryview:
        return self._staging.open_write(block_id)

    def close_write(self, block_id: int) -> None:
        self._staging.close_write(block_id)

    def order_steps(self) -> None:
        self._staging.order_steps()


def on_device(card: ModelCard, device: LateDevice) -> FakeEngine:
    store = DeviceStore(card, device)
    engine = FakeEngine(card, lambda rows: store.order_steps())
    engine.store = store
    return engine


@pytest.mark.parametrize("seal_kv", [False, True], ids=["plain", "sealed"])
@pytest.mark.parametrize("reaches", [True, False], ids=["ring", "slots"])
@pytest.mark.parametrize("shared_memory", [SharedPlace(), None], ids=["one-host", "tcp"])
async def test_prompts_of_all_lengths_go_from_device_to_device(
    shared_memory: SharedPlace | None, reaches: bool, seal_kv: bool
) -> None:
    card = fake_card(num_blocks=256, windows=(None, 9))  # two groups, of which one ships its last blocks only
    devices = [LateDevice(random.Random(seed), hashes=True, reaches=reaches) for seed in (1, 2)]
    engines = [on_device(card, device) for device in devices]
    setups = [worker_setup(name, shared_memory=shared_memory, seal_kv=seal_kv) for name in ("prefill", "decode")]
    prefill = PrefillWorker(engines[0], PrefillSchedulerSettings(), setups[0])
    decode = DecodeWorker(engines[1], DecodeSchedulerSettings(), ADDRESS, setups[1])
    async with gateway([prefill], [decode]) as relay:
        await generate(relay, "first", prompt(100, 30), 5)
        lengths = [1, 3, 4, 5, 8, 63, 200, *range(20, 40)]
        await asyncio.gather(
            *(generate(relay, f"r{number}", prompt(number, length), 10) for number, length in enumerate(lengths))
        )
    num_direct = [device.num_direct for device in devices]
    assert all(num_direct) if reaches and shared_memory is not None and not seal_kv else not any(num_direct)
    if seal_kv:
        assert not any(device.num_asked for device in devices), "a seal needs the host: no copy goes directly"
    assert not any(device.registered for device in devices)
