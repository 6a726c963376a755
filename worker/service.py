"""The life of a request on a worker: between gateways, guides, the model thread and the hand-off. Runs on the asyncio loop.

An entry goes through these phases. Its outcome is decided once, and sent once the worker holds nothing of it any more::

    (LEASED) ──▶ COMPILING ──▶ QUEUED ─────────────────▶ RUNNING ──▶ (HANDING_OVER) ──▶ CLOSING ──▶ (gone, outcome told)
        │            │           ├──▶ (WITHDRAWING) ──▶─────┤                             ▲
        └────────────┴───────────┴───────────┴──────────────┴─────────────────────────────┘

CLOSING waits for both users of the entry's blocks: the model thread and the hand-off. An entry that has posted a removal stays
until the model thread answers. Otherwise a later attempt with the same key would get the answer.

A gateway may ask for a waiting request back (``Withdraw``). It gets the request if the model thread has not begun it. Otherwise the
request continues, and the gateway gets no answer.

Each role is a subclass that implements its side of the hand-off. Only decode workers use LEASED, only prefill workers HANDING_OVER.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from kvrelay.common.block_hash import HashChain
from kvrelay.common.images import PromptImage
from kvrelay.engine.guides.guidance import GuideCompiler
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.owners import sequence_owner
from kvrelay.engine.step.sequence import Sequence
from kvrelay.wire.messages import (
    AskImages,
    Cancel,
    FailureCode,
    Hello,
    HelloRefused,
    KeyTokens,
    Message,
    Offer,
    Role,
    Status,
    Submit,
    Welcome,
    Withdraw,
    Withdrawn,
    WorkerState,
    common_protocol,
)
from kvrelay.worker.adapters import AdapterStore
from kvrelay.worker.entries import BEGINNING, Entry, Outcome, Phase, cancelled, failed
from kvrelay.worker.images import ImageDesk
from kvrelay.worker.key_tokens import KeyTokensBoard
from kvrelay.worker.loop import ModelLoop
from kvrelay.worker.model_worker import Add, Remove, Report, TakeBack
from kvrelay.worker.preparation import Preparation
from kvrelay.worker.scheduling.suspects import Key
from kvrelay.worker.submit import (
    Refusal,
    WorkerIdentity,
    chain_of,
    guide_failed,
    images_failed,
    refusal_of,
    sequence_of,
)

logger = logging.getLogger(__name__)

COMPUTES_WRONGLY = "it computes wrongly: the answer to a known prompt is not what it was at first"

LOST_BLOCKS = "others took its KV blocks, and its images cannot be computed again here"

E = TypeVar("E", bound=Entry)


@dataclass(slots=True)
class Ports:
    """The service's connections to other parts of the worker. The code that assembles the worker fills them once."""

    send: Callable[[Role, str, Message], bool]
    loop: ModelLoop
    on_loop: Callable[..., None]  # from any thread: calls the function with the arguments on the asyncio loop
    guides: GuideCompiler
    prompt_tokens_per_s: Callable[[], float | None]  # see Status
    adapters: AdapterStore
    images: ImageDesk


