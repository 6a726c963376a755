"""The workers of one model: which exist, which fit together, and the attempt that a message belongs to.

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
_MAX_DISTRUSTED = 256  # how many are remembered: the latest


@dataclass(frozen=True, slots=True)
class FoundWorker:
    """A worker that should exist."""

    role: Role
    address: str
    uid: str = ""  # another uid under the same address is another worker
    accepts: bool = True  # False while it starts or ends: it gets no new requests
    model: str = ""  # the model that it is listed for; "": the only model


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
        """``network`` is closed with the pool. ``model``: its name in the API; "": there is only one model, whatever its name.

        ``needs_prefill_workers``: without a running prefill worker there is no service. Otherwise decode workers compute prompts
        then, once a prefill worker has been up.
        """
        self.model = model
        self._metrics = metrics
        self._network = network
        self._hello = Hello(role=Role.GATEWAY, peer_id=gateway_id)
        self._link = (link_settings, metrics.wire, network, keys)
        self._needs_prefill_workers = needs_prefill_workers
        self.prefills: dict[str, Worker] = {}  # by address
        self.decodes: dict[str, Worker] = {}
        self._fingerprint: bytes | None = None  # KV layout of all workers in use
        self._is_told = False  # the list of workers is known
        self.cards: list[ModelCard] = []  # of the workers that are up
        self.limits: SharedLimits | None = None  # limits that all running workers share; None while none is up
        self.absent = self._missing_roles()  # why no gateway can serve; empty if each role has a worker
        # One has been up; before that the listed ones are starting, and worth waiting for.
        self._had_prefill_worker = False
        self.knows_prefill_workers = False  # one is, or was, listed, be it one that still starts
        self._listeners: dict[Key, Listener] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        # ``peer_id`` of prefill workers that computed wrongly.
        self._distrusted: deque[str] = deque(maxlen=_MAX_DISTRUSTED)
        self.on_key_tokens: Callable[[KeyTokens], object] = lambda _: (
            None
        )  # called with other gateways' reports, which come through workers
        self.on_stock_taken: Callable[[], object] = lambda: (
            None
        )  # called when workers have come, gone, or begun to drain
        self.changed = asyncio.Event()  # set when a worker came, went or reported; waiters clear it
        for role in (Role.PREFILL, Role.DECODE):
            # From 0 on, so that alerts see a gateway that never learns of workers, and the first wrong worker.
            metrics.workers_up.labels(role.value)
            metrics.distrusted_workers.labels(role.value)
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
        """Take the new list of workers: connect to new ones, retire those that leave, drop all others."""
        self._is_told = True
        found = list(found)
        self.knows_prefill_workers = self.knows_prefill_workers or any(one.role is Role.PREFILL for one in found)
        by_key = {(worker.role, worker.address): worker for worker in found}
        for worker in self.workers:
            if (known := by_key.get((worker.role, worker.address))) is None or known.uid != worker.uid:
                self._let_go(worker)
        for (role, address), new in by_key.items():
            workers = self._of(role)
            if address in workers:
                workers[address].is_retiring = not new.accepts
                self.hurry([workers[address]])
            elif new.accepts:
                workers[address] = Worker(role, address, new.uid, self, self._hello, self._link)
                workers[address].client.start()
        self.take_stock()

    def hurry(self, workers: Iterable[Worker]) -> None:
        """Try soon to connect to those that are down: they may have restarted, and they are wanted."""
        for worker in workers:
            if not worker.client.is_up and not worker.is_retiring:
                worker.client.hurry()

    async def stop(self) -> None:
        """Say Bye to all workers, which cancels this gateway's requests."""
        await asyncio.gather(*self._stopping, *(worker.client.stop() for worker in self.workers))
        await asyncio.to_thread(self._network.close)

    @property
    def fingerprint(self) -> bytes | None:
        """The KV layout of the workers in use; None while none is up."""
        return self._fingerprint if self.cards else None

    def open_attempt(
        self,
        key: Key,
        workers: Sequence[Worker],
        num_tokens: int,
        listener: Listener,
        cached: Mapping[str, int] = _NOTHING,
    ) -> None:
        """Register an attempt that is sent to the first worker. ``listener`` gets all events of the attempt from now on.

        ``cached``: number of its tokens that the worker at an address has cached, as far as known.
        """
        self._listeners[key] = listener
        for worker in workers:
            if worker.load is not None:
                is_sent = worker is workers[0]
                num_to_compute = num_tokens - cached.get(worker.address, 0) if is_sent else 0
                worker.load.open(key, num_tokens, self._network.clock(), is_sent=is_sent, num_to_compute=num_to_compute)

    def keep_place(self, key: Key, worker: Worker, num_tokens: int, num_to_compute: int) -> None:
        """Reserve a place on the worker for an attempt that may follow. It counts as taken until ``give_place_back``."""
        if worker.load is not None:
            worker.load.open(key, num_tokens, self._network.clock(), is_sent=False, num_to_compute=num_to_compute)

    def give_place_back(self, key: Key, worker: Worker) -> None:
        """Release a reserved place: the attempt begins, or will not."""
        if worker.load is not None:
            worker.load.close(key, 0)
        self.changed.set()

    def on_first_token(self, key: Key, workers: Sequence[Worker]) -> None:
        """An attempt on these workers has its first token, so the next prompt may have its place."""
        for worker in workers:
            if worker.load is not None:
                worker.load.on_first_token(key, self._network.clock(), worker.tokens_per_s)
        self.changed.set()

    def close_attempt(self, key: Key, workers: Sequence[Worker], num_tokens: int) -> None:
        """Forget an attempt that ended at ``num_tokens``. Later events of it are dropped, and its places are free."""
        del self._listeners[key]
        for worker in workers:
            if worker.load is not None:
                worker.load.close(key, num_tokens)
        self.changed.set()

    def deliver(self, key: Key, event: AttemptEvent) -> None:
        """Pass an event to its attempt, if it is still open."""
        listener = self._listeners.get(key)
        if listener is not None:
            listener(event)

    def on_wrong(self, worker: Worker) -> None:
        """``worker`` has found that it computes wrongly.

        Decode workers, also later ones, are told to drop the K/V of a wrong prefill worker.
        """
        self._metrics.distrusted_workers.labels(worker.role.value).inc()
        if worker.role is Role.PREFILL and worker.welcome is not None:
            peer_id = worker_peer_id(worker.welcome.worker_id, worker.welcome.epoch)
            self._distrusted.append(peer_id)
            for decode in self.decodes.values():
                decode.client.send(Distrust(peer_id=peer_id))

    def on_welcome(self, worker: Worker) -> None:
        """A link is up again; messages sent before may be lost."""
        if worker.role is Role.DECODE:
            for peer_id in self._distrusted:
                worker.client.send(Distrust(peer_id=peer_id))

    @property
    def is_local_only(self) -> bool:
        """Whether decode workers compute all prompts.

        A prefill worker with another KV layout is a mistake, which this must not hide.
        """
        if self._needs_prefill_workers or any(one.is_usable or one.misfit for one in self.prefills.values()):
            return False
        return self._had_prefill_worker or not self._staying(Role.PREFILL)

    @property
    def image_workers(self) -> list[Worker]:
        """The workers that might compute prompts with images, be they up or not, and read images or not."""
        prefills = list(self.prefills.values())
        return prefills if self._needs_prefill_workers else [*prefills, *self.decodes.values()]

    @property
    def image_readers(self) -> list[Worker]:
        """The usable workers that compute prompts with images: prefill workers, or decode workers if none of those reads images."""
        readers = [one for one in self.image_workers if one.reads_images and one.is_usable]
        return [one for one in readers if one.role is Role.PREFILL] or readers

    def not_ready(self) -> list[str]:
        """Why another gateway should get the requests. Empty if this one can serve, or if no gateway could (see ``absent``)."""
        if not self._is_told:
            return ["who the workers are is not known yet"]
        reasons: list[str] = []
        for role in (Role.DECODE,) if self.is_local_only else (Role.PREFILL, Role.DECODE):
            workers = self._staying(role)
            if workers and not any(worker.is_usable for worker in workers):
                problems = "; ".join(sorted({worker.misfit or worker.problem for worker in workers}))
                reasons.append(f"no {role} worker is up ({problems})")
        return reasons

    @property
    def public_reasons(self) -> list[str]:
        """The reasons of ``not_ready`` without what is wrong with which worker: anybody may read them."""
        return [reason.split(" (")[0] for reason in self.not_ready()]

    def _missing_roles(self) -> list[str]:
        needed = [Role.PREFILL] if self._needs_prefill_workers else []
        return [f"there is no {role} worker" for role in (*needed, Role.DECODE) if not self._staying(role)]

    def kv_in_use(self, role: Role) -> float | None:
        """The part of the role's KV blocks that is neither free nor only cached, as last reported; None without a report."""
        num_blocks = self._reported(role, lambda status: status.num_blocks)
        return 1 - self._reported(role, lambda status: status.num_free_blocks) / num_blocks if num_blocks else None

    def _reported(self, role: Role, read: Callable[[Status], int]) -> int:
        """The sum over all workers of the role that have reported."""
        return sum(read(worker.status) for worker in self._of(role).values() if worker.status is not None)

    def _staying(self, role: Role) -> list[Worker]:
        """The workers that are not retiring."""
        return [worker for worker in self._of(role).values() if not worker.is_retiring]

    def _of(self, role: Role) -> dict[str, Worker]:
        return self.prefills if role is Role.PREFILL else self.decodes

    def _let_go(self, worker: Worker) -> None:
        del self._of(worker.role)[worker.address]
        logger.info("%s is gone", worker)
        worker.abandon("it is gone")
        task = asyncio.create_task(worker.client.stop())
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    def take_stock(self) -> None:
        """Work out which workers are up, and which of them are used."""
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
                logger.error("%s is not used: %s", worker, misfit)
            worker.misfit = misfit
        self._metrics.workers_refused.set(sum(1 for worker in up if worker.misfit))
        # Computed here because each request reads them several times.
        self.cards = [worker.welcome.card for worker in up if worker.welcome is not None and not worker.misfit]
        self.limits = SharedLimits.of(self.cards) if self.cards else None
        self.absent = self._missing_roles()
        self._had_prefill_worker = self._had_prefill_worker or any(worker.role is Role.PREFILL for worker in up)
        self.on_stock_taken()
        self.changed.set()


def static_workers(prefill_addresses: Sequence[str], decode_addresses: Sequence[str]) -> list[FoundWorker]:
    """The workers of two address lists, for :meth:`WorkerPool.update`."""
    return [
        FoundWorker(role, address, model=model)
        for role, values in ((Role.PREFILL, prefill_addresses), (Role.DECODE, decode_addresses))
        for model, address in map(worker_address, values)
    ]
