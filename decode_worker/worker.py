"""The decode worker, assembled: engine, scheduler, model loop, leases, block receivers, control socket."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry

from kvrelay.common.errors import SettingsError
from kvrelay.decode_worker.model_worker import Command, DecodeModelWorker, Report
from kvrelay.decode_worker.ports import Ports
from kvrelay.decode_worker.scheduler import DecodeScheduler
from kvrelay.decode_worker.service import DecodeService, lease_owner
from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.decode_worker.welcome import DataPorts
from kvrelay.engine.guides.guidance import GuideCompiler, GuidesOnLoop, NoGuides
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.step.interface import Engine
from kvrelay.wire.control.server import ControlServer
from kvrelay.wire.control.ticker import every
from kvrelay.wire.leases.lease import LeaseSettings, VerifiedLease, whole_block
from kvrelay.wire.leases.table import LeaseTable
from kvrelay.wire.lines.shared.place import SharedPlace
from kvrelay.wire.lines.shared.receiver import SharedReceiver
from kvrelay.wire.messages import FailureCode, Role
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.network import Network
from kvrelay.wire.security.authentication import PeerGate
from kvrelay.wire.security.keys import WireKeys
from kvrelay.wire.settings import LinkSettings
from kvrelay.worker.health import ledger_json, not_live, not_ready
from kvrelay.worker.loop import ModelLoop
from kvrelay.worker.metrics import EngineMetrics
from kvrelay.worker.submit import WorkerIdentity

_TICK_S = 0.2  # how late an expired lease may be reaped, or a request whose time is up


class LeasedBlocks:
    """The block manager as the lease table sees it."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks

    def reserve(self, lease_key: str, num_blocks: int, hashes: Sequence[bytes]) -> tuple[list[int], int] | None:
        spare = self._blocks.num_promised
        allocation = self._blocks.allocate(lease_owner(lease_key), num_blocks, hashes, spare=spare)
        return None if allocation is None else (allocation.block_ids, allocation.num_cached)

    def release(self, lease_key: str) -> None:
        self._blocks.release(lease_owner(lease_key))

    def publish(self, lease_key: str, index: int, block_hash: bytes) -> None:
        self._blocks.publish(lease_owner(lease_key), index, block_hash)


class _LeaseEvents:
    """Brings what the lease table says from whichever thread to the asyncio loop."""

    def __init__(self, service: DecodeService) -> None:
        self._service = service
        self.asyncio_loop: asyncio.AbstractEventLoop | None = None

    def on_lease_verified(self, lease: VerifiedLease) -> None:
        assert self.asyncio_loop is not None
        self.asyncio_loop.call_soon_threadsafe(self._service.on_lease_verified, lease)

    def on_lease_rejected(
        self, lease_id: int, peer_id: str, key: tuple[str, int], code: FailureCode, detail: str
    ) -> None:
        assert self.asyncio_loop is not None
        self.asyncio_loop.call_soon_threadsafe(self._service.on_lease_rejected, lease_id, peer_id, key, code, detail)