class Service(ABC, Generic[E]):
    """Holds entries of type ``E``. Implements the wire's ServerHandler; asyncio loop only, never blocks."""

    role: Role
    peers: frozenset[Role]  # who may connect

    def __init__(self, identity: WorkerIdentity, blocks: BlockManager, clock: Callable[[], float]) -> None:
        self.identity = identity
        self.blocks = blocks
        self.clock = clock
        self.fingerprint = identity.card.layout.fingerprint()
        self.entries: dict[Key, E] = {}  # attempts that are not over
        self.state = WorkerState.READY
        self.wrong_since_s: float | None = None  # when the canary's answer changed
        self.has_work = asyncio.Event()  # set while there are entries; ``tick`` must then be called
        self.ports: Ports  # set by ``connect``
        self.preparation: Preparation[E]  # set by ``connect``
        self._drained = asyncio.Event()  # set when a draining worker has no entries left
        self._key_tokens = KeyTokensBoard(clock)

    def connect(self, ports: Ports) -> None:
        """Connect the service to the other parts of its worker. Called before the first message comes."""
        self.ports = ports
        self.preparation = Preparation(
            ports.guides, ports.adapters, ports.images, ports.on_loop, self.queue_if_ready, self.close
        )

    # -- what a role does ------------------------------------------------------------------------------------------

    @abstractmethod
    def entry_of(self, submit: Submit, gateway_id: str, sequence: Sequence) -> E:
        """Make the entry of an accepted request."""

    @abstractmethod
    def on_progress(self, report: Report) -> None:
        """Handle the progress that a step brought. Skip CLOSING entries: the model thread answers their removal in any case."""

    @abstractmethod
    def on_closing(self, entry: E, was_in: Phase) -> None:
        """The entry's outcome is decided. If the hand-off holds its blocks, make it release them."""

    def refusal(self, request: Submit | Offer, chain: HashChain) -> Refusal | None:
        """Why the worker does not take the request, now or ever; None if it does. ``chain``: hashes the request's blocks."""
        is_known, decodes = request.key in self.entries, self.role is Role.DECODE
        found = refusal_of(request, self.identity, self.status(), is_known=is_known, decodes=decodes)
        if found is None and isinstance(request, Submit):
            return self.ports.images.refusal(request)
        return found

    def add(self, entry: E) -> Add:
        """The command that gives the entry to the model thread. Raises ValueError if its guide forbids a token so far."""
        return Add(entry.sequence)

    def on_started(self, entry: E) -> None:
        """The entry is in its first step, which begins now."""

    def on_preempted(self, entry: E) -> None:
        """The entry has lost its blocks, and will be computed again."""

    def on_gone(self, entry: E) -> None:
        """Neither the model thread nor the hand-off uses the entry's blocks any more."""

    # -- peers: ServerHandler --------------------------------------------------------------------------------------

    def welcome(self, hello: Hello) -> Welcome | HelloRefused:
        """Accept gateways; roles override this to accept other peers."""
        if hello.role is not Role.GATEWAY:
            detail = f"a {self.role} worker takes no Hello of a {hello.role} worker"
            return HelloRefused(code=FailureCode.INVALID, detail=detail)
        self._key_tokens.join(hello.peer_id)
        return self.greeting(hello)

    def greeting(self, hello: Hello) -> Welcome:
        """This worker's Welcome, in the newest protocol that both sides speak."""
        protocol = common_protocol(hello)
        assert protocol is not None, f"the control server refuses {hello}"
        return Welcome(
            role=self.role,
            worker_id=self.identity.worker_id,
            epoch=self.identity.epoch,
            protocol=protocol,
            card=self.identity.card,
            model=self.identity.model,
        )

    def status(self) -> Status:
        """The worker's state for routing."""
        num_waiting = sum(entry.is_waiting for entry in self.entries.values())
        return Status(
            state=self.state,
            num_running=len(self.entries) - num_waiting,
            num_waiting=num_waiting,
            num_waiting_tokens=sum(entry.num_uncomputed_tokens for entry in self.entries.values()),
            num_free_blocks=self.blocks.num_allocatable // self.blocks.num_groups,
            num_blocks=self.blocks.num_blocks // self.blocks.num_groups,
            max_running=self.identity.max_running,
            prompt_tokens_per_s=self.ports.prompt_tokens_per_s(),
            adapters=self.ports.adapters.loaded,
        )

    def on_message(self, peer_id: str, role: Role, message: Message) -> None:
        """Handle a message from a peer. Messages that its role may not send are logged and ignored."""
        match role, message:
            case Role.GATEWAY, Submit():
                self._on_submit(peer_id, message)
            case Role.GATEWAY, Cancel():
                self._on_cancel(peer_id, message.key)
            case Role.GATEWAY, Withdraw():
                self._on_withdraw(peer_id, message.key)
            case Role.GATEWAY, AskImages():
                self.ports.images.answer(message, partial(self.ports.send, role, peer_id))
            case Role.GATEWAY, KeyTokens():
                self._key_tokens.take(peer_id, message, partial(self.ports.send, Role.GATEWAY))
            case _:
                logger.debug("unexpected %s of a %s", type(message).__name__, role, extra={"peer_id": peer_id})

    def on_peer_lost(self, peer_id: str, role: Role) -> None:
        """A gateway is lost: end its requests, because no client waits for them any more."""
        self._key_tokens.leave(peer_id)
        for entry in [entry for entry in self.entries.values() if entry.gateway_id == peer_id]:
            self.close(entry, cancelled(entry.key))

    def _on_submit(self, gateway_id: str, submit: Submit) -> None:
        chain = self.chain_of(submit)
        refusal = self.refusal(submit, chain)
        if refusal is not None:
            outcome = failed(submit.key, refusal.code, refusal.detail, refusal.retry_after_s)
            self.ports.send(Role.GATEWAY, gateway_id, outcome)
            return
        entry = self.entry_of(submit, gateway_id, self.sequence_of(submit, chain))
        self.take(entry, submit.images)
        self.queue_if_ready(entry)

    def _on_cancel(self, peer_id: str, key: Key) -> None:
        entry = self.entries.get(key)
        if entry is None or entry.gateway_id != peer_id:  # a gateway cannot cancel another gateway's request
            self.ports.send(Role.GATEWAY, peer_id, cancelled(key))
        else:
            self.close(entry, cancelled(key))

    def _on_withdraw(self, peer_id: str, key: Key) -> None:
        entry = self.entries.get(key)
        if entry is None or entry.gateway_id != peer_id or entry.phase is not Phase.QUEUED:
            return
        entry.advance(Phase.WITHDRAWING)
        self.ports.loop.post(TakeBack(key))

    # -- the way in ------------------------------------------------------------------------------------------------

    def chain_of(self, request: Submit | Offer) -> HashChain:
        """The hash chain of the request's blocks."""
        return chain_of(request, self.identity.card.layout.block_size, self.fingerprint)

    def sequence_of(self, request: Submit | Offer, chain: HashChain) -> Sequence:
        """A new sequence for the request, with arrival time now and no token computed."""
        return sequence_of(request, chain, self.clock(), has_whole_images=self.ports.images.takes_whole)

    def take(self, entry: E, images: Seq[PromptImage] = ()) -> None:
        """Register the entry, and ask for what it needs: ``images``, its adapter and its guide."""
        self.entries[entry.key] = entry
        self.has_work.set()
        self.preparation.begin(entry, images)

    def queue_if_ready(self, entry: E) -> None:
        """Hand the sequence to the model thread once its guide, its adapter and its images are there."""
        if entry.phase is not Phase.COMPILING or not entry.is_prepared:
            return
        try:
            add = self.add(entry)
        except ValueError as error:
            return self.close(entry, guide_failed(entry.key, str(error)))
        entry.advance(Phase.QUEUED)
        entry.model_holds = True
        self.ports.loop.post(add)

    # -- the model thread ------------------------------------------------------------------------------------------

    def on_report(self, report: Report) -> None:
        """Handle what the model thread did. Called on the asyncio loop, in order."""
        if report.computes_wrongly:
            self._on_computes_wrongly()
        for key in report.started:
            entry = self.entries[key]
            if entry.phase in BEGINNING:  # otherwise it is closing, or starts again after a preemption
                entry.advance(Phase.RUNNING)
                entry.started_s = self.clock()
                self.guarded(self.on_started, entry)
        for key in report.preempted:
            self.on_preempted(self.entries[key])
        self.on_progress(report)
        for key in report.removed:
            entry = self.entries[key]
            entry.model_holds = False
            self.finish(entry)
        for key in report.taken_back:
            entry = self.entries[key]
            if entry.phase is Phase.WITHDRAWING:  # otherwise its removal was posted, and will be answered
                entry.model_holds = False
                self.close(entry, Withdrawn(request_id=key[0], attempt=key[1]))
        for key in report.lost:
            self._end_lost(self.entries[key], failed(key, FailureCode.NO_ROOM, LOST_BLOCKS))
        for key in report.failed:
            if key in report.unreadable:
                outcome = images_failed(key, report.detail, is_invalid=True)
            else:
                outcome = failed(key, FailureCode.INTERNAL, report.detail)
            self._end_lost(self.entries[key], outcome)

    def _end_lost(self, entry: E, outcome: Outcome) -> None:
        """The model thread has given the entry up."""
        if entry.phase is not Phase.CLOSING:  # otherwise its removal was posted, and will be answered
            entry.model_holds = False
            self.close(entry, outcome)

    def _on_computes_wrongly(self) -> None:
        """Take no new requests, and send all gateways the new state at once. Pings get the same state."""
        logger.critical("%s; the process ends soon", COMPUTES_WRONGLY)
        self.state, self.wrong_since_s = WorkerState.WRONG, self.clock()
        self._drained.set()  # the remaining requests are not computed any more
        for gateway_id in self._key_tokens.gateways:
            self.ports.send(Role.GATEWAY, gateway_id, self.status())

    def guarded(self, handle: Callable[..., None], entry: E, *args: Any) -> None:
        """Call ``handle``. If it raises, for instance because a link breaks, only this entry fails; others still get their news."""
        try:
            handle(entry, *args)
        except Exception as error:
            logger.exception("what the model thread reported could not be handled", extra=entry.log_context)
            self.fail(entry, FailureCode.INTERNAL, f"the hand-off failed: {type(error).__name__}")

    # -- the end ---------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """End the entries whose deadline has passed."""
        now_s = self.clock()
        for entry in [entry for entry in self.entries.values() if entry.deadline_s <= now_s]:
            self.fail(entry, FailureCode.DEADLINE, "the request's time is up")

    async def drain(self) -> None:
        """Take no new requests, and return when no entry is left."""
        if self.state is WorkerState.READY:
            self.state = WorkerState.DRAINING
        if self.entries and self.state is WorkerState.DRAINING:
            await self._drained.wait()

    def debug(self) -> dict[str, Any]:
        """Entries for /debug/kv."""
        return {f"{key[0]}/{key[1]}": entry.debug() for key, entry in self.entries.items()}

    def fail(self, entry: E, code: FailureCode, detail: str, retry_after_s: float | None = None) -> None:
        """End the entry with an error."""
        self.close(entry, failed(entry.key, code, detail, retry_after_s))

    def close(self, entry: E, outcome: Outcome | None) -> None:
        """Decide the entry's outcome, unless it is decided. None: its gateway knows it, or learns it from another worker."""
        if entry.phase is Phase.CLOSING:
            return
        was_in = entry.phase
        entry.advance(Phase.CLOSING)
        entry.outcome, entry.closed_s = outcome, self.clock()
        if entry.model_holds:
            self.ports.loop.post(Remove(entry.key))
        self.on_closing(entry, was_in)
        self.finish(entry)

    def finish(self, entry: E) -> None:
        """Forget the entry and send its outcome, once neither the model thread nor the hand-off holds its blocks."""
        if entry.phase is Phase.CLOSING and not entry.model_holds:
            self.preparation.drop_images(entry)
        if entry.phase is not Phase.CLOSING or entry.model_holds or entry.hand_off_holds:
            return
        if self.entries.get(entry.key) is not entry:
            return  # the hand-off released the blocks during ``close``, and the entry is gone already
        del self.entries[entry.key]
        if not self.entries:
            self.has_work.clear()
            if self.state is WorkerState.DRAINING:
                self._drained.set()
        self.on_gone(entry)
        self.preparation.end(entry)
        if entry.outcome is not None:
            self.ports.send(Role.GATEWAY, entry.gateway_id, entry.outcome)

    def release(self, entry: E) -> None:
        """Release the sequence's blocks, and wake the model loop: another sequence may wait for them."""
        self.blocks.release(sequence_owner(entry.key), entry.sequence.retention)
        self.ports.loop.wake()
