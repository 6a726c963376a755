"""A decode worker's side of the hand-off: it grants a lease on blocks, verifies received blocks, and lets the sequence join.

The lease table owns the blocks of LEASED entries. The model thread's scheduler owns those of running sequences. The lease table may
report from a receiver thread; its reports are moved to the asyncio loop before anything is decided, so phases need no lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvrelay.common.block_hash import HashChain
from kvrelay.common.sampling import SampledToken
from kvrelay.decode_worker.refusals import cache_miss, images_too_large, misfit, unlikely_offset
from kvrelay.engine.beams.check import invalid_first_token
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.leased_blocks import lease_owner
from kvrelay.engine.kv.owners import Owner, sequence_owner
from kvrelay.engine.step.sequence import Sequence
from kvrelay.wire.leases.lease import VerifiedLease
from kvrelay.wire.leases.table import LeaseTable
from kvrelay.wire.messages import (
    Abort,
    Beam,
    Commit,
    Distrust,
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
    Timings,
    TokenDelta,
    Tokens,
    Verified,
    Welcome,
)
from kvrelay.worker.entries import Entry, Phase, cancelled
from kvrelay.worker.model_worker import Add, Report
from kvrelay.worker.scheduling.scheduler import Progress
from kvrelay.worker.scheduling.suspects import Key
from kvrelay.worker.service import Service
from kvrelay.worker.submit import Refusal, WorkerIdentity, guide_failed

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DataPorts:
    """The sockets where this worker receives KV blocks."""

    address: str  # address of the data socket
    token: str | None = None  # token that both sockets ask for; None: none
    shared_memory: str | None = None  # socket for senders on this host; None: they use the data socket, too


@dataclass(slots=True, eq=False, kw_only=True)
class DecodeEntry(Entry):
    """One attempt on a decode worker."""

    next_index: int  # output position of the next token to send
    unsent: list[SampledToken] = field(default_factory=list)  # the committed first token, until the next token comes
    first: SampledToken | None = None  # for a beam search that was handed over: the committed token with its candidates
    lease_id: int | None = None
    verified_s: float | None = None
    transfer_s: float | None = None
    num_cached_tokens: int | None = None
    has_sent: bool = False

    def debug(self) -> dict[str, Any]:
        """For /debug/kv."""
        return {"phase": self.phase.value, "lease_id": self.lease_id, "sent": self.next_index}

    def delta(self, new: Progress, now_s: float) -> TokenDelta:
        """The message for the gateway after a step. The attempt's first message has more fields. Marks the tokens as sent."""
        tokens = self.unsent if new.token is None else [*self.unsent, new.token]
        self.unsent = []
        timings: Timings | None = None
        num_cached_tokens: int | None = None
        prompt_logprobs: list[SampledToken] | None = None
        if not self.has_sent:
            self.has_sent = True
            prompt_logprobs = new.prompt_logprobs
            num_cached_tokens = new.num_cached_tokens if self.lease_id is None else self.num_cached_tokens
            if self.verified_s is None:
                timings = self.prefill_timings(now_s)
            else:
                timings = Timings(transfer_s=self.transfer_s, first_step_s=now_s - self.verified_s)
        delta = TokenDelta(
            request_id=self.key[0],
            attempt=self.key[1],
            index=self.next_index,
            tokens=tokens,
            finish_reason=new.finish_reason,
            num_cached_tokens=num_cached_tokens,
            timings=timings,
            prompt_logprobs=prompt_logprobs,
            beams=[Beam(tokens=list(one.tokens), finish_reason=one.finish_reason, score=one.score) for one in new.beams]
            or None,
        )
        self.next_index += len(tokens)
        return delta


def _owners_of(entry: DecodeEntry) -> set[Owner]:
    """The owners that may hold blocks for the entry: its first sequence and, until the loop hears of the hand-over, its lease."""
    lease = set() if entry.lease_id is None else {lease_owner(str(entry.lease_id))}
    return lease | {sequence_owner(entry.key)}


