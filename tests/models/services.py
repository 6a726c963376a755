"""Real engines behind real services in one process: a prefill worker hands prompts over the wire to decode workers. One decode
worker is lost in the middle of a sequence, and the other one has too few blocks for all."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from kvrelay.common.kv_geometry import GroupKind
from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.decode_worker.worker import DecodeWorker
from kvrelay.engine.step.interface import LaunchedStep
from kvrelay.engine.step.plan import StepPlan
from kvrelay.engine.torch_engine import TorchEngine
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.relay.relay import Relay
from kvrelay.gateway.relay.request import GenerationRequest, RequestTimings
from kvrelay.gateway.settings import RelaySettings
from kvrelay.gateway.workers.pool import WorkerPool, static_workers
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings
from kvrelay.prefill_worker.worker import PrefillWorker
from kvrelay.wire.messages import TokenDelta
from kvrelay.wire.network import Network
from tests.relay.workers import ADDRESS, LINKS, assert_nothing_held, worker_setup

CHUNK = 6  # tokens of a prefill step
MAX_NUM_SEQS, MAX_BATCHED_TOKENS = 8, 64  # of the engines
NUM_TOKENS_OF_THE_LOST = 3  # the tokens that the client has when its decode worker ends


class Held:
    """A real engine whose steps block, from step ``num_steps`` on, until ``let_go``."""

    def __init__(self, engine: TorchEngine, num_steps: int) -> None:
        self._engine = engine
        self._num_left = num_steps
        self._is_free = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Wait on the model thread until steps may run, then launch."""
        if self._num_left == 0:
            assert self._is_free.wait(timeout=60), "nobody let the engine go"
        self._num_left = max(0, self._num_left - 1)
        return self._engine.launch(plan)

    def let_go(self) -> None:
        """Let steps run from now on."""
        self._is_free.set()


@dataclass
class Stream:
    """The tokens that a client has so far."""

    tokens: list[SampledToken] = field(default_factory=list)
    has_some: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, delta: TokenDelta) -> bool:
        """See Relay.run."""
        self.tokens += delta.tokens
        if len(self.tokens) >= NUM_TOKENS_OF_THE_LOST:
            self.has_some.set()
        return True


@dataclass(frozen=True)
class Engines:
    """Three engines with the same weights. ``scarce`` has fewer blocks than all prompts need together."""

    prefill: TorchEngine
    doomed: TorchEngine
    scarce: TorchEngine


async def served(
    engines: Engines, prompts: Sequence[Sequence[int]], num_tokens: int, num_logprobs: int
) -> list[list[SampledToken]]:
    """Return ``num_tokens`` greedy tokens of each prompt. The first prompt's decode worker is lost, and one sequence is
    preempted."""
    # An engine that runs ahead gives a step's tokens after the next launch.
    num_steps = NUM_TOKENS_OF_THE_LOST - 1 + engines.doomed.runs_ahead
    doomed, scarce = Held(engines.doomed, num_steps), Held(engines.scarce, 0)
    registry = CollectorRegistry()
    prefill = PrefillWorker(
        engines.prefill,
        PrefillSchedulerSettings(max_batched_tokens=CHUNK, max_num_seqs=MAX_NUM_SEQS),
        worker_setup("prefill"),
    )
    settings = DecodeSchedulerSettings(max_num_seqs=MAX_NUM_SEQS, max_batched_tokens=MAX_BATCHED_TOKENS)
    lost = DecodeWorker(doomed, settings, ADDRESS, worker_setup("doomed"))  # type: ignore[arg-type]
    kept = DecodeWorker(scarce, settings, ADDRESS, worker_setup("scarce", registry))  # type: ignore[arg-type]
    metrics = GatewayMetrics(CollectorRegistry()).of_model("tiny")
    network = Network.open()
    pool = WorkerPool("gateway", metrics, LINKS, network, needs_prefill_workers=False)
    relay = Relay(pool, RelaySettings(local_prefill="fallback"), metrics, network.clock)
    for worker in (lost, kept, prefill):
        await worker.start()

    async def know(*decodes: DecodeWorker) -> None:
        pool.update(static_workers([prefill.address], [worker.address for worker in decodes]))
        while not all(worker.is_usable for worker in pool.workers):
            pool.changed.clear()
            await pool.changed.wait()

    def start(index: int) -> asyncio.Task[None]:
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, num_logprobs=num_logprobs)
        request = GenerationRequest(str(index), list(prompts[index]), sampling, RequestTimings(0.0))
        return asyncio.create_task(relay.run(request, streams[index].take))

    streams = [Stream() for _ in prompts]
    try:
        async with asyncio.timeout(60):
            await know(lost)
            running = [start(0)]
            await streams[0].has_some.wait()
            # Stop without a message and close the sockets, as a killed process does.
            await lost._server.stop()
            doomed.let_go()
            await lost.stop()
            await know(kept)
            running += [start(index) for index in range(1, len(prompts))]
            while len(kept.service.entries) < len(prompts) or prefill.service.entries:
                await asyncio.sleep(0.002)  # polls until all prompts are handed over
            scarce.let_go()
            await asyncio.gather(*running)
    finally:
        doomed.let_go()
        scarce.let_go()
        await pool.stop()
        for survivor in (prefill, kept):
            await survivor.drain()
            await survivor.stop()
        await asyncio.to_thread(network.close)
    for survivor in (prefill, kept):
        assert_nothing_held(survivor)
    kinds = {group.kind for group in engines.scarce.card.layout.geometry.groups}
    # Sequences that end in an engine that runs ahead may make room in time.
    if kinds <= {GroupKind.FULL, GroupKind.LATENT} and not engines.scarce.runs_ahead:
        assert registry.get_sample_value("kvrelay_preemptions_total"), "nobody was preempted"
    assert registry.get_sample_value("kvrelay_handoffs_total", {"outcome": "verified"}), "nothing was handed over"
    return [stream.tokens for stream in streams]
