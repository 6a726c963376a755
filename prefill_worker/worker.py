"""The prefill worker, assembled: engine, scheduler, model loop, control socket, links to decode workers."""

from __future__ import annotations

import asyncio
from typing import Any

from prometheus_client import CollectorRegistry, Gauge

from kvrelay.engine.guides.guidance import GuideCompiler, GuidesOnLoop, NoGuides
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.step.interface import Engine
from kvrelay.prefill_worker.links import DecodeLinks, LinkIdentity
from kvrelay.prefill_worker.model_worker import Command, PrefillModelWorker, Report
from kvrelay.prefill_worker.ports import Ports
from kvrelay.prefill_worker.scheduler import PrefillScheduler
from kvrelay.prefill_worker.service import PrefillService
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings
from kvrelay.wire.control.server import ControlServer
from kvrelay.wire.control.ticker import every
from kvrelay.wire.lines.shared.place import SharedPlace
from kvrelay.wire.messages import Role
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.network import Network
from kvrelay.wire.security.authentication import PeerGate
from kvrelay.wire.security.keys import WireKeys
from kvrelay.wire.settings import LinkSettings
from kvrelay.wire.transfers import TransferSettings, TransferTable
from kvrelay.worker.health import ledger_json, not_live, not_ready
from kvrelay.worker.loop import ModelLoop
from kvrelay.worker.metrics import EngineMetrics
from kvrelay.worker.submit import WorkerIdentity

_SWEEP_S = 5.0  # how often links are looked through for those that nobody needs
_TICK_S = 0.05  # how long blocks may stay held after the last send that reads them


class PrefillWorker:
    """Implements :class:`kvrelay.common.process.Component`."""

    def __init__(
        self,
        engine: Engine,
        settings: PrefillSchedulerSettings,
        address: str,
        worker_id: str,
        registry: CollectorRegistry,
        *,
        network: Network,
        model_loop: type[ModelLoop[Command]],
        epoch: int,
        link_settings: LinkSettings | None = None,
        transfer_settings: TransferSettings | None = None,
        seal_kv: bool = False,
        keys: WireKeys | None = None,
        shared_memory: SharedPlace | None = None,
        data_sockets: int = 1,
        max_retained_share: float = 0.5,
        guides: GuideCompiler | None = None,
    ) -> None:
        card = engine.card
        clock = network.clock
        link_settings = link_settings or LinkSettings()
        self.blocks = BlockManager(
            card.num_blocks, card.layout.block_size, clock, max_retained_share=max_retained_share
        )
        scheduler = PrefillScheduler(settings, self.blocks, card.max_model_len, card.device_type)
        engine_metrics = EngineMetrics(
            registry,
            self.blocks,
            num_running=lambda: len(scheduler.running),
            num_waiting=lambda: len(scheduler.waiting),
        )
        wire_metrics = WireMetrics(registry)
        self._model_worker = PrefillModelWorker(engine, scheduler, engine_metrics, self._emit, clock)
        self._loop = model_loop(self._model_worker, "prefill-model", clock)
        identity = WorkerIdentity(worker_id, epoch, card, settings.max_waiting, settings.max_num_seqs)
        self.service = PrefillService(identity, self.blocks, clock)
        self._add_load_gauges(registry)
        self._network = network
        gate = None if keys is None else PeerGate(keys, frozenset({Role.GATEWAY}), wire_metrics, network.context)
        self._server = ControlServer(
            address, self.service, link_settings, metrics=wire_metrics, network=network, gate=gate
        )
        self._links = DecodeLinks(
            LinkIdentity(
                f"{worker_id}-{identity.epoch}",
                card,
                link_settings.between_workers(),
                seals_kv=seal_kv,
                keys=keys,
                shared_memory=shared_memory,
                data_sockets=data_sockets,
            ),
            self.service,
            wire_metrics,
            network,
        )
        transfers = TransferTable(
            engine.store, self.service, transfer_settings or TransferSettings(), wire_metrics, clock
        )
        self._guides = GuidesOnLoop(guides or NoGuides())
        self.service.attach(Ports(self._server.send, self._loop, self._links, transfers, guides=self._guides))
        self._asyncio_loop: asyncio.AbstractEventLoop | None = None
        self._tickers: list[asyncio.Task[None]] = []
        self.address = address

    def _add_load_gauges(self, registry: CollectorRegistry) -> None:
        """What the pool of prefill workers is scaled by."""
        tokens = Gauge(
            "kvrelay_waiting_prompt_tokens", "Prompt tokens taken in and not computed yet", registry=registry
        )
        tokens.set_function(lambda: self.service.status().num_waiting_tokens)
        waited = Gauge(
            "kvrelay_longest_wait_seconds",
            "How long the prompt has waited that waits longest to begin",
            registry=registry,
        )
        waited.set_function(self.service.longest_wait_s)

    async def start(self) -> None:
        """Open the control socket and start the model loop. Raises WireError if the address is taken."""
        self._asyncio_loop = self._guides.asyncio_loop = asyncio.get_running_loop()
        self.address = await self._server.start()
        self._loop.start()
        self._tickers = [
            asyncio.create_task(every(_TICK_S, self.service.tick, while_set=self.service.has_work)),
            asyncio.create_task(every(_SWEEP_S, self._links.sweep)),
        ]

    def not_live(self) -> list[str]:
        """See Component."""
        return self._dead_sockets() + not_live(self._loop)

    def not_ready(self) -> list[str]:
        """See Component."""
        return self._dead_sockets() + not_ready(self._loop, self.blocks)

    def debug_kv(self) -> dict[str, Any]:
        """See Component."""
        return {"ledger": ledger_json(self.blocks), "requests": self.service.debug()}

    async def drain(self) -> None:
        """Refuse new requests; return when every request is computed and handed over."""
        await self.service.drain()

    async def stop(self) -> None:
        """Close everything, whatever is still running."""
        for ticker in self._tickers:
            ticker.cancel()
        await asyncio.gather(*self._tickers, return_exceptions=True)
        await self._server.stop()
        await asyncio.to_thread(self._loop.stop)
        await asyncio.to_thread(self._guides.close)
        await self._links.stop()
        await asyncio.to_thread(self._network.close)

    def _dead_sockets(self) -> list[str]:
        """Nothing in this process would open it again."""
        return [] if self._server.is_alive else ["the control socket is dead"]

    def _emit(self, report: Report) -> None:
        assert self._asyncio_loop is not None
        if not self._asyncio_loop.is_closed():
            self._asyncio_loop.call_soon_threadsafe(self.service.on_report, report)