class DecodeWorker:
    """Implements :class:`kvrelay.common.process.Component`."""

    def __init__(
        self,
        engine: Engine,
        settings: DecodeSchedulerSettings,
        address: str,
        data_address: str,
        worker_id: str,
        registry: CollectorRegistry,
        *,
        network: Network,
        model_loop: type[ModelLoop[Command]],
        epoch: int,
        link_settings: LinkSettings | None = None,
        seal_kv: bool = False,
        keys: WireKeys | None = None,
        shared_memory: SharedPlace | None = None,
        data_sockets: int = 1,
        max_retained_share: float = 0.5,
        guides: GuideCompiler | None = None,
    ) -> None:
        if settings.max_batched_tokens < settings.max_num_seqs:
            raise SettingsError(
                f"--max-batched-tokens is {settings.max_batched_tokens}; it must be at least --max-num-seqs "
                f"({settings.max_num_seqs}), so that every running sequence gets its token in every step"
            )
        card = engine.card
        clock = network.clock
        fingerprint = card.layout.fingerprint()
        self.blocks = BlockManager(
            card.num_blocks, card.layout.block_size, clock, max_retained_share=max_retained_share
        )
        scheduler = DecodeScheduler(settings, self.blocks, card.max_model_len)
        engine_metrics = EngineMetrics(
            registry,
            self.blocks,
            num_running=lambda: len(scheduler.running),
            num_waiting=lambda: len(scheduler.waiting),
        )
        wire_metrics = WireMetrics(registry)
        self._model_worker = DecodeModelWorker(engine, scheduler, engine_metrics, self._emit, clock)
        self._loop = model_loop(self._model_worker, "decode-model", clock)
        identity = WorkerIdentity(worker_id, epoch, card, settings.max_waiting, settings.max_num_seqs)
        self.service = DecodeService(identity, self.blocks, clock)
        self._events = _LeaseEvents(self.service)
        self.leases = LeaseTable(
            LeaseSettings(
                identity.epoch,
                fingerprint,
                card.layout.block_size,
                whole_block(card.block_nbytes),
                settings.lease_ttl_s,
                seal_kv,
                data_sockets,
            ),
            LeasedBlocks(self.blocks),
            engine.store,
            self._events,
            wire_metrics,
            clock,
        )
        self._network = network
        roles = frozenset({Role.GATEWAY, Role.PREFILL})
        gate = None if keys is None else PeerGate(keys, roles, wire_metrics, network.context)
        self._receiver = network.block_receiver(
            data_address,
            self.leases,
            card.block_nbytes,
            context=network.context,
            gate=gate,
            num_threads=data_sockets,
        )
        link_settings = link_settings or LinkSettings()
        self._server = ControlServer(
            address, self.service, link_settings, metrics=wire_metrics, network=network, gate=gate
        )
        token = None if gate is None else gate.data_token
        self._shared: SharedReceiver | None = None
        if shared_memory is not None:
            self._shared = SharedReceiver(
                shared_memory, self.leases, card.block_nbytes, wire_metrics, token=token, num_threads=data_sockets
            )
        data = DataPorts(self._receiver.address, token, None if self._shared is None else self._shared.name)
        self._guides = GuidesOnLoop(guides or NoGuides())
        self.service.attach(Ports(self._server.send, self._loop, self.leases, data, self._guides))
        self._tickers: list[asyncio.Task[None]] = []
        self.address = address
        self.data_address = self._receiver.address

    async def start(self) -> None:
        """Open the sockets and start the threads. Raises WireError if an address is taken."""
        self._events.asyncio_loop = self._guides.asyncio_loop = asyncio.get_running_loop()
        self._loop.start()
        self._receiver.start()
        if self._shared is not None:
            self._shared.start()
        self.address = await self._server.start()
        self._tickers = [asyncio.create_task(every(_TICK_S, call)) for call in (self.leases.reap, self.service.tick)]

    def not_live(self) -> list[str]:
        """See Component."""
        return self._dead_sockets() + not_live(self._loop)

    def not_ready(self) -> list[str]:
        """See Component."""
        return self._dead_sockets() + not_ready(self._loop, self.blocks)

    def debug_kv(self) -> dict[str, Any]:
        """See Component."""
        return {
            "ledger": ledger_json(self.blocks),
            "leases": self.leases.snapshot(),
            "requests": self.service.debug(),
        }

    async def drain(self) -> None:
        """Refuse new requests; return when every sequence has finished."""
        await self.service.drain()

    async def stop(self) -> None:
        """Close everything, whatever is still running."""
        for ticker in self._tickers:
            ticker.cancel()
        await asyncio.gather(*self._tickers, return_exceptions=True)
        await self._server.stop()
        await asyncio.to_thread(self._receiver.stop)
        if self._shared is not None:
            await asyncio.to_thread(self._shared.stop)
        await asyncio.to_thread(self._loop.stop)
        await asyncio.to_thread(self._guides.close)
        await asyncio.to_thread(self._network.close)

    def _dead_sockets(self) -> list[str]:
        """Nothing in this process would open them again."""
        dead = [] if self._server.is_alive else ["the control socket is dead"]
        dead += [] if self._receiver.is_alive else ["the KV port is dead"]
        return dead + (["the shared memory's socket is dead"] if self._shared and not self._shared.is_alive else [])

    def _emit(self, report: Report) -> None:
        loop = self._events.asyncio_loop
        assert loop is not None
        if not loop.is_closed():
            loop.call_soon_threadsafe(self.service.on_report, report)
