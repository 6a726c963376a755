"""Adapters through the whole relay. The fake engines' K/V and tokens depend on the adapter, and the engines read all K/V back.

So a request fails if a worker or a hand-off gives it a block of another adapter.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvrelay.common.adapter_files import WEIGHTS_FILE, AdapterRef, adapter_digest
from kvrelay.decode_worker.worker import DecodeWorker
from kvrelay.engine.fake.step import Share
from kvrelay.gateway.errors import InvalidRequestError, OverloadedError
from kvrelay.gateway.relay.relay import Relay
from kvrelay.gateway.settings import RelaySettings
from kvrelay.prefill_worker.worker import PrefillWorker
from kvrelay.worker.adapters import AdapterSettings
from tests.adapters import write_adapter
from tests.relay.workers import decode_worker, gateway, generate, prefill_worker

SHAPES = {"model.layers.0.self_attn.q_proj": (16, 16)}
NBYTES = 4 * (16 + 16) * 2  # size of each adapter in a fake engine
PROMPT = list(range(100, 123))
HAND_OFF = RelaySettings(local_prefill="fallback", room_timeout_s=60.0)


@pytest.fixture
def refs(tmp_path: Path) -> list[AdapterRef]:
    return [write_adapter(tmp_path / f"style-{seed}", SHAPES, seed=seed) for seed in range(4)]


def settings_of(directory: Path, num_adapters: int = 8) -> dict[str, Any]:
    return {"adapters": AdapterSettings(directory, num_adapters * NBYTES)}


def loaded(worker: PrefillWorker | DecodeWorker) -> set[str]:
    return set(worker.service.status().adapters)


async def test_no_block_of_one_adapter_is_used_for_another(tmp_path: Path, refs: list[AdapterRef]) -> None:
    """The base model and two adapters each compute the same prompt twice. Each finds only its own blocks in the cache."""
    prefill, decode = prefill_worker(**settings_of(tmp_path)), decode_worker(**settings_of(tmp_path))
    async with gateway([prefill], [decode], HAND_OFF) as relay:
        cached = {}
        for turn in range(2):
            for adapter in (None, refs[0], refs[1]):
                name = f"{turn}-{adapter.name if adapter else 'base'}"
                _, cached[turn, adapter] = await generate(relay, name, PROMPT, 5, adapter=adapter)
        assert [cached[0, one] for one in (None, refs[0], refs[1])] == [0, 0, 0]
        assert all(cached[1, one] >= 20 for one in (None, refs[0], refs[1]))
        assert loaded(prefill) == loaded(decode) == {refs[0].digest, refs[1].digest}


async def test_the_same_files_under_another_name_share_blocks(tmp_path: Path, refs: list[AdapterRef]) -> None:
    shutil.copytree(tmp_path / refs[0].name, tmp_path / "copy")
    prefill, decode = prefill_worker(**settings_of(tmp_path)), decode_worker(**settings_of(tmp_path))
    async with gateway([prefill], [decode], HAND_OFF) as relay:
        await generate(relay, "a", PROMPT, 5, adapter=refs[0])
        _, num_cached = await generate(relay, "b", PROMPT, 5, adapter=AdapterRef("copy", refs[0].digest))
        assert num_cached >= 20
        assert len(loaded(decode)) == 1


async def test_a_few_places_serve_many_adapters_in_turns(tmp_path: Path, refs: list[AdapterRef]) -> None:
    """The workers have room for two adapters. The least recently used one is evicted, and requests for four all finish."""
    prefill, decode = prefill_worker(**settings_of(tmp_path, 2)), decode_worker(**settings_of(tmp_path, 2))
    async with gateway([prefill], [decode], HAND_OFF) as relay:
        for turn, index in enumerate((0, 1, 0, 2)):
            await generate(relay, f"{turn}", PROMPT, 3, adapter=refs[index])
            while prefill.service.entries or decode.service.entries:  # one that is in use is not evicted
                await asyncio.sleep(0.001)
        assert loaded(prefill) == loaded(decode) == {refs[0].digest, refs[2].digest}
        several = [generate(relay, f"s{index}", PROMPT, 6, adapter=refs[index % 4]) for index in range(12)]
        await asyncio.gather(*several)


async def test_failover_goes_to_a_worker_that_has_not_loaded_it(tmp_path: Path, refs: list[AdapterRef]) -> None:
    failing: set[str] = set()

    def worker(name: str) -> DecodeWorker:
        def on_step(rows: Sequence[Share]) -> None:
            if name in failing and any(row.sequence.num_output_tokens > 3 for row in rows):
                raise RuntimeError("this worker computes no more")

        return decode_worker(None, None, on_step, name=name, **settings_of(tmp_path))

    decodes = {name: worker(name) for name in ("d1", "d2")}
    async with gateway([prefill_worker(**settings_of(tmp_path))], list(decodes.values()), HAND_OFF) as relay:
        await generate(relay, "warm", PROMPT, 3, adapter=refs[0])
        [has_it] = [name for name, decode in decodes.items() if loaded(decode)]
        while not any(worker.status and worker.status.adapters for worker in relay.pool.decodes.values()):
            relay.pool.changed.clear()
            await relay.pool.changed.wait()
        failing.add(has_it)
        await generate(relay, "fails over", PROMPT[::-1], 9, adapter=refs[0])
        assert all(loaded(decode) == {refs[0].digest} for decode in decodes.values())


async def test_routing_prefers_workers_that_have_it(tmp_path: Path, refs: list[AdapterRef]) -> None:
    options = settings_of(tmp_path)
    prefills = [prefill_worker(name=f"p{index}", **options) for index in range(3)]
    decodes = [decode_worker(name=f"d{index}", **options) for index in range(3)]
    async with gateway(prefills, decodes, HAND_OFF) as relay:
        await generate(relay, "first", PROMPT, 3, adapter=refs[0])
        while sum(bool(worker.status and worker.status.adapters) for worker in relay.pool.workers) < 2:
            relay.pool.changed.clear()
            await relay.pool.changed.wait()
        for index in range(6):
            await generate(relay, f"{index}", [index, *PROMPT], 3, adapter=refs[0])
        assert sum(map(bool, map(loaded, prefills))) == sum(map(bool, map(loaded, decodes))) == 1


async def test_a_broken_adapter_is_refused_by_name_and_disturbs_nobody(tmp_path: Path, refs: list[AdapterRef]) -> None:
    path = tmp_path / refs[0].name / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:-8])
    cut = AdapterRef(refs[0].name, adapter_digest(path.parent))
    prefill, decode = prefill_worker(**settings_of(tmp_path)), decode_worker(**settings_of(tmp_path))
    async with gateway([prefill], [decode], HAND_OFF) as relay:
        others = [generate(relay, f"{index}", PROMPT, 8, adapter=refs[1]) for index in range(3)]
        broken = generate(relay, "broken", PROMPT, 8, adapter=cut)
        outside = generate(relay, "outside", PROMPT, 8, adapter=AdapterRef("../outside", "00"))
        *good, refused, nowhere = await asyncio.gather(*others, broken, outside, return_exceptions=True)
        assert not any(isinstance(one, BaseException) for one in good)
        assert isinstance(refused, InvalidRequestError), refused
        assert str(path) in str(refused)
        assert isinstance(nowhere, InvalidRequestError), nowhere


async def test_an_adapter_that_no_worker_has_is_waited_for(tmp_path: Path, refs: list[AdapterRef]) -> None:
    """A gateway may see a volume's change before a worker does. The request waits; it fails if the adapter never appears."""
    hidden = tmp_path / "hidden"
    (tmp_path / refs[0].name).rename(hidden)
    prefill, decode = prefill_worker(**settings_of(tmp_path)), decode_worker(**settings_of(tmp_path))
    async with gateway([prefill], [decode], HAND_OFF) as relay:
        waiting = asyncio.create_task(generate(relay, "waits", PROMPT, 5, adapter=refs[0]))
        await generate(relay, "meanwhile", PROMPT, 5, adapter=refs[1])
        hidden.rename(tmp_path / refs[0].name)
        await waiting
        impatient = Relay(relay.pool, replace(HAND_OFF, room_timeout_s=0.5), relay.metrics, relay.clock)
        with pytest.raises(OverloadedError):
            await generate(impatient, "never", PROMPT, 5, adapter=AdapterRef(refs[2].name, refs[3].digest))
