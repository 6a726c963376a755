"""The prefill worker, assembled: the common worker with links to decode workers and transfers over them."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from prometheus_client import CollectorRegistry, Gauge

from kvrelay.common.errors import SettingsError
from kvrelay.engine.factory import require_host_kv
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.host.tier import HostTier
from kvrelay.engine.kv.host_memory import allocated
from kvrelay.engine.settings import Guessing, prompt_step_tokens
from kvrelay.engine.step.interface import Engine
from kvrelay.engine.step.leader import Leader
from kvrelay.prefill_worker.links import DecodeLinks
from kvrelay.prefill_worker.metrics import HostKvMetrics
from kvrelay.prefill_worker.scheduler import PrefillScheduler
from kvrelay.prefill_worker.service import PrefillService
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings, PrefillSettings
from kvrelay.wire.control.ticker import every
from kvrelay.wire.messages import Role
from kvrelay.wire.transfers.table import TransferTable
from kvrelay.wire.transfers.transfer import TransferSettings
from kvrelay.worker.main import serve_worker
from kvrelay.worker.setup import Setup
from kvrelay.worker.worker import Worker

_SWEEP_S = 5.0  # period of ``DecodeLinks.sweep``
_TICK_S = 0.05  # most time that blocks stay held after the last send that reads them


class PrefillWorker(Worker[PrefillService]):
    """A prefill worker. Implements :class:`kvrelay.worker.process.run.Component`."""

    def __init__(self, engine: Engine, settings: PrefillSchedulerSettings, setup: Setup) -> None:
        card = engine.card
        block_size = card.layout.block_size
        step_tokens = prompt_step_tokens(settings.max_batched_tokens, card.device_type)
        if card.layout.geometry.has_states and step_tokens < block_size:
            raise SettingsError(
                f"--max-batched-tokens is {step_tokens}; this model has recurrent layers, and its steps compute whole blocks, of "
                f"{block_size} tokens: take at least that many, or a smaller --block-size on all workers"
            )
        self._tier: HostTier | None = None
        host_metrics = HostKvMetrics(setup.registry)

        def make_scheduler(
            of: PrefillSchedulerSettings, blocks: BlockManager, *rest: Any, **more: Any
        ) -> PrefillScheduler:
            if setup.host_kv_bytes:  # before the scheduler, which looks for it
                self._tier = host_metrics.tier = self._make_tier(engine, blocks, setup.host_kv_bytes, host_metrics)
            return PrefillScheduler(of, blocks, *rest, **more)

        super().__init__(Leader(engine), settings, setup, make_scheduler, PrefillService)
        service, clock = self.service, setup.network.clock
        self._links = DecodeLinks(card, setup, service, self._wire_metrics, engine.store.register)
        transfers = TransferTable(
            engine.store, card.layout.geometry, service, TransferSettings(), self._wire_metrics, clock
        )
        service.attach(self._links, transfers)
        _add_load_gauges(service, setup.registry)

    def _make_tier(self, engine: Engine, blocks: BlockManager, nbytes: int, metrics: HostKvMetrics) -> HostTier:
        geometry, store = engine.card.layout.geometry, engine.store
        if nbytes < store.block_nbytes:
            raise SettingsError(
                f"--host-kv-mb is {nbytes // 2**20}, less than a KV block of {store.block_nbytes / 2**20:.2f} MiB: raise it, or "
                "leave it out"
            )
        memory = memoryview(allocated(nbytes))
        tier = HostTier(store, blocks, geometry, memory, tell=metrics.count, on_returned=self._wake)
        blocks.attach(tier)
        return tier

    def _wake(self) -> None:
        self._loop.wake()  # made later than the tier

    async def start(self) -> None:
        """See Worker."""
        if self._tier is not None:
            self._tier.start()
        await super().start()

    def debug_kv(self) -> dict[str, Any]:
        """See Component."""
        found = super().debug_kv()
        if self._tier is not None:
            found["host_kv"] = {"num_blocks": self._tier.num_slots, "used": self._tier.num_kept}
        return found

    def tickers(self) -> list[asyncio.Task[None]]:
        """See Worker."""
        return [
            asyncio.create_task(every(_TICK_S, self.service.tick, while_set=self.service.has_work)),
            asyncio.create_task(every(_SWEEP_S, self._links.sweep)),
        ]

    async def stop_hand_off(self) -> None:
        """See Worker."""
        if self._tier is not None:
            await asyncio.to_thread(self._tier.close)
        await self._links.stop()


def _add_load_gauges(service: PrefillService, registry: CollectorRegistry) -> None:
    """Metrics that the pool of prefill workers is scaled by."""
    tokens = Gauge("kvrelay_waiting_prompt_tokens", "Prompt tokens accepted and not computed yet", registry=registry)
    tokens.set_function(lambda: service.status().num_waiting_tokens)
    waited = Gauge("kvrelay_longest_wait_seconds", "Longest wait of a prompt that has not begun", registry=registry)
    waited.set_function(service.longest_wait_s)


def serve(settings: PrefillSettings) -> int:
    """Run a prefill worker until SIGTERM or SIGINT; returns the exit code. Raises KvrelayError if it cannot start."""

    def load_before() -> Guessing:
        require_host_kv(settings.host_kv_mb, settings.model, settings.fake)
        return Guessing()  # nobody guesses here

    def make(engine: Engine, setup: Setup) -> PrefillWorker:
        setup = dataclasses.replace(setup, host_kv_bytes=settings.host_kv_mb * 2**20)
        return PrefillWorker(engine, settings.scheduler, setup)

    return serve_worker(Role.PREFILL, settings, {"--address": settings.address}, make, load_before)
