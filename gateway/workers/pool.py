"""The workers of one model: which there are, which may be used together, and which request a message belongs to.

The list of workers comes from the settings or from :mod:`kvrelay.gateway.workers.discovery`, and may change. Workers that serve
another model, or whose KV layout differs from the others', are connected and named, but not used.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kvrelay.common.model_card import ModelCard, SharedLimits
from kvrelay.gateway.metrics import ModelMetrics
from kvrelay.gateway.model_names import worker_address
from kvrelay.gateway.workers.load import Key, choose_fingerprint
from kvrelay.gateway.workers.worker import AttemptEvent, Listener, Worker
from kvrelay.wire.messages import Distrust, Hello, KeyTokens, Role, Status, worker_peer_id
from kvrelay.wire.network import Network
from kvrelay.wire.security.keys import WireKeys
from kvrelay.wire.settings import LinkSettings

logger = logging.getLogger(__name__)

_NOTHING: Mapping[str, int] = {}
_MAX_DISTRUSTED = 256  # that are remembered; the last ones heard of


@dataclass(frozen=True, slots=True)
class FoundWorker:
    """A worker that should be there."""

    role: Role
    address: str
    uid: str = ""  # another one under the same address is another worker
    accepts: bool = True  # else it is starting or leaving: nothing new is sent to it
    model: str = ""  # that it is listed for; "": the only one that there is


class WorkerPool:
    """All workers of one model. Lives on the gateway's asyncio loop."""

    def __init__(
        self,
        gateway_id: str,
        metrics: ModelMetrics,
        link_settings: LinkSettings,
        network: Network,
        *,
        needs_prefill_workers: bool,
        keys: WireKeys | None = None,
        model: str = "",
    ) -> None:
        """``network`` is closed with the pool. ``model``: its name in the API; "": there is one only, whatever it is called.

        ``needs_prefill_workers``: while none is up there is no service; else decode workers compute prompts meanwhile, once
        the first of them was up.
        """
        self.model = model
        self._metrics = metrics
        self._network = network
        self._hello = Hello(role=Role.GATEWAY, peer_id=gateway_id)
        self._link = (link_settings, metrics.wire, network, keys)
        self._needs_prefill_workers = needs_prefill_workers
        self.prefills: dict[str, Worker] = {}  # by address
        self.decodes: dict[str, Worker] = {}
        self._fingerprint: bytes | None = None  # of the KV of all workers that are used
        self._is_told = False  # who is there
        self.cards: list[ModelCard] = []  # of the workers that are up
        self.limits: SharedLimits | None = None  # what all workers that are up can do; None while none is
        self.absent = self._missing_roles()  # why no gateway can serve; empty if somebody has each role
        self._had_prefill_worker = False  # up; before that those that are listed are starting, and worth waiting for
        self._listeners: dict[Key, Listener] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        self._distrusted: deque[str] = deque(maxlen=_MAX_DISTRUSTED)  # starts of prefill workers, by their ``peer_id``
        self.on_key_tokens: Callable[[KeyTokens], object] = lambda _: (
            None
        )  # hears what other gateways tell through workers
        self.changed = asyncio.Event()  # set when a worker came, went or reported; waiters clear it
        for role in (Role.PREFILL, Role.DECODE):
            metrics.distrusted_workers.labels(role.value)  # from 0 on: an alert sees the first one
        for gauge, state, read in (
            (metrics.worker_requests, "running", lambda status: status.num_running),
            (metrics.worker_requests, "waiting", lambda status: status.num_waiting),
            (metrics.worker_kv_blocks, "free", lambda status: status.num_free_blocks),
            (metrics.worker_kv_blocks, "used", lambda status: status.num_blocks - status.num_free_blocks),
        ):
            for role in (Role.PREFILL, Role.DECODE):
                gauge.labels(role.value, state).set_function(partial(self._reported, role, read))

    @property
    def workers(self) -> list[Worker]:
        """All workers, prefill first."""
        return [*self.prefills.values(), *self.decodes.values()]

    def update(self, found: Iterable[FoundWorker]) -> None:
        """From now on these are the workers: connects to new ones, retires those that leave, lets go of all others."""
        self._is_told = True
        by_key = {(worker.role, worker.address): worker for worker in found}
        for worker in self.workers:
            if (known := by_key.get((worker.role, worker.address))) is None or known.uid != worker.uid:
                self._let_go(worker)
        for (role, address), new in by_key.items():
            workers = self._of(role)
            if address in workers:
                workers[address].is_retiring = not new.accepts
            elif new.accepts:
                workers[address] = Worker(role, address, new.uid, self, self._hello, self._link)
                workers[address].client.start()
        self.take_stock()

    async def stop(self) -> None:
        """Say Bye to all workers: what this gateway asked for is void."""
        await asyncio.gather(*self._stopping, *(worker.client.stop() for worker in self.workers))
        await asyncio.to_thread(self._network.close)

    @property
    def fingerprint(self) -> bytes | None:
        """Of the KV of the workers that are used; None while none is up."""
        return self._fingerprint if self.cards else None

    def open_attempt(
        self,
        key: Key,
        workers: Sequence[Worker],
        num_tokens: int,
        listener: Listener,
        cached: Mapping[str, int] = _NOTHING,
    ) -> None:
        """Register an attempt, sent to the first worker; ``listener`` hears what they all say of it from now on.

        ``cached``: so many of its tokens the worker at an address has already, as far as one knows.
        """
        self._listeners[key] = listener
        for worker in workers:
            if worker.load is not None:
                is_sent = worker is workers[0]
                num_to_compute = num_tokens - cached.get(worker.address, 0) if is_sent else 0
                worker.load.open(key, num_tokens, self._network.clock(), is_sent=is_sent, num_to_compute=num_to_compute)

    def keep_place(self, key: Key, worker: Worker, num_tokens: int, num_to_compute: int) -> None:
        """For an attempt that may go to the worker soon: others see its place as taken, until ``give_place_back``."""
        if worker.load is not None:
            worker.load.open(key, num_tokens, self._network.clock(), is_sent=False, num_to_compute=num_to_compute)

    def give_place_back(self, key: Key, worker: Worker) -> None:
        """The attempt begins, or will not."""
        if worker.load is not None:
            worker.load.close(key, 0)
        self.changed.set()

    def on_first_token(self, key: Key, workers: Sequence[Worker]) -> None:
        """An attempt on these workers has its first token: the next prompt may have its place."""
        for worker in workers:
            if worker.load is not None:
                worker.load.on_first_token(key, self._network.clock(), worker.tokens_per_s)
        self.changed.set()

    def close_attempt(self, key: Key, workers: Sequence[Worker], num_tokens: int) -> None:
        """Forget an attempt that ended at ``num_tokens``; what still comes of it is dropped, others may have its place."""
        del self._listeners[key]
        for worker in workers:
            if worker.load is not None:
                worker.load.close(key, num_tokens)
        self.changed.set()

    def deliver(self, key: Key, event: AttemptEvent) -> None:
        """Pass an event on to its attempt, if it is still open."""
        listener = self._listeners.get(key)
        if listener is not None:
            listener(event)

    def on_wrong(self, worker: Worker) -> None:
        """It computes wrongly. Decode workers drop what a prefill worker shipped; those that come later are told, too."""
        self._metrics.distrusted_workers.labels(worker.role.value).inc()
        if worker.role is Role.PREFILL and worker.welcome is not None:
            peer_id = worker_peer_id(worker.welcome.worker_id, worker.welcome.epoch)
            self._distrusted.append(peer_id)
            for decode in self.decodes.values():
                decode.client.send(Distrust(peer_id=peer_id))

    def on_welcome(self, worker: Worker) -> None:
        """A link is up; what was sent before may have been lost."""
        if worker.role is Role.DECODE:
            for peer_id in self._distrusted:
                worker.client.send(Distrust(peer_id=peer_id))

    @property
    def is_local_only(self) -> bool:
        """Whether decode workers compute all prompts. Not to hide a prefill worker whose KV is another: that is a mistake."""
        if self._needs_prefill_workers or any(one.is_usable or one.misfit for one in self.prefills.values()):
            return False
        return self._had_prefill_worker or not self._staying(Role.PREFILL)

    def not_ready(self) -> list[str]:
        """Why requests should be sent to another gateway; empty if they can be served, or if no gateway could (see ``absent``)."""
        if not self._is_told:
            return ["who the workers are is not known yet"]
        reasons: list[str] = []
        for role in (Role.DECODE,) if self.is_local_only else (Role.PREFILL, Role.DECODE):
            workers = self._staying(role)
            if workers and not any(worker.is_usable for worker in workers):
                problems = "; ".join(sorted({worker.misfit or worker.problem for worker in workers}))
                reasons.append(f"no {role} worker is up ({problems})")
        return reasons

    def _missing_roles(self) -> list[str]:
        needed = [Role.PREFILL] if self._needs_prefill_workers else []
        return [f"there is no {role} worker" for role in (*needed, Role.DECODE) if not self._staying(role)]

    def kv_in_use(self, role: Role) -> float | None:
        """The part of the role's KV blocks that is neither free nor only cached, as last reported; None if nobody has."""
        num_blocks = self._reported(role, lambda status: status.num_blocks)
        return 1 - self._reported(role, lambda status: status.num_free_blocks) / num_blocks if num_blocks else None

    def _reported(self, role: Role, read: Callable[[Status], int]) -> int:
        """The sum over all workers of the role that have reported."""
        return sum(read(worker.status) for worker in self._of(role).values() if worker.status is not None)

    def _staying(self, role: Role) -> list[Worker]:
        """Those that are not on their way out."""
        return [worker for worker in self._of(role).values() if not worker.is_retiring]

    def _of(self, role: Role) -> dict[str, Worker]:
        return self.prefills if role is Role.PREFILL else self.decodes

    def _let_go(self, worker: Worker) -> None:
        del self._of(worker.role)[worker.address]
        logger.info("%s worker at %s is gone", worker.role, worker.address)
        worker.abandon("it is gone")
        task = asyncio.create_task(worker.client.stop())
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    def take_stock(self) -> None:
        """Who is up, and who of them is used."""
        up = [worker for worker in self.workers if worker.welcome is not None]
        for role in (Role.PREFILL, Role.DECODE):
            self._metrics.workers_up.labels(role.value).set(sum(1 for worker in up if worker.role is role))
        foreign = {worker: reason for worker in up if (reason := worker.foreign_to(self.model))}
        staying = [
            (worker.role, worker.fingerprint) for worker in up if not worker.is_retiring and worker not in foreign
        ]
        self._fingerprint = choose_fingerprint(
            self._fingerprint,
            [fingerprint for role, fingerprint in staying if role is Role.PREFILL],
            [fingerprint for role, fingerprint in staying if role is Role.DECODE],
        )
        model = next((one for one in up if one.fingerprint == self._fingerprint and one not in foreign), None)
        for worker in up:
            misfit = foreign.get(worker) or ("" if model is None else worker.differences(model))
            if misfit and misfit != worker.misfit:
                logger.error("%s worker at %s is not used: %s", worker.role, worker.address, misfit)
            worker.misfit = misfit
        self._metrics.workers_refused.set(sum(1 for worker in up if worker.misfit))
        # Each request looks at these several times.
        self.cards = [worker.welcome.card for worker in up if worker.welcome is not None and not worker.misfit]
        self.limits = SharedLimits.of(self.cards) if self.cards else None
        self.absent = self._missing_roles()
        self._had_prefill_worker = self._had_prefill_worker or any(worker.role is Role.PREFILL for worker in up)
        self.changed.set()


def static_workers(prefill_addresses: Sequence[str], decode_addresses: Sequence[str]) -> list[FoundWorker]:
    """The workers of two lists, for :meth:`WorkerPool.update`."""
    return [
        FoundWorker(role, address, model=model)
        for role, values in ((Role.PREFILL, prefill_addresses), (Role.DECODE, decode_addresses))
        for model, address in map(worker_address, values)
    ]
