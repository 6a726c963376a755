"""Which tokens to compute next: inflight batching, sequences join and leave at every step.

A step takes one token of every decoding sequence first, lets sequences that were handed over complete join, and spends what
is left of the token budget on local prefill and on recomputing preempted sequences, the oldest first. When blocks run out, the
youngest sequence gives its blocks up and waits to be recomputed, so the oldest is always served.

Runs on the model thread alone. Knows no sockets and no clock.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from kvrelay.common.block_hash import chain_hashes
from kvrelay.common.sampling import SampledToken
from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.engine.block_manager import BlockManager, sequence_owner
from kvrelay.engine.interface import StepRow
from kvrelay.engine.sequence import Sequence, SequenceStatus


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step's rows; ``num_admitted`` prompts start with it, ``preempted`` sequences lost their blocks."""

    rows: list[StepRow]
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


class DecodeScheduler:
    """Waiting and running sequences of one worker, both in order of arrival."""

    def __init__(
        self, settings: DecodeSchedulerSettings, blocks: BlockManager, root_hash: bytes, max_model_len: int
    ) -> None:
        self._settings = settings
        self._blocks = blocks
        self._root_hash = root_hash
        self._max_model_len = max_model_len
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence: one to prefill here, or a verified one that already holds its blocks and their K/V."""
        bisect.insort(self.waiting, sequence, key=_arrival)

    def remove(self, key: tuple[str, int]) -> Sequence | None:
        """Take a sequence out and release its blocks. None if it is not (or no longer) here."""
        for place in (self.waiting, self.running):
            for sequence in place:
                if sequence.key == key:
                    place.remove(sequence)
                    self._finish(sequence)
                    return sequence
        return None

    def drop(self, sequence: Sequence) -> None:
        """Release a sequence that ``add`` could not take in."""
        self._finish(sequence)

    def check_integrity(self) -> None:
        """Assert that places, statuses and the block manager's books agree: after every test, and after a failure."""
        self._blocks.check_integrity()
        for place, status in ((self.waiting, SequenceStatus.WAITING), (self.running, SequenceStatus.RUNNING)):
            for sequence in place:
                assert sequence.status is status, f"{sequence.key} is {sequence.status.name} among the {status.name}"
                owned = self._blocks.owned_blocks(sequence_owner(sequence.key))
                assert sequence.block_table == owned, f"{sequence.key} computes in {sequence.block_table}, owns {owned}"
        keys = [sequence.key for sequence in self.waiting + self.running]
        assert len(set(keys)) == len(keys), f"a sequence is here twice: {sorted(keys)}"

    def schedule(self) -> Schedule:
        """Choose the next step's rows; allocates blocks, admits waiting sequences, preempts running ones."""
        plan = Schedule(rows=[])
        budget = self._settings.max_batched_tokens
        # Tokens that clients wait for come first: nobody's prompt may delay a sequence that generates, nor one that was
        # handed over complete.
        budget = self._continue_running(plan, budget, [one for one in self.running if one.num_uncomputed_tokens == 1])
        budget = self._admit_complete(plan, budget)
        budget = self._continue_running(plan, budget, [one for one in self.running if one.num_uncomputed_tokens > 1])
        if not plan.preempted:
            self._admit_waiting(plan, budget)
        return plan

    def postprocess(self, rows: Seq[StepRow], outputs: Seq[SampledToken | None]) -> list[tuple[Sequence, SampledToken]]:
        """Advance the sequences by what was computed; finished ones leave and their blocks are released.

        Returns the sequences that got a token, with it; a finished one has its ``finish_reason`` set.
        """
        sampled: list[tuple[Sequence, SampledToken]] = []
        for row, token in zip(rows, outputs, strict=True):
            sequence = row.sequence
            sequence.num_computed_tokens += row.num_tokens
            self._publish(sequence)
            if token is None:
                continue
            sampled.append((sequence, token))
            if sequence.append(token, self._max_model_len) is not None:
                self.running.remove(sequence)
                self._finish(sequence)
        return sampled

    def _continue_running(self, plan: Schedule, budget: int, sequences: Seq[Sequence]) -> int:
        """Rows for running ``sequences``, oldest first; returns what is left of the budget."""
        for sequence in sequences:
            if budget == 0:
                break
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # preempted by an older one in this very loop
            num_tokens = min(budget, sequence.num_uncomputed_tokens)
            if self._make_room(sequence, sequence.num_computed_tokens + num_tokens, plan):
                plan.rows.append(StepRow(sequence, num_tokens))
                budget -= num_tokens
        return budget

    def _admit_complete(self, plan: Schedule, budget: int) -> int:
        """Let verified sequences join: they hold their blocks and need one token each."""
        for sequence in [one for one in self.waiting if one.block_table]:
            if budget == 0 or len(self.running) >= self._settings.max_num_seqs:
                break
            self._admit(sequence, plan, 1)
            budget -= 1
        return budget

    def _admit_waiting(self, plan: Schedule, budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self._settings.max_num_seqs:
            sequence = self.waiting[0]
            if not sequence.block_table and not self._allocate(sequence):
                # Verified sequences that wait for a place in the batch hold blocks too. If they are all that stands
                # between the oldest and its blocks, nobody would ever move.
                if not self.running and self._youngest_holder() is not None:
                    self._preempt_youngest(plan)
                    continue
                break
            num_tokens = min(budget, sequence.num_uncomputed_tokens)
            self._admit(sequence, plan, num_tokens)
            budget -= num_tokens

    def _admit(self, sequence: Sequence, plan: Schedule, num_tokens: int) -> None:
        self.waiting.remove(sequence)
        sequence.set_status(SequenceStatus.RUNNING)
        bisect.insort(self.running, sequence, key=_arrival)
        plan.admitted.append(sequence)
        plan.rows.append(StepRow(sequence, num_tokens))

    def _allocate(self, sequence: Sequence) -> bool:
        block_size = self._blocks.block_size
        # The last token is always computed anew: its logits are what is sampled from.
        num_reusable = (sequence.num_tokens - 1) // block_size
        hashes = chain_hashes(self._root_hash, sequence.token_ids[: num_reusable * block_size], block_size)
        num_blocks = self._blocks.num_blocks_for(sequence.num_tokens)
        allocation = self._blocks.allocate(sequence_owner(sequence.key), num_blocks, hashes)
        if allocation is None:
            return False
        sequence.block_hashes = hashes[: allocation.num_cached]
        sequence.block_table = allocation.block_ids
        sequence.num_computed_tokens = allocation.num_cached * block_size
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        return True

    def _make_room(self, sequence: Sequence, num_tokens: int, plan: Schedule) -> bool:
        num_missing = self._blocks.num_blocks_for(num_tokens) - len(sequence.block_table)
        while num_missing > 0:
            fresh = self._blocks.extend(sequence_owner(sequence.key), num_missing)
            if fresh is not None:
                sequence.block_table.extend(fresh)
                return True
            if self._preempt_youngest(plan) is sequence:
                return False
        return True

    def _youngest_holder(self) -> Sequence | None:
        holders = self.running + [sequence for sequence in self.waiting if sequence.block_table]
        return max(holders, key=_arrival, default=None)

    def _preempt_youngest(self, plan: Schedule) -> Sequence:
        sequence = self._youngest_holder()
        assert sequence is not None, "nobody holds blocks, yet there is no room"
        # A row of this step may already be the victim's, if it decodes while an older one prefills: it must not
        # compute into blocks that it no longer owns.
        plan.rows[:] = [row for row in plan.rows if row.sequence is not sequence]
        self._blocks.release(sequence_owner(sequence.key))
        sequence.block_table = []
        sequence.block_hashes = []
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        plan.preempted.append(sequence)
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            sequence.set_status(SequenceStatus.WAITING)
            self.add(sequence)
        return sequence

    def _publish(self, sequence: Sequence) -> None:
        block_size = self._blocks.block_size
        num_full = sequence.num_computed_tokens // block_size
        num_known = len(sequence.block_hashes)
        if num_full > num_known:
            tokens = sequence.token_ids[: num_full * block_size]
            sequence.block_hashes = chain_hashes(self._root_hash, tokens, block_size, known=sequence.block_hashes)
            for index in range(num_known, num_full):
                self._blocks.publish(sequence_owner(sequence.key), index, sequence.block_hashes[index])

    def _finish(self, sequence: Sequence) -> None:
        sequence.set_status(SequenceStatus.FINISHED)
        self._blocks.release(sequence_owner(sequence.key))
        sequence.block_table = []


def _arrival(sequence: Sequence) -> float:
    return sequence.arrival_s
