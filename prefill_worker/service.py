"""The prefill worker's life of a request, on the asyncio loop: between gateways, the model thread and decode workers.

An entry goes through these phases; its outcome is decided once and told once, when nothing of it is left::

    COMPILING ──▶ QUEUED ──▶ COMPUTING ──▶ HANDING_OVER ──▶ CLOSING ──▶ (gone, outcome told)
        └────────────┴───────────┴──────────────────────────▲
    (who has no guide is through with COMPILING at once)

CLOSING waits for both users of the entry's blocks: the model thread and the sends in flight. Only when neither can touch
them are they released. An entry that asked for its prompt's removal stays until that is answered, whatever comes before: the next
attempt of that name must not get the answer.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from kvrelay.common.block_hash import HashChain
from kvrelay.common.sampling import SampledToken
from kvrelay.engine.guides.guidance import GuideRefusal, GuideResult
from kvrelay.engine.kv.block_manager import BlockManager, sequence_owner
from kvrelay.engine.step.sequence import Sequence
from kvrelay.prefill_worker.entries import Entry, Outcome, Phase
from kvrelay.prefill_worker.model_worker import Add, Remove, Report
from kvrelay.prefill_worker.ports import Ports
from kvrelay.prefill_worker.scheduler import Computed
from kvrelay.prefill_worker.speed import Speed
from kvrelay.wire.messages import (
    PROTOCOL_MAX,
    Cancel,
    Cancelled,
    Failed,
    FailureCode,
    HandedOver,
    Hello,
    HelloRefused,
    Message,
    Offer,
    Role,
    Status,
    Submit,
    Timings,
    TokenDelta,
    Tokens,
    Welcome,
    WorkerState,
)
from kvrelay.wire.transfers import DecodeLink
from kvrelay.worker.submit import WorkerIdentity, deadline_of, guide_failed, submit_refusal

logger = logging.getLogger(__name__)

_SEND_TIMEOUT_S = 5.0  # for what ZeroMQ has of an entry that nobody wants any more to leave this process
_LINK_TIMEOUT_S = 10.0  # a decode worker that did not say Welcome by then is as good as gone

Key = tuple[str, int]
T = TypeVar("T")


class PrefillService:
    """Implements the wire's ServerHandler, LinkHandler and TransferHandler. Asyncio loop only, never blocks."""

    def __init__(self, identity: WorkerIdentity, blocks: BlockManager, clock: Callable[[], float]) -> None:
        self._identity = identity
        self._blocks = blocks
        self._clock = clock
        self._fingerprint = identity.card.layout.fingerprint()
        self._entries: dict[Key, Entry] = {}
        self._linkless: dict[str, list[Entry]] = {}  # by decode address: started, but the link is not up
        self.state = WorkerState.READY
        self.has_work = asyncio.Event()  # there are entries: ``tick`` must be called
        self._drained = asyncio.Event()  # draining, and the last entry is gone
        self._speed = Speed()
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

    # -- gateways: ServerHandler -----------------------------------------------------------------------------------

    def welcome(self, hello: Hello) -> Welcome | HelloRefused:
        """Gateways only: nobody hands blocks to a prefill worker."""
        if hello.role is not Role.GATEWAY:
            return HelloRefused(
                code=FailureCode.INVALID, detail=f"a prefill worker talks to gateways, not to a {hello.role} worker"
            )
        return Welcome(
            role=Role.PREFILL,
            worker_id=self._identity.worker_id,
            epoch=self._identity.epoch,
            protocol=min(hello.protocol_max, PROTOCOL_MAX),
            card=self._identity.card,
        )

    def status(self) -> Status:
        """What routing sees."""
        entries = self._entries.values()
        sequences = [entry.sequence for entry in entries if entry.model_holds or entry.phase is Phase.COMPILING]
        num_waiting = sum(1 for entry in entries if entry.phase in {Phase.COMPILING, Phase.QUEUED})
        return Status(
            state=self.state,
            num_running=len(self._entries) - num_waiting,
            num_waiting=num_waiting,
            num_waiting_tokens=sum(max(0, sequence.num_uncomputed_tokens) for sequence in sequences),
            num_free_blocks=self._blocks.num_allocatable,
            num_blocks=self._blocks.num_blocks,
            max_running=self._identity.max_running,
            prompt_tokens_per_s=self._speed.tokens_per_s,
        )

    def longest_wait_s(self) -> float:
        """Of the prompts that have not begun: what the next one adds to its time to first token, at least."""
        arrivals = [entry.sequence.arrival_s for entry in self._entries.values() if entry.phase is Phase.QUEUED]
        return self._clock() - min(arrivals) if arrivals else 0.0

    def on_message(self, peer_id: str, role: Role, message: Message) -> None:
        """A message from a gateway."""
        match message:
            case Submit():
                self._on_submit(peer_id, message)
            case Cancel(request_id=request_id, attempt=attempt):
                entry = self._entries.get((request_id, attempt))
                if entry is None or entry.gateway_id != peer_id:  # nobody takes back what another gateway asked for
                    self.ports.send(Role.GATEWAY, peer_id, Cancelled(request_id=request_id, attempt=attempt))
                else:
                    self._close(entry, Cancelled(request_id=request_id, attempt=attempt))
            case _:
                logger.debug("unexpected %s", type(message).__name__, extra={"peer_id": peer_id})

    def on_peer_lost(self, peer_id: str, role: Role) -> None:
        """A gateway is gone: nobody waits for its requests any more."""
        for entry in [entry for entry in self._entries.values() if entry.gateway_id == peer_id]:
            request_id, attempt = entry.sequence.key
            self._close(entry, Cancelled(request_id=request_id, attempt=attempt))

    def _on_submit(self, gateway_id: str, submit: Submit) -> None:
        key = (submit.request_id, submit.attempt)
        refusal = submit_refusal(
            submit, self._identity, self.status(), is_known=key in self._entries, needs_decode=True
        )
        if refusal is not None:
            self.ports.send(Role.GATEWAY, gateway_id, refusal)
            return
        now_s = self._clock()
        chain = HashChain(self._fingerprint, self._identity.card.layout.block_size, cache_salt=submit.cache_salt)
        block_hashes = chain.hashes_of_all(submit.token_ids)
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
        entry = self._entries[key] = Entry(submit, gateway_id, sequence, block_hashes, deadline_of(submit, now_s))
        self.has_work.set()
        if submit.decode is not None:
            self.ports.links.link_to(submit.decode.address)  # connect while the prompt waits
        if submit.sampling.guide is None:
            self._queue(entry)
        else:
            output = submit.token_ids[submit.num_prompt_tokens :]
            self.ports.guides.start(submit.sampling, output, partial(self._on_guide, entry))

    def _on_guide(self, entry: Entry, result: GuideResult) -> None:
        if entry.phase is Phase.COMPILING and isinstance(result, GuideRefusal):
            self._close(entry, guide_failed(entry.sequence.key, result.detail, is_invalid=result.is_invalid))
        elif entry.phase is Phase.COMPILING:  # otherwise it came to its end meanwhile
            assert not isinstance(result, GuideRefusal)
            entry.sequence.guide = result
            self._queue(entry)

    def _queue(self, entry: Entry) -> None:
        entry.advance(Phase.QUEUED)
        entry.model_holds = True
        self.ports.loop.post(Add(entry.sequence))

    # -- the model thread ------------------------------------------------------------------------------------------

    def on_report(self, report: Report) -> None:
        """What the model thread did; called on the asyncio loop, in order."""
        self._speed.observe(report.num_tokens, report.step_s)
        for sequence in report.started:
            self._guarded(self._on_started, sequence, sequence.key)
        for computed in report.computed:
            self._guarded(self._on_computed, computed, computed.sequence.key)
        for key in report.removed:
            entry = self._entries[key]
            entry.model_holds = False
            self._finish_closing(entry)
        for key in report.failed:
            entry = self._entries[key]
            if entry.phase is not Phase.CLOSING:
                entry.model_holds = False
                self._fail(entry, FailureCode.INTERNAL, report.detail)

    def _guarded(self, handle: Callable[[T], None], item: T, key: Key) -> None:
        """One request's trouble, as with a link that breaks in this moment, costs no other in the report its news."""
        try:
            handle(item)
        except Exception as error:
            context = {"request_id": key[0], "attempt": key[1]}
            logger.exception("what the model thread reported could not be handled", extra=context)
            self._fail(self._entries[key], FailureCode.INTERNAL, f"the hand-off failed: {type(error).__name__}")

    def _on_started(self, sequence: Sequence) -> None:
        entry = self._entries[sequence.key]
        if entry.phase is Phase.CLOSING:
            return
        entry.advance(Phase.COMPUTING)
        entry.started_s = self._clock()
        assert entry.submit.decode is not None
        if entry.num_earlier_tokens + 1 >= sequence.sampling.max_tokens and sequence.sampling.beam_search is None:
            return  # the first token will be the last: nothing to hand over
        link = self.ports.links.link_to(entry.submit.decode.address)
        if link is None:
            self._linkless.setdefault(entry.submit.decode.address, []).append(entry)
        else:
            self._open_transfer(entry, link)

    def _open_transfer(self, entry: Entry, link: DecodeLink) -> None:
        submit, sequence = entry.submit, entry.sequence
        offer = Offer(
            request_id=submit.request_id,
            attempt=submit.attempt,
            gateway_id=entry.gateway_id,
            fingerprint=self._fingerprint,
            token_ids=submit.token_ids,
            num_prompt_tokens=submit.num_prompt_tokens,
            sampling=submit.sampling,
            block_hashes=entry.block_hashes,
            timeout_s=None if math.isinf(entry.deadline_s) else entry.deadline_s - self._clock(),
            retention=submit.retention,
            cache_salt=submit.cache_salt,
        )
        entry.transfer_holds = True
        entry.num_ready_blocks = max(
            entry.num_ready_blocks, sequence.num_cached_tokens // self._identity.card.layout.block_size
        )
        self.ports.transfers.open(sequence.key, link, offer, list(sequence.block_table))
        self.ports.transfers.blocks_ready(sequence.key, entry.num_ready_blocks)
        if entry.commit is not None:
            self._commit(entry, *entry.commit)

    def _on_computed(self, computed: Computed) -> None:
        sequence = computed.sequence
        entry = self._entries[sequence.key]
        if entry.phase is Phase.CLOSING:
            return  # its removal is asked for, and answered in any case
        if computed.token is not None:
            entry.model_holds = False
        entry.num_ready_blocks = computed.num_ready_blocks
        if entry.transfer_holds:
            self.ports.transfers.blocks_ready(sequence.key, computed.num_ready_blocks)
        if computed.token is None:
            return
        if sequence.failure is not None:
            return self._close(entry, guide_failed(sequence.key, sequence.failure))
        delta = self._first_token_delta(entry, computed)
        if computed.finish_reason is not None:
            self._close(entry, Tokens(items=[delta]))
            return
        self.ports.send(Role.GATEWAY, entry.gateway_id, Tokens(items=[delta]))
        entry.advance(Phase.HANDING_OVER)
        assert delta.timings is not None
        if entry.transfer_holds:
            self._commit(entry, computed.token, delta.timings)
        else:
            entry.commit = (computed.token, delta.timings)

    def _first_token_delta(self, entry: Entry, computed: Computed) -> TokenDelta:
        sequence, now_s = computed.sequence, self._clock()
        started_s = now_s if entry.started_s is None else entry.started_s
        assert computed.token is not None
        return TokenDelta(
            request_id=sequence.request_id,
            attempt=sequence.attempt,
            index=entry.num_earlier_tokens,
            tokens=[] if sequence.sampling.beam_search is not None else [computed.token],
            finish_reason=computed.finish_reason,
            num_cached_tokens=min(sequence.num_cached_tokens, sequence.num_prompt_tokens),
            timings=Timings(queue_s=started_s - sequence.arrival_s, prefill_s=now_s - started_s),
            prompt_logprobs=None if sequence.sampling.num_prompt_logprobs is None else sequence.prompt_logprobs,
        )

    def _commit(self, entry: Entry, token: SampledToken, timings: Timings) -> None:
        self.ports.transfers.commit(entry.sequence.key, token, entry.sequence.num_cached_tokens, timings)

    # -- decode workers: LinkHandler and TransferHandler -----------------------------------------------------------

    def on_link_up(self, address: str, link: DecodeLink) -> None:
        """Offer what waited for this link."""
        for entry in self._linkless.pop(address, []):
            if entry.phase is not Phase.CLOSING:
                self._open_transfer(entry, link)

    def on_link_down(self, address: str, link: DecodeLink | None, code: FailureCode, detail: str) -> None:
        """Fail what was on this link or waited for it."""
        if link is not None:
            self.ports.transfers.on_link_lost(link)
        for entry in self._linkless.pop(address, []):
            if entry.phase is not Phase.CLOSING:
                self._fail(entry, code, detail)

    def on_link_message(self, link: DecodeLink, message: Message) -> None:
        """An answer from a decode worker."""
        self.ports.transfers.on_message(link, message)

    def on_verified(self, key: Key) -> None:
        """The decode worker owns the request now."""
        self._close(self._entries[key], HandedOver(request_id=key[0], attempt=key[1]))

    def on_failed(self, key: Key, code: FailureCode, detail: str, retry_after_s: float | None) -> None:
        """The hand-off failed; the gateway decides on another attempt."""
        self._fail(self._entries[key], code, detail, retry_after_s)

    def on_blocks_released(self, key: Key) -> None:
        """No send in flight reads the blocks any more."""
        entry = self._entries[key]
        entry.transfer_holds = False
        self._finish_closing(entry)

    # -- the end ---------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Let time pass for transfers; end what is out of time; give up on decode workers that are silent, or take no blocks."""
        self.ports.transfers.tick()
        now_s = self._clock()
        for entry in [entry for entry in self._entries.values() if entry.deadline_s <= now_s]:
            self._fail(entry, FailureCode.DEADLINE, "the request's time is up")
        stuck = [entry for entry in self._entries.values() if entry.is_stuck(now_s, _SEND_TIMEOUT_S)]
        for entry in stuck:
            entry.closed_s = now_s  # the reset ends the sends soon, but not at once
        for address in {entry.submit.decode.address for entry in stuck if entry.submit.decode is not None}:
            # The control link lives, so nothing else would ever end these sends and give their blocks back.
            self.ports.links.reset(address, f"took no KV blocks for {_SEND_TIMEOUT_S:g} s")
        for address, entries in list(self._linkless.items()):
            for entry in [entry for entry in entries if now_s - (entry.started_s or now_s) > _LINK_TIMEOUT_S]:
                self._fail(entry, FailureCode.PEER_LOST, f"decode worker {address} does not answer")
            waiting = [entry for entry in entries if entry.phase is not Phase.CLOSING]
            if waiting:
                self._linkless[address] = waiting
            else:
                del self._linkless[address]

    async def drain(self) -> None:
        """Take nothing new; return when nothing is left."""
        self.state = WorkerState.DRAINING
        if self._entries:
            await self._drained.wait()

    def debug(self) -> dict[str, Any]:
        """Entries for /debug/kv."""
        return {f"{key[0]}/{key[1]}": entry.debug() for key, entry in self._entries.items()}

    def _fail(self, entry: Entry, code: FailureCode, detail: str, retry_after_s: float | None = None) -> None:
        request_id, attempt = entry.sequence.key
        failed = Failed(request_id=request_id, attempt=attempt, code=code, detail=detail, retry_after_s=retry_after_s)
        self._close(entry, failed)

    def _close(self, entry: Entry, outcome: Outcome) -> None:
        if entry.phase is Phase.CLOSING:
            return
        entry.advance(Phase.CLOSING)
        entry.outcome, entry.closed_s = outcome, self._clock()
        if entry.model_holds:
            self.ports.loop.post(Remove(entry.sequence.key))
        if entry.transfer_holds and not isinstance(outcome, HandedOver):
            self.ports.transfers.abort(entry.sequence.key, type(outcome).__name__)
        self._finish_closing(entry)

    def _finish_closing(self, entry: Entry) -> None:
        key = entry.sequence.key
        if entry.phase is not Phase.CLOSING or entry.model_holds or entry.transfer_holds or key not in self._entries:
            return
        del self._entries[key]
        if not self._entries:
            self.has_work.clear()
            if self.state is WorkerState.DRAINING:
                self._drained.set()
        self._blocks.release(sequence_owner(key), entry.sequence.retention)
        self.ports.loop.wake()  # a prompt may have waited for these blocks
        assert entry.outcome is not None
        self.ports.send(Role.GATEWAY, entry.gateway_id, entry.outcome)
