"""A prefill worker's side of the hand-off: it offers a prompt that begins, sends its blocks, and commits its first token.

A prompt is offered when its first step begins, so that the offer is sent while the step computes. If the link to its decode worker
is not up, the offer and the commit wait for it. Blocks are released when neither the model thread nor a send in flight uses them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvrelay.common.block_hash import HashChain
from kvrelay.common.sampling import SampledToken
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.step.sequence import Sequence
from kvrelay.prefill_worker.links import DecodeLinks
from kvrelay.wire.messages import (
    FailureCode,
    HandedOver,
    Message,
    Offer,
    Role,
    Submit,
    TokenDelta,
    Tokens,
)
from kvrelay.wire.transfers.table import TransferTable
from kvrelay.wire.transfers.transfer import DecodeLink
from kvrelay.worker.entries import Entry, Phase
from kvrelay.worker.model_worker import Report
from kvrelay.worker.scheduling.scheduler import Progress
from kvrelay.worker.scheduling.suspects import Key
from kvrelay.worker.scheduling.whole_images import longest_chunk
from kvrelay.worker.service import Service
from kvrelay.worker.submit import Refusal, WorkerIdentity, guide_failed, spans_of

_SEND_TIMEOUT_S = 5.0  # longest wait for the blocks of an entry that has ended, while no block leaves
_LINK_TIMEOUT_S = 10.0  # most time until a decode worker's Welcome; then it counts as lost


@dataclass(slots=True, eq=False, kw_only=True)
class PrefillEntry(Entry):
    """One attempt on a prefill worker."""

    submit: Submit  # without its images: their files are freed once they are read
    block_hashes: list[bytes]  # for all blocks of the submitted tokens; the last block may be partial
    decode_address: str  # the decode worker that takes it over
    num_ready_blocks: int = 0
    awaits_link: bool = False  # started, but the link to the decode worker is not up
    commit: SampledToken | None = None  # the first token, while the link is not up

    @property
    def num_earlier_tokens(self) -> int:
        """Output tokens of earlier attempts. The sequence may have one more, which the model thread appends."""
        return len(self.submit.token_ids) - self.submit.num_prompt_tokens


class PrefillService(Service[PrefillEntry]):
    """Implements the wire's ServerHandler, LinkHandler and TransferHandler."""

    role = Role.PREFILL
    peers = frozenset({Role.GATEWAY})

    def __init__(self, identity: WorkerIdentity, blocks: BlockManager, clock: Callable[[], float]) -> None:
        super().__init__(identity, blocks, clock)
        self._links: DecodeLinks
        self._transfers: TransferTable

    def attach(self, links: DecodeLinks, transfers: TransferTable) -> None:
        """Connect the service to its links and transfers. Called before anything starts."""
        self._links, self._transfers = links, transfers

    def longest_wait_s(self) -> float:
        """Seconds that the oldest prompt which has not begun has waited; 0 if there is none."""
        arrivals = [entry.sequence.arrival_s for entry in self.entries.values() if entry.phase is Phase.QUEUED]
        return self.clock() - min(arrivals) if arrivals else 0.0

    # -- the way in ------------------------------------------------------------------------------------------------

    def refusal(self, request: Submit | Offer, chain: HashChain) -> Refusal | None:
        """See Service. Also refuses images that one step would have to compute, and cannot."""
        refusal, most = super().refusal(request, chain), self.identity.max_step_tokens
        if refusal is not None or most is None or not self.ports.images.takes_whole:
            return refusal
        unit = self.blocks.block_size if self.blocks.has_states else 1  # chunks end at multiples of it
        longest = longest_chunk(spans_of(request), len(request.token_ids), unit)
        if longest <= most:
            return None
        detail = f"{longest} tokens of the prompt's images must be computed together; the limit is --max-batched-tokens, {most}"
        return Refusal(FailureCode.INVALID, detail)

    def entry_of(self, submit: Submit, gateway_id: str, sequence: Sequence) -> PrefillEntry:
        """See Service. Connects to the decode worker while the prompt waits."""
        assert submit.decode is not None
        self._links.link_to(submit.decode.address)
        assert sequence.chain is not None
        return PrefillEntry(
            sequence=sequence,
            gateway_id=gateway_id,
            adapter=submit.adapter,
            deadline_s=sequence.deadline_s,
            submit=submit if not submit.images else msgspec.structs.replace(submit, images=[]),
            block_hashes=sequence.chain.hashes_of_all(submit.token_ids),
            decode_address=submit.decode.address,
        )

    # -- offer, ship, commit ---------------------------------------------------------------------------------------

    def on_started(self, entry: PrefillEntry) -> None:
        """Offer the prompt before its first chunk computes. Asks for a link if there is none."""
        sampling = entry.submit.sampling
        if entry.num_earlier_tokens + 1 >= sampling.max_tokens and sampling.beam_search is None:
            return  # the first token will be the last, so there is no hand-off
        link = self._links.link_to(entry.decode_address)
        if link is None:
            entry.awaits_link = True
        else:
            self._offer(entry, link)

    def _offer(self, entry: PrefillEntry, link: DecodeLink) -> None:
        submit, sequence = entry.submit, entry.sequence
        offer = Offer(
            request_id=submit.request_id,
            attempt=submit.attempt,
            gateway_id=entry.gateway_id,
            fingerprint=self.fingerprint,
            token_ids=submit.token_ids,
            num_prompt_tokens=submit.num_prompt_tokens,
            sampling=submit.sampling,
            block_hashes=entry.block_hashes,
            timeout_s=None if math.isinf(entry.deadline_s) else entry.deadline_s - self.clock(),
            retention=submit.retention,
            cache_salt=submit.cache_salt,
            trace_id=submit.trace_id,
            adapter=submit.adapter,
            flow=submit.flow,
            images=list(sequence.spans),
        )
        entry.awaits_link, entry.hand_off_holds = False, True
        entry.num_ready_blocks = max(entry.num_ready_blocks, sequence.num_cached_tokens // self.blocks.block_size)
        self._transfers.open(entry.key, link, offer, sequence.block_tables)
        self._transfers.blocks_ready(entry.key, entry.num_ready_blocks)
        if entry.commit is not None:
            self._commit(entry, entry.commit)

    def on_progress(self, report: Report) -> None:
        """Send computed blocks."""
        for new in report.progress:
            entry = self.entries[new.key]
            if entry.phase is not Phase.CLOSING:
                self.guarded(self._on_computed, entry, new)

    def _on_computed(self, entry: PrefillEntry, new: Progress) -> None:
        if new.token is not None:
            entry.model_holds = False
            self.preparation.drop_images(entry)
        entry.num_ready_blocks = new.num_ready_blocks
        if entry.hand_off_holds:
            self._transfers.blocks_ready(entry.key, new.num_ready_blocks)
        if new.token is not None and entry.phase is not Phase.CLOSING:  # the data link may just have broken
            self._on_first_token(entry, new, new.token)

    def _on_first_token(self, entry: PrefillEntry, new: Progress, token: SampledToken) -> None:
        """Send the first token to the gateway at once, then commit."""
        sequence = entry.sequence
        if new.failure is not None:
            return self.close(entry, guide_failed(entry.key, new.failure))
        delta = TokenDelta(
            request_id=sequence.request_id,
            attempt=sequence.attempt,
            index=entry.num_earlier_tokens,
            tokens=[] if sequence.sampling.beam_search is not None else [token],
            finish_reason=new.finish_reason,
            num_cached_tokens=new.num_cached_tokens,
            timings=entry.prefill_timings(self.clock()),
            prompt_logprobs=new.prompt_logprobs,
        )
        if new.finish_reason is not None:
            return self.close(entry, Tokens(items=[delta]))
        self.ports.send(Role.GATEWAY, entry.gateway_id, Tokens(items=[delta]))
        entry.advance(Phase.HANDING_OVER)
        if entry.hand_off_holds:
            self._commit(entry, token)
        else:
            entry.commit = token

    def _commit(self, entry: PrefillEntry, token: SampledToken) -> None:
        sequence = entry.sequence
        self._transfers.commit(entry.key, token, sequence.num_cached_tokens, sequence.position_offset)

    # -- decode workers: LinkHandler and TransferHandler -----------------------------------------------------------

    def on_link_up(self, address: str, link: DecodeLink) -> None:
        """Offer the entries that waited for this link."""
        for entry in self._linkless(address):
            self._offer(entry, link)

    def on_link_down(self, address: str, link: DecodeLink | None, code: FailureCode, detail: str) -> None:
        """Fail the entries that used this link or waited for it."""
        if link is not None:
            self._transfers.on_link_lost(link)
        for entry in self._linkless(address):
            self.fail(entry, code, detail)

    def _linkless(self, address: str | None = None) -> list[PrefillEntry]:
        """Entries that wait for a link to ``address``; None: to any decode worker."""
        waiting = [one for one in self.entries.values() if one.awaits_link and one.phase is not Phase.CLOSING]
        return [one for one in waiting if address in (None, one.decode_address)]

    def on_link_message(self, link: DecodeLink, message: Message) -> None:
        """Pass a decode worker's answer to the transfers."""
        self._transfers.on_message(link, message)

    def on_verified(self, key: Key) -> None:
        """The decode worker owns the request from now on."""
        self.close(self.entries[key], HandedOver(request_id=key[0], attempt=key[1]))

    def on_failed(self, key: Key, code: FailureCode, detail: str, retry_after_s: float | None) -> None:
        """The hand-off failed; the gateway decides on another attempt."""
        self.fail(self.entries[key], code, detail, retry_after_s)

    def on_blocks_released(self, key: Key) -> None:
        """No send in flight reads the blocks any more."""
        entry = self.entries[key]
        entry.hand_off_holds = False
        self.finish(entry)

    # -- the end ---------------------------------------------------------------------------------------------------

    def on_closing(self, entry: PrefillEntry, was_in: Phase) -> None:
        """Abort the hand-off, unless the decode worker has verified it."""
        if entry.hand_off_holds and not isinstance(entry.outcome, HandedOver):
            self._transfers.abort(entry.key, type(entry.outcome).__name__)

    def on_gone(self, entry: PrefillEntry) -> None:
        """See Service."""
        self.release(entry)

    def tick(self) -> None:
        """Advance time for transfers. Give up on decode workers that do not answer or take no blocks."""
        self._transfers.tick()
        super().tick()
        now_s = self.clock()
        holding = [entry for entry in self.entries.values() if entry.hand_off_holds]
        since_s = [max(entry.closed_s or now_s, self._transfers.left_s(entry.key)) for entry in holding]
        stuck = [entry for entry, at_s in zip(holding, since_s, strict=True) if now_s - at_s > _SEND_TIMEOUT_S]
        for entry in stuck:
            entry.closed_s = now_s  # the reset ends these sends soon, but not at once
        for address in {entry.decode_address for entry in stuck}:
            # The control link lives, so only this ends the sends and releases their blocks.
            self._links.reset(address, f"took no KV blocks for {_SEND_TIMEOUT_S:g} s")
        for entry in self._linkless():
            if now_s - (entry.started_s or now_s) > _LINK_TIMEOUT_S:
                self.fail(entry, FailureCode.PEER_LOST, f"decode worker {entry.decode_address} does not answer")
