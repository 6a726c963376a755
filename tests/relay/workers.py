"""Workers on fake engines over real sockets, and a gateway's relay over them, all in one process."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry

from kvrelay.common.model_card import ModelCard
from kvrelay.common.sampling import SamplingParams
from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.decode_worker.worker import DecodeWorker
from kvrelay.engine.fake.engine import FakeEngine, fake_card
from kvrelay.engine.fake.language import expected_output
from kvrelay.engine.fake.step import Share
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.relay.relay import Relay
from kvrelay.gateway.relay.request import GenerationRequest, RequestTimings
from kvrelay.gateway.settings import RelaySettings
from kvrelay.gateway.workers.pool import WorkerPool, static_workers
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings
from kvrelay.prefill_worker.worker import PrefillWorker
from kvrelay.wire.messages import TokenDelta
from kvrelay.wire.network import Network
from kvrelay.wire.settings import LinkSettings
from kvrelay.worker.setup import Setup

OnStep = Callable[[Sequence[Share]], None]

ADDRESS = "tcp://127.0.0.1:*"
# Nobody here is lost by silence: a busy machine may let a test's process wait for many seconds.
LINKS = LinkSettings(ping_interval_s=0.1, peer_timeout_s=120.0)
EPOCHS = itertools.count(1)


def worker_setup(name: str, registry: CollectorRegistry | None = None, **options: Any) -> Setup:
    """A setup on loopback, with short ping intervals. ``options`` are further arguments of Setup."""
    network = Network.open()
    epoch = next(EPOCHS)
    return Setup(name, epoch, ADDRESS, registry or CollectorRegistry(), network, link_settings=LINKS, **options)


def prefill_worker(
    registry: CollectorRegistry | None = None,
    card: ModelCard | None = None,
    on_step: OnStep | None = None,
    *,
    name: str = "prefill",
    settings: PrefillSchedulerSettings | None = None,
    **options: Any,
) -> PrefillWorker:
    """A prefill worker on a fake engine. ``options`` are further arguments of Setup."""
    engine = FakeEngine(card or fake_card(), on_step or (lambda rows: None), has_adapters="adapters" in options)
    setup = worker_setup(name, registry, **options)
    return PrefillWorker(engine, settings or PrefillSchedulerSettings(), setup)


def decode_worker(
    registry: CollectorRegistry | None = None,
    card: ModelCard | None = None,
    on_step: OnStep | None = None,
    *,
    name: str = "decode",
    settings: DecodeSchedulerSettings | None = None,
    **options: Any,
) -> DecodeWorker:
    """A decode worker on a fake engine. ``options`` are further arguments of Setup."""
    engine = FakeEngine(card or fake_card(), on_step or (lambda rows: None), has_adapters="adapters" in options)
    return DecodeWorker(engine, settings or DecodeSchedulerSettings(), ADDRESS, worker_setup(name, registry, **options))


def assert_nothing_held(worker: PrefillWorker | DecodeWorker) -> None:
    """Every block is free or cached."""
    worker.blocks.check_integrity()
    ledger = worker.blocks.ledger()
    assert ledger.num_free + ledger.num_cached == ledger.num_blocks, ledger


@asynccontextmanager
async def gateway(
    prefills: Sequence[PrefillWorker],
    decodes: Sequence[DecodeWorker],
    settings: RelaySettings | None = None,
    *,
    metrics: GatewayMetrics | None = None,
    dead: Collection[DecodeWorker] = (),
) -> AsyncIterator[Relay]:
    """A relay connected to all workers. Afterwards all is stopped, and blocks of workers that are not ``dead`` are checked."""
    settings = settings or RelaySettings(local_prefill="fallback")
    metrics = metrics or GatewayMetrics(CollectorRegistry())
    workers = [*decodes, *prefills]
    for worker in workers:
        await worker.start()
    network = Network.open()
    of_model = metrics.of_model("tiny")
    pool = WorkerPool("gateway", of_model, LINKS, network, needs_prefill_workers=False)
    pool.update(static_workers([worker.address for worker in prefills], [worker.address for worker in decodes]))
    try:
        while not all(worker.is_usable or worker.misfit for worker in pool.workers):
            pool.changed.clear()
            await pool.changed.wait()
        yield Relay(pool, settings, of_model, network.clock)
    finally:
        await pool.stop()
        for worker in [worker for worker in reversed(workers) if worker not in dead]:
            await worker.drain()
            await worker.stop()
            assert_nothing_held(worker)


async def generate(
    relay: Relay, name: str, prompt: list[int], max_tokens: int, **request_fields: Any
) -> tuple[list[int], int]:
    """Run a greedy request and check its tokens. Returns them, and the number of cached prompt tokens that was reported."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    request = GenerationRequest(name, prompt, sampling, RequestTimings(0.0), **request_fields)
    output: list[int] = []
    num_cached: set[int] = set()

    def take(delta: TokenDelta) -> bool:
        output.extend(token.token_id for token in delta.tokens)
        num_cached.update(set() if delta.num_cached_tokens is None else {delta.num_cached_tokens})
        return True

    await relay.run(request, take)
    assert output == expected_output(prompt, max_tokens, fake_card().vocab_size, request.adapter)
    assert len(num_cached) == 1
    return output, num_cached.pop()
