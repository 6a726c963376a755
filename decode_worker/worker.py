"""The decode worker, assembled: beside what every worker has, leases and the sockets that blocks come through."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

from kvrelay.common.errors import SettingsError
from kvrelay.decode_worker.drafts import Drafter, Drafts, drafters_of
from kvrelay.decode_worker.metrics import DraftMetrics
from kvrelay.decode_worker.scheduler import DecodeScheduler
from kvrelay.decode_worker.service import DataPorts, DecodeService
from kvrelay.decode_worker.settings import DecodeSchedulerSettings, DecodeSettings
from kvrelay.engine.kv.leased_blocks import LeasedBlocks
from kvrelay.engine.settings import prompt_step_tokens
from kvrelay.engine.step.interface import Engine
from kvrelay.wire.blocks.pieces import pieces_of
from kvrelay.wire.control.ticker import every
from kvrelay.wire.leases.lease import LeaseSettings
from kvrelay.wire.leases.table import LeaseTable
from kvrelay.wire.lines.data_plane import BlockReceiver
from kvrelay.wire.lines.shared.receiver import SharedReceiver
from kvrelay.wire.messages import Role
from kvrelay.worker.main import serve_worker
from kvrelay.worker.setup import Setup
from kvrelay.worker.worker import Worker

_TICK_S = 0.2  # how late an expired lease may be reaped, or a request whose time is up


class DecodeWorker(Worker[DecodeService]):
    """Implements :class:`kvrelay.worker.process.run.Component`."""

    def __init__(
        self,
        engine: Engine,
        settings: DecodeSchedulerSettings,
        data_address: str,
        setup: Setup,
        drafters: Seq[Drafter] = (),
    ) -> None:
        """``drafters``: empty: those that the settings ask for, if they do."""
        card, network = engine.card, setup.network
        max_batched_tokens = prompt_step_tokens(settings.max_batched_tokens, card.device_type)
        if max_batched_tokens < settings.max_num_seqs:
            raise SettingsError(
                f"--max-batched-tokens is {max_batched_tokens}; it must be at least --max-num-seqs "
                f"({settings.max_num_seqs}), so that every running sequence gets its token in every step"
            )
        drafts, drafters = None, drafters or drafters_of(settings)
        if drafters:
            drafts = Drafts(drafters, settings.speculation_tokens, DraftMetrics(setup.registry))
        super().__init__(engine, settings, setup, partial(DecodeScheduler, drafts=drafts), DecodeService)
        self.leases = LeaseTable(
            LeaseSettings(
                setup.epoch,
                card.layout.fingerprint(),
                card.layout.block_size,
                pieces_of(card.layout.geometry),
                settings.lease_ttl_s,
                setup.seal_kv,
            ),
            LeasedBlocks(self.blocks),
            engine.store,
            self.service,
            self._wire_metrics,
            network.clock,
        )
        receiver = network.block_receiver(
            data_address,
            self.leases,
            card.layout.geometry.physical_nbytes,
            context=network.context,
            gate=self._gate,
        )
        token = None if self._gate is None else self._gate.data_token
        self._receivers: dict[str, BlockReceiver | SharedReceiver] = {"the KV port": receiver}
        shared_name = None
        if setup.shared_memory is not None:
            place, metrics = setup.shared_memory, self._wire_metrics
            shared = SharedReceiver(place, self.leases, card.layout.geometry.physical_nbytes, metrics, token=token)
            self._receivers["the shared memory's socket"] = shared
            shared_name = shared.name
        self.data_address = receiver.address
        data = DataPorts(self.data_address, token, shared_name)
        self.service.attach(self.leases, data)

    async def start(self) -> None:
        """See Worker."""
        for receiver in self._receivers.values():
            receiver.start()
        await super().start()

    def tickers(self) -> list[asyncio.Task[None]]:
        """See Worker."""
        return [asyncio.create_task(every(_TICK_S, call)) for call in (self.leases.reap, self.service.tick)]

    def dead_sockets(self) -> list[str]:
        """See Worker."""
        dead = [f"{name} is dead" for name, receiver in self._receivers.items() if not receiver.is_alive]
        return super().dead_sockets() + dead

    def debug_kv(self) -> dict[str, Any]:
        """See Component."""
        return {**super().debug_kv(), "leases": self.leases.snapshot()}

    async def stop_hand_off(self) -> None:
        """See Worker."""
        for receiver in self._receivers.values():
            await asyncio.to_thread(receiver.stop)


def serve(settings: DecodeSettings) -> int:
    """Run a decode worker until SIGTERM or SIGINT; returns the exit code. Raises KvrelayError if it cannot start."""

    def make(engine: Engine, setup: Setup) -> DecodeWorker:
        return DecodeWorker(engine, settings.scheduler, settings.data_address, setup)

    return serve_worker(Role.DECODE, settings, (settings.address, settings.data_address), make)
