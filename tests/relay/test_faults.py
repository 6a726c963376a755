"""Lies on the data socket: each is refused before a token is sampled, counted, and the request still ends well.

Real workers on fake engines (which check every byte of K/V before they sample), real sockets, and the gateway's own relay on top.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvrelay.common.sampling import SamplingParams
from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.decode_worker.worker import DecodeWorker
from kvrelay.engine.fake import FakeEngine, expected_output, fake_card
from kvrelay.engine.loop import ModelLoop
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.progress import GenerationRequest, OutputDelta
from kvrelay.gateway.relay import Relay
from kvrelay.gateway.settings import RelaySettings
from kvrelay.gateway.timings import RequestTimings
from kvrelay.gateway.workers import WorkerPool, static_workers
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings
from kvrelay.prefill_worker.worker import PrefillWorker
from kvrelay.wire.block_frames import BlockHeader
from kvrelay.wire.block_sender import BlockSender
from kvrelay.wire.network import Network
from kvrelay.wire.send_job import SendTicket
from kvrelay.wire.settings import LinkSettings
from kvrelay.wire.shared_place import SharedPlace
from kvrelay.wire.transfers import TransferSettings

from .gate import Gate
from .lies import LIES, SEALED_LIES, Liar, Sealer

VOCAB = 1000
EPOCHS = itertools.count(1)
LINKS = LinkSettings(ping_interval_s=0.1, peer_timeout_s=5.0)


def prefill_worker(
    registry: CollectorRegistry, *, seal_kv: bool = False, place: SharedPlace | None = None, data_sockets: int = 1
) -> PrefillWorker:
    return PrefillWorker(
        FakeEngine(fake_card()),
        PrefillSchedulerSettings(),
        "tcp://127.0.0.1:*",
        "prefill",
        registry,
        network=Network.open(data_sockets),
        model_loop=ModelLoop,
        epoch=next(EPOCHS),
        link_settings=LINKS,
        transfer_settings=TransferSettings(verify_timeout_s=0.5),
        seal_kv=seal_kv,
        shared_memory=place,
        data_sockets=data_sockets,
    )


def decode_worker(
    registry: CollectorRegistry,
    model_id: str = "fake",
    gate: Gate | None = None,
    *,
    seal_kv: bool = False,
    place: SharedPlace | None = None,
    data_sockets: int = 1,
) -> DecodeWorker:
    return DecodeWorker(
        FakeEngine(fake_card(model_id=model_id), gate or (lambda rows: None)),
        DecodeSchedulerSettings(),
        "tcp://127.0.0.1:*",
        "tcp://127.0.0.1:*",
        "decode",
        registry,
        network=Network.open(data_sockets),
        model_loop=ModelLoop,
        epoch=next(EPOCHS),
        link_settings=LINKS,
        seal_kv=seal_kv,
        shared_memory=place,
        data_sockets=data_sockets,
    )


@asynccontextmanager
async def gateway(
    prefills: list[PrefillWorker], decodes: list[DecodeWorker], dead: Collection[DecodeWorker] = ()
) -> AsyncIterator[Relay]:
    """Everything started, the gateway connected to all; stopped afterwards, every block of who is not ``dead`` checked."""
    workers = [*decodes, *prefills]
    for worker in workers:
        await worker.start()
    network = Network.open()
    pool = WorkerPool("gateway", GatewayMetrics(CollectorRegistry()), LINKS, network, needs_prefill_workers=False)
    pool.update(static_workers([worker.address for worker in prefills], [worker.address for worker in decodes]))
    try:
        while not all(worker.is_usable or worker.misfit for worker in pool.workers):
            pool.changed.clear()
            await pool.changed.wait()
        yield Relay(pool, RelaySettings(local_prefill_max_tokens=0), GatewayMetrics(CollectorRegistry()), network.clock)
    finally:
        await pool.stop()
        for worker in [worker for worker in reversed(workers) if worker not in dead]:
            await worker.drain()
            worker.blocks.check_integrity()
            ledger = worker.blocks.ledger()
            await worker.stop()
            assert ledger.num_free + ledger.num_cached == ledger.num_blocks, ledger


def four_prompts(seed: int) -> dict[str, list[int]]:
    """Prompts by name that have nothing in common: no worker is preferred for what it has cached."""
    source = random.Random(seed)
    return {name: source.choices(range(VOCAB), k=30) for name in "abcd"}


async def generate(relay: Relay, name: str, tokens: list[int], max_tokens: int) -> list[int]:
    request = GenerationRequest(
        name, tokens, SamplingParams(max_tokens=max_tokens, temperature=0.0), RequestTimings(0.0)
    )
    output: list[int] = []

    def take(delta: OutputDelta) -> bool:
        output.extend(token.token_id for token in delta.tokens)
        return True

    await relay.run(request, take)
    return output


WAYS: dict[str, dict[str, Any]] = {  # of blocks, as workers' arguments
    "tcp": {},
    "tcp over 3 sockets": {"data_sockets": 3},
    "shared_memory": {"place": SharedPlace()},
    "shared_memory in 3 rings": {"place": SharedPlace(), "data_sockets": 3},
}


def sent_over(registry: CollectorRegistry) -> set[str]:
    """The paths that a prefill worker sent blocks over."""
    samples = next(one for one in registry.collect() if one.name == "kvrelay_kv_blocks_sent").samples
    return {one.labels["path"] for one in samples if one.name.endswith("_total") and one.value}


# Of a lie that says nothing about its way, one way is enough; and of each way one lie.
_TOLD = [
    *(pytest.param(False, cause, "tcp", marks=pytest.mark.full) for cause in LIES if cause != "bad_checksum"),
    *(pytest.param(True, cause, "tcp", marks=pytest.mark.full) for cause in SEALED_LIES if cause != "bad_seal"),
    (False, "bad_checksum", "tcp"),
    (True, "bad_seal", "tcp"),
    *(pytest.param(False, "bad_checksum", way, marks=pytest.mark.full) for way in WAYS if way != "tcp"),
    *(pytest.param(True, "bad_seal", way, marks=pytest.mark.full) for way in WAYS if way != "tcp"),
]


@pytest.mark.parametrize(("seal_kv", "cause", "way"), _TOLD)
async def test_a_lie_is_refused_counted_and_survived(
    seal_kv: bool, cause: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    liar = Liar((SEALED_LIES if seal_kv else LIES)[cause])

    def send(sender: BlockSender, header: BlockHeader, payload: memoryview, sealer: Sealer) -> SendTicket:
        return liar.send(sender, header, payload, sealer)

    monkeypatch.setattr(BlockSender, "send", send)
    prompt = random.Random(1).choices(range(VOCAB), k=30)
    registries = [CollectorRegistry() for _ in range(3)]
    decodes = [decode_worker(registry, seal_kv=seal_kv, **WAYS[way]) for registry in registries[:2]]
    prefill = prefill_worker(registries[2], seal_kv=seal_kv, **WAYS[way])
    async with gateway([prefill], decodes) as relay:
        assert await generate(relay, "a", prompt, 12) == expected_output(prompt, 12, VOCAB)
    assert liar.lie is None, "the lie was never told"
    assert sent_over(registries[2]) == {way.partition(" ")[0]}
    labels = {"cause": cause.strip()}
    refused = [registry.get_sample_value("kvrelay_refused_kv_blocks_total", labels) for registry in registries[:2]]
    assert sorted(count or 0 for count in refused) == [0, 1]


async def test_a_worker_with_the_other_seal_is_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    """The request ends well on the decode worker that agrees, and the log says what differs."""
    prompts = four_prompts(5)
    registries = [CollectorRegistry() for _ in range(3)]
    decodes = [
        decode_worker(registries[0]),
        decode_worker(registries[1], seal_kv=True),
    ]
    async with gateway([prefill_worker(registries[2], seal_kv=True)], decodes) as relay:
        for name, prompt in prompts.items():
            assert await generate(relay, name, prompt, 6) == expected_output(prompt, 6, VOCAB)
    assert "--seal-kv differs (decode / prefill): false / true" in caplog.text
    assert (registries[0].get_sample_value("kvrelay_refused_hellos_total", {"code": "layout_mismatch"}) or 0) > 0
    assert registries[0].get_sample_value("kvrelay_sampled_tokens_total") == 0


async def test_a_worker_of_another_layout_is_not_used() -> None:
    prompt = random.Random(2).choices(range(VOCAB), k=30)
    registries = [CollectorRegistry() for _ in range(3)]
    decodes = [decode_worker(registries[0], model_id="other"), decode_worker(registries[1])]
    async with gateway([prefill_worker(registries[2])], decodes) as relay:
        for name in "abcd":
            assert await generate(relay, name, prompt, 6) == expected_output(prompt, 6, VOCAB)
    assert registries[0].get_sample_value("kvrelay_sampled_tokens_total") == 0


async def test_a_decode_worker_that_dies_is_replaced_without_a_seam() -> None:
    prompt = random.Random(4).choices(range(VOCAB), k=20)
    registries = [CollectorRegistry() for _ in range(3)]
    gate = Gate(num_tokens=10)
    decodes = [decode_worker(registry, gate=gate) for registry in registries[:2]]
    dead: list[DecodeWorker] = []
    async with gateway([prefill_worker(registries[2])], decodes, dead) as relay:
        request = GenerationRequest("a", prompt, SamplingParams(max_tokens=100, temperature=0.0), RequestTimings(0.0))
        output: list[int] = []
        is_under_way = asyncio.Event()

        def take(delta: OutputDelta) -> bool:
            output.extend(token.token_id for token in delta.tokens)
            if len(output) >= 5:
                is_under_way.set()
            return True

        running = asyncio.create_task(relay.run(request, take))
        await is_under_way.wait()
        dead += [worker for worker in decodes if worker.service.num_entries]
        # Nothing is said any more, and the sockets are gone: as a killed process looks from outside.
        await dead[0]._server.stop()
        gate.open()
        await dead[0].stop()
        await running
        assert output == expected_output(prompt, 100, VOCAB)
    assert len(dead) == 1
