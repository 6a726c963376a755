"""A wrong block, and workers that do not fit each other: the fault is refused and the request still finishes.

Real workers on fake engines (which check every byte of K/V before they sample), real sockets, and the gateway's own relay on top.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvrelay.common.block_digests import digests_of
from kvrelay.wire.blocks.frames import BlockHeader
from kvrelay.wire.blocks.seal import BlockSealer, new_key
from kvrelay.wire.blocks.send_job import SendTicket
from kvrelay.wire.lines.block_sender import BlockSender
from kvrelay.wire.lines.shared.place import SharedPlace

from .workers import decode_worker, gateway, generate, prefill_worker

VOCAB = 1000
Sealer = BlockSealer | None


def four_prompts(seed: int) -> dict[str, list[int]]:
    """Prompts by name. They share no prefix, so that no worker is preferred for its cache."""
    source = random.Random(seed)
    return {name: source.choices(range(VOCAB), k=30) for name in "abcd"}


class Liar:
    """Replaces ``BlockSender.send``: one block gets a wrong bit, or is sealed by a wrong key. All other blocks are right."""

    def __init__(self) -> None:
        self.has_lied = False
        self._send = BlockSender.send

    def send(self, sender: BlockSender, header: BlockHeader, payload: Any, sealer: Sealer) -> SendTicket:
        if self.has_lied or header.block_index != 1:
            return self._send(sender, header, payload, sealer)
        self.has_lied = True
        if sealer is not None:
            return self._send(sender, header, payload, BlockSealer(new_key()))
        bad = bytearray(payload)
        bad[len(bad) // 2] ^= 1
        return self._send(sender, Proved(header, payload), memoryview(bad), None)  # type: ignore[arg-type]


class Proved:
    """A header with the checksum of another payload."""

    def __init__(self, header: BlockHeader, payload: memoryview) -> None:
        self.payload_nbytes = header.payload_nbytes
        self._frame = header.pack(digests_of(payload))

    def pack(self, _digests: bytes) -> bytes:
        return self._frame


WAYS: dict[str, dict[str, Any]] = {  # the path of blocks: arguments of both workers
    "tcp": {},
    "shared_memory": {"shared_memory": SharedPlace()},
}


def sent_over(registry: CollectorRegistry) -> set[str]:
    """The paths that a prefill worker sent blocks over."""
    samples = next(one for one in registry.collect() if one.name == "kvrelay_kv_blocks_sent").samples
    return {one.labels["path"] for one in samples if one.name.endswith("_total") and one.value}


@pytest.mark.parametrize("seal_kv", [False, True], ids=["plain", "sealed"])
@pytest.mark.parametrize("way", ["tcp", *(pytest.param(way, marks=pytest.mark.full) for way in WAYS if way != "tcp")])
async def test_a_lie_is_refused_counted_and_survived(way: str, seal_kv: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One decode worker refuses and counts one wrong block. The rest is in tests/wire/leases/test_lease_lies.py."""
    liar = Liar()

    def send(sender: BlockSender, header: BlockHeader, payload: Any, sealer: Sealer) -> SendTicket:
        return liar.send(sender, header, payload, sealer)

    monkeypatch.setattr(BlockSender, "send", send)
    prompt = random.Random(1).choices(range(VOCAB), k=30)
    registries = [CollectorRegistry() for _ in range(3)]
    decodes = [decode_worker(registry, seal_kv=seal_kv, **WAYS[way]) for registry in registries[:2]]
    prefill = prefill_worker(registries[2], seal_kv=seal_kv, **WAYS[way])
    async with gateway([prefill], decodes) as relay:
        await generate(relay, "a", prompt, 12)
    assert liar.has_lied
    assert sent_over(registries[2]) == {way.partition(" ")[0]}
    labels = {"cause": "bad_seal" if seal_kv else "bad_checksum"}
    refused = [registry.get_sample_value("kvrelay_refused_kv_blocks_total", labels) for registry in registries[:2]]
    assert sorted(count or 0 for count in refused) == [0, 1]


async def test_a_worker_with_the_other_seal_is_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    """Requests finish on the decode worker with the same setting, and the log names the setting that differs."""
    prompts = four_prompts(5)
    registries = [CollectorRegistry() for _ in range(3)]
    decodes = [
        decode_worker(registries[0]),
        decode_worker(registries[1], seal_kv=True),
    ]
    async with gateway([prefill_worker(registries[2], seal_kv=True)], decodes) as relay:
        for name, prompt in prompts.items():
            await generate(relay, name, prompt, 6)
    assert "--seal-kv differs (decode / prefill): false / true" in caplog.text
    assert (registries[0].get_sample_value("kvrelay_refused_hellos_total", {"code": "layout_mismatch"}) or 0) > 0
    assert registries[0].get_sample_value("kvrelay_sampled_tokens_total") == 0
