"""The gateway's workers: one control link each, their last reported state, and the way of a message to its request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from kvrelay.common.model_card import ModelCard
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.routing import WorkerView
from kvrelay.wire.control import ControlClient
from kvrelay.wire.messages import (
    Cancelled,
    DecodeTarget,
    Failed,
    HandedOver,
    Hello,
    HelloRefused,
    Message,
    Role,
    Status,
    TokenDelta,
    Tokens,
    Welcome,
    WorkerState,
)
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.settings import LinkSettings

logger = logging.getLogger(__name__)

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """Put into an attempt's inbox when one of its workers is gone."""

    role: Role
    address: str
    reason: str


@dataclass(frozen=True, slots=True)
class GaveUp:
    """A worker's last word on an attempt that it did not finish, and which worker it was."""

    role: Role
    answer: Failed | Cancelled


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """Put into an attempt's inbox when the request's time is up."""


AttemptEvent = TokenDelta | HandedOver | GaveUp | WorkerLost | DeadlinePassed
Inbox = asyncio.Queue[AttemptEvent]


@dataclass(slots=True)
class _Unreported:
    """An attempt that the worker's reports may not show yet."""

    num_tokens: int
    num_reports: int | None  # since the worker knows of it; None while it is only on its way through another worker


class Worker:
    """One worker's address. Implements :class:`kvrelay.wire.control.ClientHandler`."""

    def __init__(
        self,
        role: Role,
        address: str,
        pool: WorkerPool,
        hello: Hello,
        link: tuple[LinkSettings, WireMetrics, zmq.Context[zmq.Socket[bytes]]],
    ) -> None:
        self.role = role
        self.address = address
        self.welcome: Welcome | None = None
        self.status: Status | None = None
        self.problem = "not connected yet"
        self.up_since_s = 0.0  # monotonic
        self.attempts: set[Key] = set()
        self._unreported: dict[Key, _Unreported] = {}
        self._pool = pool
        settings, metrics, context = link
        self.client = ControlClient(address, hello, self, settings, metrics=metrics, context=context)

    def on_welcome(self, welcome: Welcome) -> None:
        """The link is up."""
        if welcome.role is not self.role:
            self.problem = f"{self.address} is a {welcome.role} worker, but was given as a {self.role} worker"
            logger.error("%s", self.problem)
            return
        self.welcome = welcome
        self.status = None
        self.up_since_s = time.monotonic()
        self._unreported.clear()
        card = welcome.card
        logger.info(
            "%s worker %s at %s: up, %s, %d KV blocks",
            self.role, welcome.worker_id, self.address, card.layout.model_id, card.num_blocks,
        )  # fmt: skip
        for misfit in self._pool.misfits(self):
            logger.error("%s worker at %s is never paired with %s", self.role, self.address, misfit)
        self._pool.on_worker_changed(self)

    def on_message(self, message: Message) -> None:
        """Take a report, or pass an answer on to its attempt."""
        match message:
            case Status():
                self.status = message
                self._count_report()
                self._pool.changed.set()
            case Tokens(items=items):
                for item in items:
                    self._pool.deliver((item.request_id, item.attempt), item)
            case HandedOver():
                self._pool.deliver((message.request_id, message.attempt), message)
            case Failed() | Cancelled():
                self._pool.deliver((message.request_id, message.attempt), GaveUp(self.role, message))
            case _:
                logger.warning("unexpected %s from %s", type(message).__name__, self.address)

    def on_lost(self, reason: str) -> None:
        """The worker is gone; its attempts hear of it."""
        logger.warning("%s worker at %s is lost: %s", self.role, self.address, reason)
        self.welcome = self.status = None
        self.problem = reason
        for key in list(self.attempts):
            self._pool.deliver(key, WorkerLost(self.role, self.address, reason))
        self._pool.on_worker_changed(self)

    def on_refused(self, refused: HelloRefused) -> None:
        """The worker does not talk to gateways like us."""
        if self.problem != refused.detail:
            logger.error("%s worker at %s refuses this gateway: %s", self.role, self.address, refused.detail)
        self.problem = refused.detail

    @property
    def is_usable(self) -> bool:
        """Whether requests can be sent to it."""
        is_draining = self.status is not None and self.status.state is WorkerState.DRAINING
        return self.welcome is not None and self.client.is_up and not is_draining

    def open(self, key: Key, num_tokens: int, *, is_sent: bool) -> None:
        """An attempt begins; it counts as load until the worker's own reports must show it.

        ``is_sent``: it is sent to this worker, which else hears of it from another one (and we with ``on_known``).
        """
        self.attempts.add(key)
        self._unreported[key] = _Unreported(num_tokens, 0 if is_sent else None)

    def on_known(self, key: Key) -> None:
        """The worker knows of an attempt that was not sent to it."""
        if (attempt := self._unreported.get(key)) is not None and attempt.num_reports is None:
            attempt.num_reports = 0

    def close(self, key: Key) -> None:
        """An attempt is over."""
        self.attempts.discard(key)
        self._unreported.pop(key, None)

    def _count_report(self) -> None:
        for key, attempt in list(self._unreported.items()):
            if attempt.num_reports is None:
                continue
            attempt.num_reports += 1
            # The first report may have been on its way to us while the attempt was on its way to the worker.
            if attempt.num_reports > 1:
                del self._unreported[key]

    def holds(self, num_tokens: int) -> bool:
        """Whether a request of so many tokens, output included, is within its limit."""
        return self.welcome is not None and num_tokens <= self.welcome.card.max_model_len

    def view(self) -> WorkerView | None:
        """What routing sees; None if it is not usable."""
        if self.welcome is None or not self.is_usable:
            return None
        card = self.welcome.card
        status = self.status
        return WorkerView(
            address=self.address,
            fingerprint=card.layout.fingerprint(),
            num_requests=0 if status is None else status.num_running + status.num_waiting,
            num_waiting_tokens=0 if status is None else status.num_waiting_tokens,
            num_free_blocks=card.num_blocks if status is None else status.num_free_blocks,
            num_blocks=card.num_blocks,
            block_size=card.layout.block_size,
            pending_requests=len(self._unreported),
            pending_tokens=sum(attempt.num_tokens for attempt in self._unreported.values()),
        )


