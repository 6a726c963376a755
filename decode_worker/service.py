"""The decode worker's life of a request, on the asyncio loop: gateways, prefill workers, leases and the model thread.

An entry goes through these phases; its outcome is decided once and told once, when its blocks are back::

    LEASED ──verified──▶ RUNNING ──▶ CLOSING ──▶ (gone, outcome told)
       └────────────────────────────▲
    (local prefill starts at RUNNING)

LEASED blocks belong to the lease table, RUNNING ones to the model thread's scheduler. What the lease table says may come
from the receiver thread; it is brought to the asyncio loop before anything is decided, so phases need no lock. An entry that asked
for its sequence's removal stays until that is answered, whatever comes before: no later attempt of that name may get the answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvrelay.decode_worker.entries import Entry, Phase
from kvrelay.decode_worker.model_worker import Add, Command, NewToken, Remove, Report
from kvrelay.decode_worker.welcome import welcome
from kvrelay.engine.block_manager import BlockManager, Owner, OwnerKind, sequence_owner
from kvrelay.engine.loop import ModelLoop
from kvrelay.engine.sequence import Sequence
from kvrelay.wire.lease import VerifiedLease
from kvrelay.wire.leases import LeaseTable
from kvrelay.wire.messages import (
    Abort,
    Aborted,
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
    Refuse,
    Reject,
    Renew,
    Role,
    Status,
    Submit,
    Timings,
    TokenDelta,
    Tokens,
    Verified,
    Welcome,
    WorkerState,
)
from kvrelay.wire.submit import WorkerIdentity, deadline_of, invalid_submit, is_late, submit_refusal

logger = logging.getLogger(__name__)

Key = tuple[str, int]


@dataclass(slots=True)
class Ports:
    """What the service speaks through; filled once by whoever assembles the worker."""

    send: Callable[[str, Message], bool]
    loop: ModelLoop[Command]
    leases: LeaseTable
    data_address: str
    data_token: str | None = None  # what the data socket lets connections in by; None: all


def lease_owner(lease_key: str) -> Owner:
    """The block owner of a lease."""
    return Owner(OwnerKind.LEASE, lease_key)


class DecodeService:
    """Implements the wire's ServerHandler; asyncio loop only, never blocks."""

    def __init__(self, identity: WorkerIdentity, blocks: BlockManager, clock: Callable[[], float]) -> None:
        self._identity = identity
        self._blocks = blocks
        self._clock = clock
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
        return welcome(
            hello, self._identity, ports.data_address, seals_kv=ports.leases.seals_kv, data_token=ports.data_token
        )

    def status(self) -> Status:
        """What routing sees."""
        num_leased = sum(1 for entry in self._entries.values() if entry.phase is Phase.LEASED)
        num_waiting = sum(
            1 for entry in self._entries.values() if entry.phase is Phase.RUNNING and entry.started_s is None
        )
        return Status(
            state=self.state,
            num_running=len(self._entries) - num_waiting - num_leased,
            num_waiting=num_waiting + num_leased,
            num_waiting_tokens=sum(
                entry.num_prompt_tokens
                for entry in self._entries.values()
                if entry.phase is Phase.RUNNING and entry.started_s is None and entry.lease_id is None
            ),
            num_free_blocks=self._blocks.num_allocatable,
            num_blocks=self._blocks.num_blocks,
            max_running=self._identity.max_running,
        )

    def on_message(self, peer_id: str, role: Role, message: Message) -> None:
        """A message from a gateway or a prefill worker."""
        leases = self.ports.leases
        match message:
            case Submit():
                self._on_submit(peer_id, message)
            case Cancel(request_id=request_id, attempt=attempt):
                self._on_cancel(peer_id, (request_id, attempt))
            case Offer():
                self.ports.send(peer_id, self._on_offer(peer_id, message))
            case Commit():
                self._on_commit(peer_id, message)
            case Renew():
                leases.renew(peer_id, message)
            case Abort(lease_id=lease_id, epoch=epoch):
                leases.abort(peer_id, message)
                self.ports.send(peer_id, Aborted(lease_id=lease_id, epoch=epoch))
            case _:
                logger.debug("unexpected %s", type(message).__name__, extra={"peer_id": peer_id})

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
        if refusal is not None:
            self.ports.send(gateway_id, refusal)
            return
        now_s = self._clock()
        self._entries[key] = Entry(
            key=key,
            gateway_id=gateway_id,
            phase=Phase.RUNNING,
            next_index=len(submit.token_ids) - submit.num_prompt_tokens,
            arrival_s=now_s,
            num_prompt_tokens=submit.num_prompt_tokens,
            deadline_s=deadline_of(submit, now_s),
        )
        sequence = Sequence(
            request_id=submit.request_id,
            attempt=submit.attempt,
            token_ids=list(submit.token_ids),
            num_prompt_tokens=submit.num_prompt_tokens,
            sampling=submit.sampling,
            arrival_s=now_s,
        )
        self.ports.loop.post(Add(sequence))

    def _on_cancel(self, peer_id: str, key: Key) -> None:
        entry = self._entries.get(key)
        if entry is None or entry.gateway_id != peer_id:  # nobody takes back what another gateway asked for
            self.ports.send(peer_id, Cancelled(request_id=key[0], attempt=key[1]))
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
        if (invalid := invalid_submit(offer, self._identity.card)) is not None:
            return refuse(FailureCode.INVALID, invalid)
        if is_late(offer):
            return refuse(FailureCode.DEADLINE, f"came with {offer.timeout_s} s left: nobody waits for it any more")
        if (num_waiting := self.status().num_waiting) >= self._identity.max_waiting:
            return refuse(FailureCode.QUEUE_FULL, f"{num_waiting} sequences wait already", retry_after_s=1.0)
        answer = self.ports.leases.offer(peer_id, offer)
        if isinstance(answer, Grant):
            now_s = self._clock()
            self._entries[key] = Entry(
                key=key,
                gateway_id=offer.gateway_id,
                phase=Phase.LEASED,
                next_index=len(offer.token_ids) - offer.num_prompt_tokens,
                arrival_s=now_s,
                num_prompt_tokens=offer.num_prompt_tokens,
                deadline_s=deadline_of(offer, now_s),
                lease_id=answer.lease_id,
            )
        return answer

    def _on_commit(self, peer_id: str, commit: Commit) -> None:
        token_id, vocab_size = commit.first_token.token_id, self._identity.card.vocab_size
        if 0 <= token_id < vocab_size:
            self.ports.leases.commit(peer_id, commit)
        else:
            detail = f"the first token is {token_id}; it must be 0 to {vocab_size - 1}"
            self.ports.leases.reject(peer_id, commit.lease_id, commit.epoch, detail)

    def on_lease_verified(self, lease: VerifiedLease) -> None:
        """Every block proved right. The lease table no longer touches the blocks; they become the sequence's."""
        offer, commit = lease.offer, lease.commit
        key = (offer.request_id, offer.attempt)
        entry = self._entries[key]
        self.ports.send(lease.peer_id, Verified(lease_id=lease.lease_id, epoch=self._identity.epoch))
        if entry.phase is Phase.CLOSING:  # cancelled while the last block was on its way
            self._blocks.release(lease_owner(lease.lease_key))
            self.ports.loop.wake()  # a sequence may have waited for these blocks
            self._tell_and_forget(entry)
            return
        entry.advance(Phase.RUNNING)
        entry.verified_s = self._clock()
        entry.transfer_s = lease.transfer_s
        entry.num_cached_tokens = commit.num_cached_tokens
        entry.unsent.append(commit.first_token)
        sequence = Sequence(
            request_id=offer.request_id,
            attempt=offer.attempt,
            token_ids=[*offer.token_ids, commit.first_token.token_id],
            num_prompt_tokens=offer.num_prompt_tokens,
            sampling=offer.sampling,
            arrival_s=entry.arrival_s,
            block_table=list(lease.block_ids),
            num_computed_tokens=len(offer.token_ids),
        )
        block_size = self._identity.card.layout.block_size
        sequence.block_hashes = offer.block_hashes[: len(offer.token_ids) // block_size]
        self._blocks.hand_on(lease_owner(lease.lease_key), sequence_owner(key))
        self.ports.loop.post(Add(sequence))

    def on_lease_rejected(self, lease_id: int, peer_id: str, key: Key, code: FailureCode, detail: str) -> None:
        """A lease ended without a sequence; its blocks are back. The prefill worker tells the gateway."""
        self.ports.send(peer_id, Reject(lease_id=lease_id, epoch=self._identity.epoch, code=code, detail=detail))
        self.ports.loop.wake()  # a sequence may have waited for these blocks
        entry = self._entries.get(key)
        if entry is not None and entry.lease_id == lease_id:
            if entry.phase is Phase.LEASED:
                entry.advance(Phase.CLOSING)
            self._tell_and_forget(entry)

    # -- the model thread ------------------------------------------------------------------------------------------

    def on_report(self, report: Report) -> None:
        """What the model thread did; called on the asyncio loop, in order."""
        now_s = self._clock()
        for key in report.started:
            if (entry := self._entries.get(key)) is not None and entry.started_s is None:
                entry.started_s = now_s
        by_gateway: dict[str, list[TokenDelta]] = {}
        for new in report.tokens:
            entry = self._entries[new.key]
            if entry.phase is Phase.CLOSING:
                continue  # its removal is asked for, and answered in any case
            by_gateway.setdefault(entry.gateway_id, []).append(self._delta(entry, new, now_s))
            if new.finish_reason is not None:
                self._tell_and_forget(entry)  # the scheduler has released the blocks already
        for gateway_id, items in by_gateway.items():
            if not self.ports.send(gateway_id, Tokens(items=items)):
                self._on_unheard(items)
        for key in report.removed:
            self._tell_and_forget(self._entries[key])
        for key in report.failed:
            entry = self._entries[key]
            if entry.phase is Phase.RUNNING:
                entry.advance(Phase.CLOSING)
                entry.outcome = Failed(
                    request_id=key[0], attempt=key[1], code=FailureCode.INTERNAL, detail=report.detail
                )
                self._tell_and_forget(entry)

    def _on_unheard(self, items: list[TokenDelta]) -> None:
        """These tokens reached nobody: the gateway is gone, or reads nothing. Without them the rest is worthless."""
        for item in items:
            entry = self._entries.get((item.request_id, item.attempt))
            if entry is not None:
                detail = "the gateway takes no more messages"
                code = FailureCode.PEER_LOST
                failed = Failed(request_id=item.request_id, attempt=item.attempt, code=code, detail=detail)
                self._close(entry, failed)

    def _delta(self, entry: Entry, new: NewToken, now_s: float) -> TokenDelta:
        tokens = [*entry.unsent, new.token]
        entry.unsent.clear()
        timings: Timings | None = None
        num_cached_tokens: int | None = None
        if not entry.has_sent:
            entry.has_sent = True
            num_cached_tokens = new.num_cached_tokens if entry.lease_id is None else entry.num_cached_tokens
            started_s = now_s if entry.started_s is None else entry.started_s
            if entry.verified_s is None:
                timings = Timings(queue_s=started_s - entry.arrival_s, prefill_s=now_s - started_s)
            else:
                timings = Timings(transfer_s=entry.transfer_s, first_step_s=now_s - entry.verified_s)
        delta = TokenDelta(
            request_id=entry.key[0],
            attempt=entry.key[1],
            index=entry.next_index,
            tokens=tokens,
            finish_reason=new.finish_reason,
            num_cached_tokens=num_cached_tokens,
            timings=timings,
        )
        entry.next_index += len(tokens)
        return delta

    # -- the end ---------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """End what is out of time."""
        now_s = self._clock()
        for entry in [entry for entry in self._entries.values() if entry.deadline_s <= now_s]:
            request_id, attempt = entry.key
            detail = "the request's time is up"
            self._close(entry, Failed(request_id=request_id, attempt=attempt, code=FailureCode.DEADLINE, detail=detail))

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
        was_leased = entry.phase is Phase.LEASED
        entry.advance(Phase.CLOSING)
        entry.outcome = outcome
        if was_leased:
            # Answered by on_lease_rejected, or by on_lease_verified if the last block won the race.
            reason = (outcome.code, outcome.detail) if isinstance(outcome, Failed) else ()
            self.ports.leases.cancel(*entry.key, *reason)
        else:
            self.ports.loop.post(Remove(entry.key))

    def _tell_and_forget(self, entry: Entry) -> None:
        del self._entries[entry.key]
        if self.state is WorkerState.DRAINING and not self._entries:
            self._drained.set()
        if entry.outcome is not None:
            self.ports.send(entry.gateway_id, entry.outcome)
