"""The decode worker's life of a request, on the asyncio loop: gateways, prefill workers, leases and the model thread.

An entry goes through these phases; its outcome is decided once and told once, when its blocks are back::

    LEASED ──verified──▶ COMPILING ──▶ RUNNING ──▶ CLOSING ──▶ (gone, outcome told)
       └─────────────────────┴───────────────────────▲
    (local prefill starts at COMPILING; who has no guide, or a compiled one, is through with that at once)

LEASED blocks belong to the lease table, RUNNING ones to the model thread's scheduler. What the lease table says may come
from the receiver thread; it is brought to the asyncio loop before anything is decided, so phases need no lock. An entry that asked
for its sequence's removal stays until that is answered, whatever comes before: no later attempt of that name may get the answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from kvrelay.common.block_hash import HashChain
from kvrelay.decode_worker.cache_check import cache_miss
from kvrelay.decode_worker.entries import Entry, Phase
from kvrelay.decode_worker.model_worker import Add, Remove, Report
from kvrelay.decode_worker.ports import Ports
from kvrelay.decode_worker.welcome import welcome
from kvrelay.engine.guides.guidance import GuideRefusal, GuideResult
from kvrelay.engine.kv.block_manager import BlockManager, Owner, OwnerKind, sequence_owner
from kvrelay.engine.step.sequence import Sequence
from kvrelay.wire.leases.lease import VerifiedLease
from kvrelay.wire.messages import (
    Abort,
    Cancel,
    Cancelled,
    Commit,
    Failed,
    FailureCode,
    Grant,
    Hello,
    HelloRefused,
    Message,
    Offer,
    Preempted,
    Refuse,
    Reject,
    Renew,
    Role,
    Status,
    Submit,
    TokenDelta,
    Tokens,
    Verified,
    Welcome,
    WorkerState,
)
from kvrelay.worker.beam_check import invalid_first_token, unfit_beams
from kvrelay.worker.submit import WorkerIdentity, deadline_of, guide_failed, invalid_submit, is_late, submit_refusal

logger = logging.getLogger(__name__)

Key = tuple[str, int]


def lease_owner(lease_key: str) -> Owner:
    """The block owner of a lease."""
    return Owner(OwnerKind.LEASE, lease_key)


class DecodeService:
    """Implements the wire's ServerHandler; asyncio loop only, never blocks."""

    def __init__(self, identity: WorkerIdentity, blocks: BlockManager, clock: Callable[[], float]) -> None:
        self._identity = identity
        self._blocks = blocks
        self._clock = clock
        self._fingerprint = identity.card.layout.fingerprint()
        self._entries: dict[Key, Entry] = {}
        self.state = WorkerState.READY
        self._drained = asyncio.Event()  # draining, and the last entry is gone
        self._ports: Ports | None = None

    def attach(self, ports: Ports) -> None:
        """Connect the service to its sockets and its model loop, before anything starts."""
        self._ports = ports

    @property
    def ports(self) -> Ports:
        """The connected ports."""
        assert self._ports is not None, "attach() comes before the first message"
        return self._ports

    @property
    def num_entries(self) -> int:
        """Attempts that are not over."""
        return len(self._entries)

    # -- peers: ServerHandler --------------------------------------------------------------------------------------

    def welcome(self, hello: Hello) -> Welcome | HelloRefused:
        """Gateways, and prefill workers whose KV fits."""
        ports = self.ports
        return welcome(hello, self._identity, ports.data, seals_kv=ports.leases.seals_kv)

    def status(self) -> Status:
        """What routing sees."""
        waiting = [entry for entry in self._entries.values() if entry.is_waiting]
        return Status(
            state=self.state,
            num_running=sum(one.sampling.num_sequences for one in self._entries.values() if not one.is_waiting),
            num_waiting=len(waiting),
            num_waiting_tokens=sum(entry.num_prompt_tokens for entry in waiting if entry.lease_id is None),
            num_free_blocks=max(0, self._blocks.num_allocatable - self._blocks.num_promised),
            num_blocks=self._blocks.num_blocks,
            max_running=self._identity.max_running,
        )

    def on_message(self, peer_id: str, role: Role, message: Message) -> None:
        """A message from a gateway or a prefill worker. What the other role says counts for nothing."""
        leases = self.ports.leases
        match role, message:
            case Role.GATEWAY, Submit():
                self._on_submit(peer_id, message)
            case Role.GATEWAY, Cancel(request_id=request_id, attempt=attempt):
                self._on_cancel(peer_id, (request_id, attempt))
            case Role.PREFILL, Offer():
                self.ports.send(role, peer_id, self._on_offer(peer_id, message))
            case Role.PREFILL, Commit():
                self._on_commit(peer_id, message)
            case Role.PREFILL, Renew():
                leases.renew(peer_id, message)
            case Role.PREFILL, Abort():
                leases.abort(peer_id, message)
            case _:
                logger.debug("unexpected %s of a %s", type(message).__name__, role, extra={"peer_id": peer_id})

    def on_peer_lost(self, peer_id: str, role: Role) -> None:
        """A gateway's requests have no reader any more; a prefill worker's hand-offs no writer."""
        if role is Role.PREFILL:
            self.ports.leases.abort_peer(peer_id)
            return
        for entry in [entry for entry in self._entries.values() if entry.gateway_id == peer_id]:
            self._close(entry, Cancelled(request_id=entry.key[0], attempt=entry.key[1]))

    def _on_submit(self, gateway_id: str, submit: Submit) -> None:
        key = (submit.request_id, submit.attempt)
        refusal = submit_refusal(submit, self._identity, self.status(), is_known=key in self._entries)
        chain = HashChain(self._fingerprint, self._identity.card.layout.block_size, cache_salt=submit.cache_salt)
        refusal = refusal or cache_miss(submit, self._blocks, chain)
        if refusal is not None:
            self.ports.send(Role.GATEWAY, gateway_id, refusal)
            return
        now_s = self._clock()
        entry = self._entries[key] = Entry(
            key=key,
            gateway_id=gateway_id,
            phase=Phase.COMPILING,
            next_index=len(submit.token_ids) - submit.num_prompt_tokens,
            arrival_s=now_s,
            num_prompt_tokens=submit.num_prompt_tokens,
            sampling=submit.sampling,
            deadline_s=deadline_of(submit, now_s),
        )
        sequence = Sequence(
            request_id=submit.request_id,
            attempt=submit.attempt,
            token_ids=list(submit.token_ids),
            num_prompt_tokens=submit.num_prompt_tokens,
            sampling=submit.sampling,
            arrival_s=now_s,
            retention=submit.retention,
            chain=chain,
        )
        entry.waiting = Add(sequence)
        self._compile(entry, submit)
        self._run_if_ready(entry)

    def _on_cancel(self, peer_id: str, key: Key) -> None:
        entry = self._entries.get(key)
        if entry is None or entry.gateway_id != peer_id:  # nobody takes back what another gateway asked for
            self.ports.send(Role.GATEWAY, peer_id, Cancelled(request_id=key[0], attempt=key[1]))
        else:
            self._close(entry, Cancelled(request_id=key[0], attempt=key[1]))

    # -- the hand-off ----------------------------------------------------------------------------------------------

    def _on_offer(self, peer_id: str, offer: Offer) -> Grant | Refuse:
        key = (offer.request_id, offer.attempt)

        def refuse(code: FailureCode, detail: str, retry_after_s: float | None = None) -> Refuse:
            return Refuse(request_id=key[0], attempt=key[1], code=code, detail=detail, retry_after_s=retry_after_s)

        if self.state is WorkerState.DRAINING:
            return refuse(FailureCode.DRAINING, f"decode worker {self._identity.worker_id} is shutting down")
        if key in self._entries:
            return refuse(FailureCode.INVALID, f"attempt {key[1]} of request {key[0]} is already here")
        # The prefill worker has checked it against its own limits. A step that breaks on one sequence ends all in the batch.
        card = self._identity.card
        invalid = invalid_submit(offer, card) or unfit_beams(offer, card, self._identity.max_running)
        if invalid is not None:
            return refuse(FailureCode.INVALID, invalid)
        if is_late(offer):
            return refuse(FailureCode.DEADLINE, f"came with {offer.timeout_s} s left: nobody waits for it any more")
        if (num_waiting := self.status().num_waiting) >= self._identity.max_waiting:
            return refuse(FailureCode.QUEUE_FULL, f"{num_waiting} sequences wait already", retry_after_s=1.0)
        answer = self.ports.leases.offer(peer_id, offer)
        if isinstance(answer, Grant):
            now_s = self._clock()
            entry = self._entries[key] = Entry(
                key=key,
                gateway_id=offer.gateway_id,
                phase=Phase.LEASED,
                next_index=len(offer.token_ids) - offer.num_prompt_tokens,
                arrival_s=now_s,
                num_prompt_tokens=offer.num_prompt_tokens,
                sampling=offer.sampling,
                deadline_s=deadline_of(offer, now_s),
                lease_id=answer.lease_id,
            )
            self._compile(entry, offer)
        return answer

    def _on_commit(self, peer_id: str, commit: Commit) -> None:
        entry = next((entry for entry in self._entries.values() if entry.lease_id == commit.lease_id), None)
        vocab_size = self._identity.card.vocab_size
        detail = None if entry is None else invalid_first_token(commit.first_token, entry.sampling, vocab_size)
        if detail is None:
            self.ports.leases.commit(peer_id, commit)
        else:
            self.ports.leases.reject(peer_id, commit.lease_id, commit.epoch, detail)

    def on_lease_verified(self, lease: VerifiedLease) -> None:
        """Every block proved right. The lease table no longer touches the blocks; they become the sequence's."""
        offer, commit = lease.offer, lease.commit
        key = (offer.request_id, offer.attempt)
        entry = self._entries[key]
        self.ports.send(Role.PREFILL, lease.peer_id, Verified(lease_id=lease.lease_id, epoch=self._identity.epoch))
        if entry.phase is Phase.CLOSING:  # cancelled while the last block was on its way
            self._blocks.release(lease_owner(lease.lease_key))
            self.ports.loop.wake()  # a sequence may have waited for these blocks
            self._tell_and_forget(entry)
            return
        entry.advance(Phase.COMPILING)
        entry.verified_s = self._clock()
        entry.transfer_s = lease.transfer_s
        entry.num_cached_tokens = min(commit.num_cached_tokens, offer.num_prompt_tokens)
        is_search = offer.sampling.beam_search is not None  # its first tokens are still to be chosen
        first = [] if is_search else [commit.first_token]
        entry.unsent += first
        sequence = Sequence(
            request_id=offer.request_id,
            attempt=offer.attempt,
            token_ids=[*offer.token_ids, *(token.token_id for token in first)],
            num_prompt_tokens=offer.num_prompt_tokens,
            sampling=offer.sampling.after_prefill(),
            arrival_s=entry.arrival_s,
            block_table=list(lease.block_ids),
            num_computed_tokens=len(offer.token_ids),
            retention=offer.retention,
            chain=lease.chain,
        )
        self._blocks.hand_on(lease_owner(lease.lease_key), sequence_owner(key))
        entry.waiting = Add(sequence, commit.first_token if is_search else None)
        self._run_if_ready(entry)

    def on_lease_rejected(self, lease_id: int, peer_id: str, key: Key, code: FailureCode, detail: str) -> None:
        """A lease ended without a sequence; its blocks are back. The prefill worker tells the gateway."""
        reject = Reject(lease_id=lease_id, epoch=self._identity.epoch, code=code, detail=detail)
        self.ports.send(Role.PREFILL, peer_id, reject)
        self.ports.loop.wake()  # a sequence may have waited for these blocks
        entry = self._entries.get(key)
        if entry is not None and entry.lease_id == lease_id:
            if entry.phase is Phase.LEASED:
                entry.advance(Phase.CLOSING)
            self._tell_and_forget(entry)

    # -- guides ----------------------------------------------------------------------------------------------------

    def _compile(self, entry: Entry, request: Submit | Offer) -> None:
        """Ask for the guide's state behind the output so far; blocks travel meanwhile."""
        if entry.sampling.guide is not None:
            output = request.token_ids[request.num_prompt_tokens :]
            self.ports.guides.start(entry.sampling, output, partial(self._on_guide, entry))

    def _on_guide(self, entry: Entry, result: GuideResult) -> None:
        if entry.phase not in {Phase.LEASED, Phase.COMPILING}:
            return  # it came to its end meanwhile
        if isinstance(result, GuideRefusal):
            self._close(entry, guide_failed(entry.key, result.detail, is_invalid=result.is_invalid))
        else:
            entry.guide = result
            self._run_if_ready(entry)

    def _run_if_ready(self, entry: Entry) -> None:
        """Hand the sequence to the model thread if it is there, and its guide."""
        is_guided = entry.sampling.guide is not None
        if entry.phase is not Phase.COMPILING or entry.waiting is None or (is_guided and entry.guide is None):
            return
        sequence, sequence.guide = entry.waiting.sequence, entry.guide
        if sequence.guide is not None:
            try:
                for token in entry.unsent:  # the first one came from the prefill worker
                    sequence.guide.accept(token.token_id)
            except ValueError as error:
                return self._close(entry, guide_failed(entry.key, f"the first token: {error}"))
        entry.advance(Phase.RUNNING)
        self.ports.loop.post(entry.waiting)

    # -- the model thread ------------------------------------------------------------------------------------------

    def on_report(self, report: Report) -> None:
        """What the model thread did; called on the asyncio loop, in order."""
        now_s = self._clock()
        for key in report.started:
            if (entry := self._entries.get(key)) is not None and entry.started_s is None:
                entry.started_s = now_s
        for key in report.preempted:
            self._tell_preempted(self._entries[key])
        by_gateway: dict[str, list[TokenDelta]] = {}
        for new in report.tokens:
            entry = self._entries[new.key]
            if entry.phase is Phase.CLOSING:
                continue  # its removal is asked for, and answered in any case
            if new.failure is not None:
                self._end_failed(entry, guide_failed(entry.key, new.failure))
                continue
            by_gateway.setdefault(entry.gateway_id, []).append(entry.delta(new, now_s))
            if new.finish_reason is not None:
                self._tell_and_forget(entry)  # its blocks are back, or are so with the step under way
        for gateway_id, items in by_gateway.items():
            if not self.ports.send(Role.GATEWAY, gateway_id, Tokens(items=items)):
                self._on_unheard(items)
        for key in report.removed:
            self._tell_and_forget(self._entries[key])
        for key in report.failed:
            entry = self._entries[key]
            if entry.phase is Phase.RUNNING:
                self._end_failed(entry, _failed(entry.key, FailureCode.INTERNAL, report.detail))

    def _tell_preempted(self, entry: Entry) -> None:
        if entry.phase is Phase.RUNNING and entry.sampling.beam_search is None:  # a search would begin anew elsewhere
            preempted = Preempted(request_id=entry.key[0], attempt=entry.key[1])
            self.ports.send(Role.GATEWAY, entry.gateway_id, preempted)

    def _end_failed(self, entry: Entry, outcome: Failed) -> None:
        """The model thread has ended it and released its blocks."""
        entry.advance(Phase.CLOSING)
        entry.outcome = outcome
        self._tell_and_forget(entry)

    def _on_unheard(self, items: list[TokenDelta]) -> None:
        """These tokens reached nobody: the gateway is gone, or reads nothing. Without them the rest is worthless."""
        for item in items:
            entry = self._entries.get((item.request_id, item.attempt))
            if entry is not None:
                self._close(entry, _failed(entry.key, FailureCode.PEER_LOST, "the gateway takes no more messages"))

    # -- the end ---------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """End what is out of time."""
        now_s = self._clock()
        for entry in [entry for entry in self._entries.values() if entry.deadline_s <= now_s]:
            self._close(entry, _failed(entry.key, FailureCode.DEADLINE, "the request's time is up"))

    async def drain(self) -> None:
        """Take nothing new; return when nothing is left."""
        self.state = WorkerState.DRAINING
        if self._entries:
            await self._drained.wait()

    def debug(self) -> dict[str, Any]:
        """Entries for /debug/kv."""
        return {
            f"{key[0]}/{key[1]}": {"phase": entry.phase.value, "lease_id": entry.lease_id, "sent": entry.next_index}
            for key, entry in self._entries.items()
        }

    def _close(self, entry: Entry, outcome: Failed | Cancelled) -> None:
        if entry.phase is Phase.CLOSING:
            return
        was_in = entry.phase
        entry.advance(Phase.CLOSING)
        entry.outcome = outcome
        if was_in is Phase.LEASED:
            # Answered by on_lease_rejected, or by on_lease_verified if the last block won the race.
            reason = (outcome.code, outcome.detail) if isinstance(outcome, Failed) else ()
            self.ports.leases.cancel(*entry.key, *reason)
        elif was_in is Phase.COMPILING:  # the model thread has never heard of it
            self._blocks.release(sequence_owner(entry.key))
            self.ports.loop.wake()  # a sequence may have waited for these blocks
            self._tell_and_forget(entry)
        else:
            self.ports.loop.post(Remove(entry.key))

    def _tell_and_forget(self, entry: Entry) -> None:
        del self._entries[entry.key]
        if self.state is WorkerState.DRAINING and not self._entries:
            self._drained.set()
        if entry.outcome is not None:
            self.ports.send(Role.GATEWAY, entry.gateway_id, entry.outcome)


def _failed(key: Key, code: FailureCode, detail: str) -> Failed:
    return Failed(request_id=key[0], attempt=key[1], code=code, detail=detail)
