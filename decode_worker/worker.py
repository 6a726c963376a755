"""The decode worker, assembled: the common worker with leases and the sockets that blocks come through."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvrelay.common.errors import SettingsError
from kvrelay.decode_worker.draft_model import DraftModel
from kvrelay.decode_worker.drafter import Drafter
from kvrelay.decode_worker.drafts import Drafts
from kvrelay.decode_worker.forced import GuideDrafter
from kvrelay.decode_worker.head import HeadDrafter
from kvrelay.decode_worker.metrics import DraftMetrics
from kvrelay.decode_worker.ngram import NgramDrafter
from kvrelay.decode_worker.scheduler import DecodeScheduler
from kvrelay.decode_worker.service import DataPorts, DecodeService
from kvrelay.decode_worker.settings import DecodeSchedulerSettings, DecodeSettings
from kvrelay.engine.drafting import load_draft_engine, load_head, own_layer, require_head, require_layer
from kvrelay.engine.kv.books import ledger_json, unbalanced
from kvrelay.engine.kv.leased_blocks import LeasedBlocks
from kvrelay.engine.load_progress import LoggedProgress
from kvrelay.engine.settings import (
    FakeSettings,
    Guessing,
    KvSettings,
    ModelSettings,
    prompt_step_tokens,
    sequences_at_a_time,
)
from kvrelay.engine.step.interface import Engine
from kvrelay.engine.step.leader import Leader
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

logger = logging.getLogger(__name__)

_TICK_S = 0.2  # period at which expired leases and requests are ended


class DecodeWorker(Worker[DecodeService]):
    """A decode worker. Implements :class:`kvrelay.worker.process.run.Component`."""

    def __init__(
        self,
        engine: Engine,
        settings: DecodeSchedulerSettings,
        data_address: str,
        setup: Setup,
        drafters: Seq[Drafter] = (),
        draft_engine: Engine | None = None,
    ) -> None:
        """``drafters``: empty: those of the settings. ``draft_engine``: see Drafting. Raises SettingsError, WireError."""
        card, network = engine.card, setup.network
        max_batched_tokens = prompt_step_tokens(settings.max_batched_tokens, card.device_type)
        max_num_seqs = sequences_at_a_time(settings.max_num_seqs, card.device_type)
        if max_batched_tokens < max_num_seqs:
            raise SettingsError(
                f"--max-batched-tokens is {max_batched_tokens}; it must be at least --max-num-seqs ({max_num_seqs}), so that every "
                "running sequence gets its token in every step"
            )
        leader = Leader(engine)
        drafts, self.draft_model = None, None
        if drafters or draft_engine is not None or settings.speculation != "off":
            if card.layout.geometry.has_states:
                raise SettingsError(
                    f"--speculation is {settings.speculation}, but the model has recurrent layers, which cannot take back a wrong "
                    "guess: leave it out"
                )
            draft_metrics = DraftMetrics(setup.registry)
            if draft_engine is not None:
                self.draft_model = DraftModel(
                    draft_engine, card.vocab_size, max_batched_tokens, network.clock, draft_metrics
                )
                self.draft_model.measure()
            head = None
            if settings.speculation == "head" and settings.draft_model is not None:
                found = load_head(settings.draft_model, engine, settings.draft_kv_memory_mb)
                head = HeadDrafter("head", found, leader.slot_of, network.clock, draft_metrics)
            elif settings.speculation == "mtp":
                head = HeadDrafter("mtp", own_layer(engine), leader.slot_of, network.clock, draft_metrics)
            drafters = drafters or drafters_of(settings.speculation, self.draft_model or head)
            drafts = Drafts(drafters, settings.speculation_tokens, draft_metrics)
        super().__init__(leader, settings, setup, partial(DecodeScheduler, drafts=drafts), DecodeService)
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
            nbytes = card.layout.geometry.physical_nbytes
            register = None if setup.seal_kv else engine.store.register  # a seal needs the host
            shared = SharedReceiver(place, self.leases, nbytes, metrics, token=token, register=register)
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
        found = {**super().debug_kv(), "leases": self.leases.snapshot()}
        return found if self.draft_model is None else {**found, "draft_model": ledger_json(self.draft_model.blocks)}

    def not_ready(self) -> list[str]:
        """See Component."""
        return super().not_ready() + ([] if self.draft_model is None else unbalanced(self.draft_model.blocks))

    async def stop_hand_off(self) -> None:
        """See Worker."""
        for receiver in self._receivers.values():
            await asyncio.to_thread(receiver.stop)


def drafters_of(speculation: str, model: DraftModel | HeadDrafter | None) -> list[Drafter]:
    """The drafters of the ``speculation`` setting, in the order of their use. ``model``: the one that computes, if any."""
    drafters: list[Drafter] = [GuideDrafter()]
    if speculation == "ngram":
        drafters.append(NgramDrafter())
    if model is not None:
        drafters.append(model)
    return drafters


@dataclass(frozen=True, slots=True)
class Drafting:
    """What guesses, before the model is loaded."""

    draft_engine: Engine | None = None  # loaded
    guessing: Guessing = field(default_factory=Guessing)


def load_drafting(
    settings: DecodeSchedulerSettings, model: ModelSettings, kv: KvSettings, fake: FakeSettings
) -> Drafting:
    """Load the draft model of the settings, if they ask for one; its name is a directory. Raises ModelError or SettingsError.

    Call this before the model is loaded, whose pool then leaves the draft model its memory. A head, or the checkpoint's own layer,
    is only checked here.
    """
    if (settings.speculation in ("draft-model", "head")) != (settings.draft_model is not None):
        raise SettingsError(
            f"--speculation is {settings.speculation} and --draft-model {settings.draft_model}; a draft model needs both: "
            "--speculation draft-model --draft-model NAME, and so does a head: --speculation head"
        )
    if settings.speculation == "mtp":
        guessing = require_layer(
            model, kv, fake, kv_memory_mb=settings.draft_kv_memory_mb, max_num_seqs=settings.max_num_seqs
        )
        return Drafting(guessing=guessing)
    if settings.draft_model is None:
        return Drafting()
    if settings.speculation == "head":
        guessing = require_head(
            settings.draft_model,
            model,
            kv,
            fake,
            kv_memory_mb=settings.draft_kv_memory_mb,
            max_num_seqs=settings.max_num_seqs,
        )
        return Drafting(guessing=guessing)
    draft_engine = load_draft_engine(
        settings.draft_model,
        model,
        kv,
        fake,
        kv_memory_mb=settings.draft_kv_memory_mb,
        max_num_seqs=settings.max_num_seqs,
        max_batched_tokens=settings.max_batched_tokens,
        progress=LoggedProgress(logger, time.monotonic),
    )
    return Drafting(draft_engine)


def serve(settings: DecodeSettings) -> int:
    """Run a decode worker until SIGTERM or SIGINT; returns the exit code. Raises KvrelayError if it cannot start."""
    drafting = Drafting()

    def load_before() -> Guessing:
        nonlocal drafting
        drafting = load_drafting(settings.scheduler, settings.model, settings.kv, settings.fake)
        return drafting.guessing

    def make(engine: Engine, setup: Setup) -> DecodeWorker:
        return DecodeWorker(
            engine, settings.scheduler, settings.data_address, setup, draft_engine=drafting.draft_engine
        )

    listens_at = {"--address": settings.address, "--data-address": settings.data_address}
    return serve_worker(Role.DECODE, settings, listens_at, make, load_before, reads_images=settings.images)