def _first_beam(owner: Owner) -> Owner:
    """For a later beam: the owner of its search's first sequence, as ``sequence_owner`` names both. Otherwise nobody."""
    return Owner(owner.kind, owner.key.rpartition("#")[0])


class DecodeService(Service[DecodeEntry]):
    """Implements the wire's ServerHandler, and the lease table's LeaseHandler."""

    role = Role.DECODE
    peers = frozenset({Role.GATEWAY, Role.PREFILL})
    _leases: LeaseTable
    _data: DataPorts

    def __init__(self, identity: WorkerIdentity, blocks: BlockManager, clock: Callable[[], float]) -> None:
        super().__init__(identity, blocks, clock)
        self._distrusted: set[str] = set()  # starts of prefill workers that computed wrongly: their ``peer_id``

    def attach(self, leases: LeaseTable, data: DataPorts) -> None:
        """Connect the service to the lease table and the data sockets. Called before anything starts."""
        self._leases, self._data = leases, data

    def welcome(self, hello: Hello) -> Welcome | HelloRefused:
        """Accept gateways, and prefill workers whose KV fits. Only prefill workers get the addresses for blocks."""
        if hello.role is not Role.PREFILL:
            return super().welcome(hello)
        data = self._data
        return misfit(hello, self.identity.card.layout, seals_kv=self._leases.seals_kv) or msgspec.structs.replace(
            self.greeting(hello), data_address=data.address, data_token=data.token, shared_memory=data.shared_memory
        )

    def status(self) -> Status:
        """See Service. A beam search has several places. The next blocks of running sequences do not count as free."""
        running = [entry for entry in self.entries.values() if not entry.is_waiting]
        return msgspec.structs.replace(
            super().status(),
            num_running=sum(entry.sequence.sampling.num_sequences for entry in running),
            num_arriving=sum(entry.phase is Phase.LEASED for entry in self.entries.values()),
            num_free_blocks=max(0, self.blocks.num_allocatable - self.blocks.num_promised) // self.blocks.num_groups,
        )

    def on_message(self, peer_id: str, role: Role, message: Message) -> None:
        """Handle a message from a gateway or a prefill worker."""
        match role, message:
            case Role.GATEWAY, Distrust(peer_id=source):
                self._on_distrust(source)
            case Role.PREFILL, Offer():
                self.ports.send(role, peer_id, self._on_offer(peer_id, message))
            case Role.PREFILL, Commit():
                self._on_commit(peer_id, message)
            case Role.PREFILL, Renew():
                self._leases.renew(peer_id, message)
            case Role.PREFILL, Abort():
                self._leases.abort(peer_id, message)
            case _:
                super().on_message(peer_id, role, message)

    def on_peer_lost(self, peer_id: str, role: Role) -> None:
        """End the requests of a lost gateway, or the leases of a lost prefill worker."""
        if role is Role.PREFILL:
            self._leases.abort_peer(peer_id)
        else:
            super().on_peer_lost(peer_id, role)

    def _on_distrust(self, source: str) -> None:
        """A prefill worker computed wrongly: drop its cached blocks, and end requests that use them. Gateways retry these."""
        if source in self._distrusted:
            return  # every gateway reports it
        self._distrusted.add(source)
        self._leases.abort_peer(source)
        num_blocks, owners = self.blocks.distrust(source)
        logger.warning("prefill worker %s computed wrongly: %d cached KV blocks dropped", source, num_blocks)
        # An entry knows only the first beam of its search, which may have ended. Later beams have ever higher numbers.
        owners |= {_first_beam(owner) for owner in owners}
        for entry in list(self.entries.values()):
            if not owners.isdisjoint(_owners_of(entry)):
                self.close(entry, cancelled(entry.key))  # blames no worker: this one computes correctly
        self.ports.loop.wake()  # a sequence may wait for these blocks

    # -- local prefill ---------------------------------------------------------------------------------------------

    def refusal(self, request: Submit | Offer, chain: HashChain) -> Refusal | None:
        """See Service. Also refuses a local prefill that was sent for its cached prefix, if too little of it is cached, and images
        that one step would have to compute, and cannot.
        """
        refusal = super().refusal(request, chain)
        if refusal is None and isinstance(request, Submit):
            too_large = images_too_large(request, self.identity) if self.ports.images.takes_whole else None
            return too_large or cache_miss(request, self.blocks, chain)
        return refusal

    def entry_of(self, submit: Submit | Offer, gateway_id: str, sequence: Sequence) -> DecodeEntry:
        """See Service."""
        return DecodeEntry(
            sequence=sequence,
            gateway_id=gateway_id,
            adapter=submit.adapter,
            deadline_s=sequence.deadline_s,
            next_index=sequence.num_output_tokens,
        )

    # -- grant, verify, join ---------------------------------------------------------------------------------------

    def _on_offer(self, peer_id: str, offer: Offer) -> Grant | Refuse:
        chain = self.chain_of(offer)
        why = self.refusal(offer, chain)
        if peer_id in self._distrusted:
            why = Refusal(FailureCode.INTEGRITY, f"prefill worker {peer_id} computes wrongly")
        if why is not None:
            return Refuse(
                request_id=offer.request_id,
                attempt=offer.attempt,
                code=why.code,
                detail=why.detail,
                retry_after_s=why.retry_after_s,
            )
        answer = self._leases.offer(peer_id, offer)
        if isinstance(answer, Grant):
            entry = self.entry_of(offer, offer.gateway_id, self.sequence_of(offer, chain))
            entry.phase, entry.lease_id, entry.hand_off_holds = Phase.LEASED, answer.lease_id, True
            self.blocks.came_from(lease_owner(str(answer.lease_id)), peer_id)
            self.take(entry)  # its guide compiles while the blocks are sent
        return answer

    def _on_commit(self, peer_id: str, commit: Commit) -> None:
        entry = next((entry for entry in self.entries.values() if entry.lease_id == commit.lease_id), None)
        if entry is not None:
            sampling, vocab_size = entry.sequence.sampling, self.identity.card.vocab_size
            detail = invalid_first_token(commit.first_token, sampling, vocab_size)
            detail = detail or unlikely_offset(commit.position_offset, entry.sequence, self.identity.card.max_model_len)
            if detail is not None:
                return self._leases.reject(peer_id, commit, detail)
        self._leases.commit(peer_id, commit)

    def on_lease_verified(self, lease: VerifiedLease) -> None:
        """See LeaseHandler. On any thread."""
        self.ports.on_loop(self._on_verified, lease)

    def on_lease_rejected(self, lease_id: int, peer_id: str, key: Key, code: FailureCode, detail: str) -> None:
        """See LeaseHandler. On any thread."""
        self.ports.on_loop(self._on_rejected, lease_id, peer_id, key, code, detail)

    def _on_verified(self, lease: VerifiedLease) -> None:
        """The lease's blocks become the sequence's, and the sequence is queued."""
        offer, commit = lease.offer, lease.commit
        entry = self.entries[offer.key]
        entry.hand_off_holds = False
        self.ports.send(Role.PREFILL, lease.peer_id, Verified(lease_id=lease.lease_id, epoch=self.identity.epoch))
        if entry.phase is Phase.CLOSING:  # cancelled while the last block was on its way
            self.blocks.release(lease_owner(lease.lease_key))
            self.ports.loop.wake()  # a sequence may wait for these blocks
            self.finish(entry)
            return
        entry.advance(Phase.COMPILING)
        self.blocks.hand_on(lease_owner(lease.lease_key), sequence_owner(entry.key))
        entry.verified_s, entry.transfer_s = self.clock(), lease.transfer_s
        entry.num_cached_tokens = min(commit.num_cached_tokens, offer.num_prompt_tokens)
        sequence = entry.sequence
        if offer.sampling.beam_search is None:
            entry.unsent.append(commit.first_token)
            sequence.token_ids.append(commit.first_token.token_id)
        else:  # the search chooses its first tokens itself
            entry.first = commit.first_token
        sequence.sampling = offer.sampling.after_prefill()
        sequence.block_tables = lease.block_tables
        sequence.chain, sequence.num_computed_tokens = lease.chain, len(offer.token_ids)
        sequence.position_offset = commit.position_offset
        self.queue_if_ready(entry)

    def _on_rejected(self, lease_id: int, peer_id: str, key: Key, code: FailureCode, detail: str) -> None:
        """Tell the prefill worker, which tells the gateway, and forget the entry."""
        reject = Reject(lease_id=lease_id, epoch=self.identity.epoch, code=code, detail=detail)
        self.ports.send(Role.PREFILL, peer_id, reject)
        self.ports.loop.wake()  # a sequence may wait for these blocks
        entry = self.entries.get(key)
        if entry is not None and entry.lease_id == lease_id:
            entry.hand_off_holds = False
            self.close(entry, None)
            self.finish(entry)

    def add(self, entry: DecodeEntry) -> Add:
        """See Service. The guide first takes the first token, which came from the prefill worker."""
        if (guide := entry.sequence.guide) is not None:
            try:
                for token in entry.unsent:
                    guide.accept(token.token_id)
            except ValueError as error:
                raise ValueError(f"the first token: {error}") from error
        return Add(entry.sequence, entry.first)

    def on_closing(self, entry: DecodeEntry, was_in: Phase) -> None:
        """See Service. Also releases blocks that a verified sequence has before the model thread knows it."""
        if entry.hand_off_holds:
            # ``on_lease_rejected`` follows, or ``on_lease_verified`` if the last block was faster.
            outcome = entry.outcome
            reason = (outcome.code, outcome.detail) if isinstance(outcome, Failed) else ()
            self._leases.cancel(*entry.key, *reason)
        elif was_in is Phase.COMPILING:
            self.release(entry)

    # -- the output ------------------------------------------------------------------------------------------------

    def on_progress(self, report: Report) -> None:
        """Send all new tokens of a step, one message per gateway. What may fill half a message gets one of its own."""
        now_s = self.clock()
        by_gateway: dict[str, list[TokenDelta]] = {}
        for new in report.progress:
            entry = self.entries[new.key]
            if entry.phase is Phase.CLOSING:
                continue
            entry.model_holds = new.failure is None and new.finish_reason is None  # else its blocks go back
            if new.failure is not None:
                self.close(entry, guide_failed(entry.key, new.failure))
                continue
            delta = entry.delta(new, now_s)
            if delta.beams is not None or delta.prompt_logprobs is not None:
                self._tell(entry.gateway_id, by_gateway.pop(entry.gateway_id, []))
                self._tell(entry.gateway_id, [delta])
            else:
                by_gateway.setdefault(entry.gateway_id, []).append(delta)
            if new.finish_reason is not None:
                self.close(entry, None)
        for gateway_id, items in by_gateway.items():
            self._tell(gateway_id, items)

    def _tell(self, gateway_id: str, items: list[TokenDelta]) -> None:
        if items and not self.ports.send(Role.GATEWAY, gateway_id, Tokens(items=items)):
            self._on_unheard(items)

    def on_preempted(self, entry: DecodeEntry) -> None:
        """Tell the gateway, which may continue the request elsewhere. Not for a beam search, which would start again there."""
        if entry.phase is not Phase.CLOSING and entry.sequence.sampling.beam_search is None:
            preempted = Preempted(request_id=entry.key[0], attempt=entry.key[1])
            self.ports.send(Role.GATEWAY, entry.gateway_id, preempted)

    def _on_unheard(self, items: list[TokenDelta]) -> None:
        """The gateway is gone or reads nothing. Fail the requests, because their streams have lost these tokens."""
        for item in items:
            entry = self.entries.get((item.request_id, item.attempt))
            if entry is not None:
                self.fail(entry, FailureCode.PEER_LOST, "the gateway takes no more messages")