class WorkerPool:
    """All workers of a static list of addresses. Lives on the gateway's asyncio loop."""

    def __init__(
        self,
        prefill_addresses: Sequence[str],
        decode_addresses: Sequence[str],
        gateway_id: str,
        metrics: GatewayMetrics,
        link_settings: LinkSettings,
    ) -> None:
        self._metrics = metrics
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        hello = Hello(role=Role.GATEWAY, peer_id=gateway_id)
        link = (link_settings, WireMetrics(metrics.registry), self.context)
        self.prefills = {a: Worker(Role.PREFILL, a, self, hello, link) for a in prefill_addresses}
        self.decodes = {a: Worker(Role.DECODE, a, self, hello, link) for a in decode_addresses}
        self._inboxes: dict[Key, Inbox] = {}
        self.changed = asyncio.Event()  # set when a worker came, went or reported; waiters clear it

    @property
    def workers(self) -> list[Worker]:
        """All workers, prefill first."""
        return [*self.prefills.values(), *self.decodes.values()]

    def start(self) -> None:
        """Begin to connect, on the running loop."""
        for role in (Role.PREFILL, Role.DECODE):
            self._metrics.workers_up.labels(role.value).set(0)
        for worker in self.workers:
            worker.client.start()

    async def stop(self) -> None:
        """Say Bye to all workers: what this gateway asked for is void."""
        await asyncio.gather(*(worker.client.stop() for worker in self.workers))
        await asyncio.to_thread(self.context.term)

    def cards(self) -> list[ModelCard]:
        """The cards of the workers that are up."""
        return [worker.welcome.card for worker in self.workers if worker.welcome is not None]

    def open_attempt(self, key: Key, workers: Sequence[Worker], num_tokens: int) -> Inbox:
        """Register an attempt, sent to the first worker; what they all say of it lands in the inbox from now on."""
        inbox: Inbox = asyncio.Queue()
        self._inboxes[key] = inbox
        for worker in workers:
            worker.open(key, num_tokens, is_sent=worker is workers[0])
        return inbox

    def close_attempt(self, key: Key, workers: Sequence[Worker]) -> None:
        """Forget an attempt; what still comes of it is dropped."""
        del self._inboxes[key]
        for worker in workers:
            worker.close(key)

    def deliver(self, key: Key, event: AttemptEvent) -> None:
        """Pass an event on to its attempt, if it is still open."""
        inbox = self._inboxes.get(key)
        if inbox is not None:
            inbox.put_nowait(event)

    def on_worker_changed(self, worker: Worker) -> None:
        """A worker came or went."""
        num_up = sum(1 for other in self.workers if other.role is worker.role and other.welcome is not None)
        self._metrics.workers_up.labels(worker.role.value).set(num_up)
        self.changed.set()

    def not_ready(self) -> list[str]:
        """Why requests cannot be served; empty if they can."""
        reasons: list[str] = []
        for role, workers in ((Role.PREFILL, self.prefills), (Role.DECODE, self.decodes)):
            if workers and not any(worker.is_usable for worker in workers.values()):
                problems = "; ".join(sorted({worker.problem for worker in workers.values()}))
                reasons.append(f"no {role} worker is up ({problems})")
        return reasons or self._layout_conflict()

    def misfits(self, worker: Worker) -> list[str]:
        """The workers of the other role whose KV does not fit that of ``worker``, each with the differences."""
        if worker.welcome is None:
            return []
        layout = worker.welcome.card.layout
        return [
            f"{other.address} ({'; '.join(differences)})"
            for other in self.workers
            if other.role is not worker.role
            and other.welcome is not None
            and (differences := layout.differences(other.welcome.card.layout))
        ]

    def _layout_conflict(self) -> list[str]:
        """Why no prefill worker's KV fits any decode worker, if that is so."""
        layouts = [
            [worker.welcome.card.layout for worker in workers.values() if worker.welcome is not None]
            for workers in (self.prefills, self.decodes)
        ]
        if not all(layouts) or {layout.fingerprint() for layout in layouts[0]} & {
            layout.fingerprint() for layout in layouts[1]
        }:
            return []
        differences = "; ".join(layouts[0][0].differences(layouts[1][0]))
        return [f"the KV of prefill and decode workers does not fit (prefill / decode: {differences})"]


def decode_target(worker: Worker) -> DecodeTarget:
    """How a prefill worker finds this decode worker."""
    return DecodeTarget(address=worker.address)
