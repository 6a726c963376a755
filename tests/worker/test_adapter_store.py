"""A worker's adapter store and its asyncio loop. Requests with adapters are tested in ``tests/relay/test_adapters.py``."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from kvrelay.common.adapter_files import AdapterRef
from kvrelay.engine.fake.adapters import FakeAdapters
from kvrelay.worker.adapters import AdapterRefusal, AdapterSettings, AdapterStore
from tests.adapters import write_adapter

SHAPES = {"model.layers.0.self_attn.q_proj": (16, 16)}
NBYTES = 4 * (16 + 16) * 2  # size of each adapter in a fake engine


class SlowToUnload(FakeAdapters):
    """Adapters whose unloading ends only when the asyncio loop allows it."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self.begun = asyncio.Event()
        self.may_end = threading.Event()

    def unload(self, slot: int) -> None:
        self._loop.call_soon_threadsafe(self.begun.set)
        assert self.may_end.wait(10.0), "the loop did not run meanwhile"
        super().unload(slot)


async def test_the_loop_goes_on_while_an_adapter_makes_room_for_another(tmp_path: Path) -> None:
    first, second = (write_adapter(tmp_path / name, SHAPES, seed=seed) for seed, name in enumerate(("one", "two")))
    slots = SlowToUnload()
    store = AdapterStore(slots, AdapterSettings(tmp_path, NBYTES))
    await acquire(store, first)
    store.release(first)
    waits = asyncio.create_task(acquire(store, second))
    await slots.begun.wait()
    slots.may_end.set()
    assert isinstance(await waits, int)
    assert store.loaded == [second.digest]


async def acquire(store: AdapterStore, ref: AdapterRef) -> int | AdapterRefusal:
    heard: asyncio.Future[int | AdapterRefusal] = asyncio.get_running_loop().create_future()
    store.acquire(ref, heard.set_result)
    return await heard
