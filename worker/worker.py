"""The parts that workers of both roles share, assembled: model thread, service, control socket, health.

A role's subclass makes its scheduler and its service, and adds the connections of its hand-off.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from kvrelay.common.clock import Clock
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.books import ledger_json, unbalanced
from kvrelay.engine.settings import prompt_step_tokens, sequences_at_a_time
from kvrelay.engine.step.interface import Profiler
from kvrelay.engine.step.leader import Leader
from kvrelay.wire.codec import MAX_CONTROL_FRAME_NBYTES, MAX_FRAME_NBYTES_WITH_IMAGES
from kvrelay.wire.control.server import ControlServer
from kvrelay.wire.messages import Role
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.security.authentication import PeerGate
from kvrelay.worker.adapters import AdapterStore
from kvrelay.worker.canary import Canary, CanaryPlan
from kvrelay.worker.images import ImageDesk
from kvrelay.worker.metrics import EngineMetrics
from kvrelay.worker.model_worker import ModelWorker
from kvrelay.worker.scheduling.scheduler import Scheduler
from kvrelay.worker.service import COMPUTES_WRONGLY, Ports, Service
from kvrelay.worker.settings import SchedulerSettings
from kvrelay.worker.setup import Setup
from kvrelay.worker.submit import WorkerIdentity

_READY_TICK_S = 30.0  # a chunk on a slow CPU takes seconds; half a minute without a step is not normal
_LIVE_TICK_S = 300.0
WRONG_EXIT_CODE = 3  # exit code of a process whose canary's answer changed
_CANARY_TOKENS = 4  # tokens that a decode worker's canary generates
_TELL_S = 3.0  # how long a worker that computes wrongly still answers: three pings of every gateway

S = TypeVar("S", bound=Service[Any])


class Worker(ABC, Generic[S]):
    """One worker of either role. Implements :class:`kvrelay.worker.process.run.Component`. Owns its engine, network and guides."""

    def __init__(
        self,
        leader: Leader,
        settings: SchedulerSettings,
        setup: Setup,
        make_scheduler: Callable[..., Scheduler],
        make_service: Callable[[WorkerIdentity, BlockManager, Clock], S],
    ) -> None:
        """``leader``: of the engine that computes all steps.

        ``make_scheduler``: called with settings, blocks, the longest sequence's tokens, the device type, and ``num_stages``.
        """
        engine, network = leader.engine, setup.network
        card = engine.card
        windows = card.layout.geometry.windows
        step_tokens = prompt_step_tokens(settings.max_batched_tokens, card.device_type)
        self.blocks = BlockManager(
            card.num_blocks * len(windows),
            card.layout.block_size,
            network.clock,
            windows=windows,
            max_step_tokens=step_tokens,
            max_retained_share=setup.max_retained_share,
            has_states=card.layout.geometry.has_states,
        )
        scheduler = make_scheduler(
            settings, self.blocks, card.max_model_len, card.device_type, num_stages=engine.num_stages
        )
        max_running = sequences_at_a_time(settings.max_num_seqs, card.device_type)
        identity = WorkerIdentity(
            setup.worker_id, setup.epoch, card, settings.max_waiting, max_running, setup.model, step_tokens
        )
        self.service = service = make_service(identity, self.blocks, network.clock)
        self._engine = engine
        self.address = setup.address
        self._network = network
        self._asyncio_loop: asyncio.AbstractEventLoop | None = None  # set by ``start``
        metrics = EngineMetrics(
            setup.registry,
            self.blocks,
            num_running=lambda: len(scheduler.running),
            num_waiting=lambda: len(scheduler.waiting),
        )
        emit = partial(self._call_on_loop, service.on_report)
        canary = None
        if setup.canary_period_s:
            num_tokens = _CANARY_TOKENS if service.role is Role.DECODE else 1
            plan = CanaryPlan(setup.canary_period_s, step_tokens, num_tokens)
            canary = Canary(plan, leader, self.blocks, network.clock)
        self._model_worker = ModelWorker(leader, scheduler, metrics, emit, network.clock, canary)
        self._loop = setup.model_loop(self._model_worker, f"{service.role}-model", network.clock)
        self._wire_metrics = WireMetrics(setup.registry)
        self._images = ImageDesk(setup.images, self._call_on_loop, card.no_images)
        self._gate = (
            None if setup.keys is None else PeerGate(setup.keys, service.peers, self._wire_metrics, network.context)
        )
        self._server = ControlServer(
            setup.address,
            service,
            setup.link_settings,
            metrics=self._wire_metrics,
            network=network,
            gate=self._gate,
            max_frame_nbytes=MAX_CONTROL_FRAME_NBYTES if self._images.no_images else MAX_FRAME_NBYTES_WITH_IMAGES,
        )
        self._guides = setup.guides
        self._adapters = AdapterStore(engine.adapters, setup.adapters)
        service.connect(
            Ports(
                self._server.send,
                self._loop,
                self._call_on_loop,
                self._guides,
                lambda: scheduler.prompt_tokens_per_s,
                self._adapters,
                self._images,
            )
        )
        self._tickers: list[asyncio.Task[None]] = []

    # -- what a role adds ------------------------------------------------------------------------------------------

    @abstractmethod
    def tickers(self) -> list[asyncio.Task[None]]:
        """Start the role's periodic tasks and return them."""

    def dead_sockets(self) -> list[str]:
        """Reasons why a socket has ended and will not reopen in this process; empty if all live."""
        return [] if self._server.is_alive else ["the control socket is dead"]

    @abstractmethod
    async def stop_hand_off(self) -> None:
        """Close the connections that blocks are sent through."""

    # -- Component -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the sockets and start the threads. Raises WireError if an address is taken."""
        self._asyncio_loop = asyncio.get_running_loop()
        self._loop.start()
        self.address = await self._server.start()
        self._tickers = self.tickers()

    def not_live(self) -> list[str]:
        """See Component. A worker that computes wrongly stays live until gateways have had time to learn of it."""
        reasons = self._engine.not_live() + self.dead_sockets() + self._loop.problems(_LIVE_TICK_S)
        wrong_s = self.service.wrong_since_s
        if wrong_s is not None and self._network.clock() - wrong_s >= _TELL_S:
            reasons.append(COMPUTES_WRONGLY)
        return reasons

    @property
    def exit_code(self) -> int:
        """See Component."""
        return 1 if self.service.wrong_since_s is None else WRONG_EXIT_CODE

    def not_ready(self) -> list[str]:
        """See Component."""
        wrong = [] if self.service.wrong_since_s is None else [COMPUTES_WRONGLY]
        return (
            wrong
            + self._engine.not_live()
            + self.dead_sockets()
            + self._loop.problems(_READY_TICK_S)
            + unbalanced(self.blocks)
        )

    def debug_kv(self) -> dict[str, Any]:
        """See Component."""
        return {
            "ledger": ledger_json(self.blocks),
            "requests": self.service.debug(),
            "adapters": self._adapters.debug(),
        }

    @property
    def profiler(self) -> Profiler | None:
        """See Component."""
        return self._engine.profiler

    async def drain(self) -> None:
        """Refuse new requests, and return when the accepted ones are over."""
        await self.service.drain()

    async def stop(self) -> None:
        """Close everything, even if requests are still running."""
        for ticker in self._tickers:
            ticker.cancel()
        await asyncio.gather(*self._tickers, return_exceptions=True)
        await self._server.stop()
        await self._adapters.stop()
        await asyncio.to_thread(self._loop.stop)
        await asyncio.to_thread(self._guides.close)
        await asyncio.to_thread(self._images.close)
        await self.stop_hand_off()
        await asyncio.to_thread(self._network.close)
        await asyncio.to_thread(self._engine.close)

    def _call_on_loop(self, function: Callable[..., object], *args: Any) -> None:
        """From any thread, once started: call ``function`` on the asyncio loop, in order. Dropped after the loop's end."""
        assert self._asyncio_loop is not None, "calls come when the worker has started"
        if not self._asyncio_loop.is_closed():
            self._asyncio_loop.call_soon_threadsafe(function, *args)
