"""An EAGLE-3 head behind the whole relay, on real engines: no hand-off, no preemption and no failover changes a token."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.decode_worker.worker import DecodeWorker
from kvrelay.gateway.metrics import GatewayMetrics
from tests.engine.conftest import load
from tests.heads import save_known_pair
from tests.relay.test_draft_model import OPTIONS, WISHES, Told, ask, prefill_worker
from tests.relay.workers import ADDRESS, gateway, worker_setup

Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A model, and a head that knows it but for a mistake now and then."""
    model, head = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("head")
    save_known_pair(model, head, mistakes=0.03)
    return model, head


def decode_worker(
    pair: Pair, registry: CollectorRegistry, name: str, *, drafts: bool, num_blocks: int = 60
) -> DecodeWorker:
    engine = load(pair[0], **{**OPTIONS, "num_blocks": num_blocks})
    chosen = {"speculation": "head", "draft_model": str(pair[1])} if drafts else {}
    settings = DecodeSchedulerSettings(max_num_seqs=32, **chosen)  # type: ignore[arg-type]
    return DecodeWorker(engine, settings, ADDRESS, worker_setup(name, registry))


@pytest.fixture(scope="module")
def expected(pair: Pair) -> Told:
    """Each alone, without drafts."""

    async def told() -> Told:
        told: Told = {}
        worker = decode_worker(pair, CollectorRegistry(), "d", drafts=False)
        async with gateway([prefill_worker(pair)], [worker]) as relay:
            for name in WISHES:
                await ask(relay, name, told)
        return told

    return asyncio.run(told())


@pytest.mark.parametrize("num_blocks", [60, 20], ids=["room for all", "preemption"])
async def test_the_tokens_are_those_of_a_worker_without(pair: Pair, expected: Told, num_blocks: int) -> None:
    told: Told = {}
    registry = CollectorRegistry()
    worker = decode_worker(pair, registry, "d", drafts=True, num_blocks=num_blocks)
    async with gateway([prefill_worker(pair)], [worker]) as relay:
        await asyncio.gather(*(ask(relay, name, told) for name in WISHES))
    assert told == expected
    drafted = registry.get_sample_value("kvrelay_draft_tokens_total", {"drafter": "head"})
    assert drafted is not None
    assert drafted > 0
    assert bool(registry.get_sample_value("kvrelay_preemptions_total")) == (num_blocks == 20)


@pytest.mark.parametrize("dies", [0, 1], ids=["the one that drafts dies", "the other one dies"])
async def test_failover_goes_on_with_the_same_tokens(pair: Pair, expected: Told, dies: int) -> None:
    told: Told = {}
    decodes = [decode_worker(pair, CollectorRegistry(), f"d{place}", drafts=place == 0) for place in range(2)]
    dead: list[DecodeWorker] = []
    metrics = GatewayMetrics(CollectorRegistry())
    async with gateway([prefill_worker(pair)], decodes, metrics=metrics, dead=dead) as relay:
        under_way = asyncio.Event()
        running = asyncio.gather(*(ask(relay, name, told, under_way) for name in WISHES))
        await under_way.wait()
        dead.append(decodes[dies])
        await dead[0]._server.stop()
        await dead[0].stop()
        await running
    assert told == expected
    assert metrics.registry.get_sample_value("kvrelay_attempts_total", {"model": "tiny", "outcome": "peer_lost"})
