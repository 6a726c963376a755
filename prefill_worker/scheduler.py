"""Which prompt tokens to compute next: chunked prefill under a token budget, in order of arrival.

``step()`` of the prefill worker is schedule → run → postprocess. A prompt gets all its blocks when it is admitted, starts
behind its cached prefix, and is computed in chunks; several prompts share a step. How large a step is, and who may overtake a
long prompt, is decided in :mod:`kvrelay.prefill_worker.chunking`. A computed prompt leaves the scheduler
with its blocks still held: its hand-off reads them, and whoever runs the hand-off releases them.

Runs on the model thread alone. Knows no sockets and no clock.
"""

from __future__ import annotations

import bisect
import heapq
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kvrelay.common.sampling import FinishReason, SampledToken
from kvrelay.engine.kv.block_manager import BlockManager, sequence_owner
from kvrelay.engine.settings import prompt_step_tokens
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.plan import RowResult
from kvrelay.engine.step.sequence import Sequence, SequenceStatus
from kvrelay.prefill_worker.chunking import Prompt, step_tokens, turns
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings
from kvrelay.worker.model_worker import Schedule
from kvrelay.worker.step_cost import StepCosts
from kvrelay.worker.suspects import Key


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step did for one prompt."""

    sequence: Sequence
    num_ready_blocks: int  # leading blocks whose K/V are complete; all of them once ``token`` is there
    token: SampledToken | None  # the first token, with the prompt's last chunk
    finish_reason: FinishReason | None  # set if the first token is also the last


class PrefillScheduler:
    """Waiting and running prompts of one worker, the running ones in order of arrival."""

    def __init__(
        self, settings: PrefillSchedulerSettings, blocks: BlockManager, max_model_len: int, device_type: str = "cpu"
    ) -> None:
        """``device_type``: what computes, "cpu" or "cuda": how large a step may be if the settings do not say."""
        self._settings = settings
        self._max_batched_tokens = prompt_step_tokens(settings.max_batched_tokens, device_type)
        self._blocks = blocks
        self._max_model_len = max_model_len
        self._ttft_budget_s = settings.ttft_budget_ms / 1000
        self._costs = StepCosts()
        self._num_cached: dict[Key, int] = {}  # of those that wait: leading tokens that were cached when they came
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence, first: SampledToken | None = None) -> None:
        """Queue a prompt."""
        num_blocks = self._blocks.num_cached_prefix(self._reusable_hashes(sequence))
        self._num_cached[sequence.key] = num_blocks * self._blocks.block_size
        self.waiting.append(sequence)

    def observe(self, rows: Seq[StepRow], step_s: float) -> None:
        """The step of ``rows`` took so long: what the next one's size follows from."""
        self._costs.observe(sum(row.num_tokens for row in rows), step_s)

    def remove(self, key: Key) -> Sequence | None:
        """Take a prompt out, wherever it is; its blocks stay held. None if it is not (or no longer) here."""
        for place in (self.waiting, self.running):
            for sequence in place:
                if sequence.key == key:
                    place.remove(sequence)
                    self._num_cached.pop(key, None)
                    sequence.set_status(SequenceStatus.FINISHED)
                    return sequence
        return None

    def on_failed(self, rows: Seq[StepRow], group: frozenset[Key] | None) -> list[Key]:
        """A step of ``rows`` failed before its tokens came: who was in it computes again. Returns who may have broken it.

        No rows: it could not even be scheduled, for ``group``.
        """
        suspects = [row.sequence for row in rows] or self._line(group, self.running, list(self.waiting)[:1])
        return [sequence.key for sequence in suspects]

    def check_integrity(self) -> None:
        """Assert that places, statuses and the block manager's books agree: after every test, and after a failure."""
        self._blocks.check_integrity()
        for sequence in self.waiting:
            assert sequence.status is SequenceStatus.WAITING, f"{sequence.key} waits, but is {sequence.status.name}"
        for sequence in self.running:
            assert sequence.status is SequenceStatus.RUNNING, f"{sequence.key} runs, but is {sequence.status.name}"
            owned = self._blocks.owned_blocks(sequence_owner(sequence.key))
            assert sequence.block_table == owned, f"{sequence.key} computes in {sequence.block_table}, owns {owned}"
        keys = [sequence.key for sequence in [*self.waiting, *self.running]]
        assert len(set(keys)) == len(keys), f"a prompt is here twice: {sorted(keys)}"

    def drop(self, sequence: Sequence) -> None:
        """A prompt that ``add`` could not take in holds nothing."""

    def abandon(self, rows: Seq[StepRow]) -> None:
        """Blocks are released by whoever runs the hand-off."""

    def ahead(self, flying: Seq[StepRow]) -> None:
        """None: between two steps that take long the host stands in nobody's way."""

    def schedule(self, now_s: float, group: frozenset[Key] | None = None) -> Schedule:
        """The next step's rows, and the prompts that start with it. No rows: nothing waits, or no room yet.

        ``now_s``: on the clock of the sequences' ``arrival_s``. ``group``: who alone may be in the step; None: everybody.
        """
        line = self._line(group, self.running, self.waiting)
        prompts = [self._in_line(sequence) for sequence in line]
        block_size, cost = self._blocks.block_size, self._costs.cost
        budget = step_tokens(self._ttft_budget_s, cost, self._max_batched_tokens, block_size, self._costs.largest_step)
        plan = Schedule(rows=[])
        has_room = True
        for turn in turns(prompts, budget, now_s, self._ttft_budget_s, cost, block_size):
            sequence, share = line[turn.index], budget if turn.max_tokens is None else min(budget, turn.max_tokens)
            num_tokens = self._chunk(prompts[turn.index].num_tokens, sequence, share)
            if num_tokens == 0 and plan.rows:
                continue
            if sequence.status is SequenceStatus.WAITING:
                # Nobody starts before one that has no room: it would wait for ever.
                has_room = has_room and len(self.running) < self._settings.max_num_seqs and self._admit(sequence)
                if not has_room:
                    continue
                plan.admitted.append(sequence)
                num_tokens = self._chunk(sequence.num_uncomputed_tokens, sequence, share)
            plan.rows.append(StepRow(sequence, num_tokens or share))
            budget -= plan.rows[-1].num_tokens
            if budget == 0:
                break
        return plan

    def _line(self, group: frozenset[Key] | None, *places: Iterable[Sequence]) -> list[Sequence]:
        return [one for one in heapq.merge(*places, key=_arrival) if group is None or one.key in group]

    def postprocess(self, rows: Seq[StepRow], results: Seq[RowResult], behind: Seq[StepRow] = ()) -> list[Computed]:
        """Advance the sequences by what was computed; computed prompts leave."""
        computed: list[Computed] = []
        for row, result in zip(rows, results, strict=True):
            sequence = row.sequence
            token = result.tokens[0] if result.tokens else None
            sequence.prompt_logprobs += result.prompt_logprobs
            num_full_before = sequence.num_computed_tokens // self._blocks.block_size
            sequence.num_computed_tokens += row.num_tokens
            num_ready_blocks = sequence.num_computed_tokens // self._blocks.block_size
            if num_ready_blocks > num_full_before:
                hashes = sequence.block_hashes(num_ready_blocks)
                for index in range(num_full_before, num_ready_blocks):
                    self._blocks.publish(sequence_owner(sequence.key), index, hashes[index])
            if token is not None:
                num_ready_blocks = len(sequence.block_table)
                self.running.remove(sequence)
                # A beam search's first tokens are chosen by the decode worker, from the candidates that come with this one.
                if sequence.sampling.beam_search is None:
                    sequence.append(token, self._max_model_len)
                sequence.set_status(SequenceStatus.FINISHED)
            computed.append(Computed(sequence, num_ready_blocks, token, sequence.finish_reason))
        return computed

    def _in_line(self, sequence: Sequence) -> Prompt:
        num_tokens = sequence.num_uncomputed_tokens
        if sequence.status is SequenceStatus.RUNNING:
            return Prompt(num_tokens, sequence.arrival_s, is_started=True)
        return Prompt(num_tokens - self._num_cached[sequence.key], sequence.arrival_s, is_started=False)

    def _chunk(self, num_left: int, sequence: Sequence, share: int) -> int:
        """How many of ``share`` tokens to compute, of ``num_left``: to the end, or else to a block's, as blocks are shipped whole.

        A prompt that would only get a piece of a block gets nothing: it would hold all its blocks for that.
        """
        if share >= num_left:
            return num_left
        num_past = (sequence.num_computed_tokens + share) % self._blocks.block_size
        # With blocks that are large for a step it would cost too much of it.
        return max(0, share - num_past) if 8 * num_past <= self._max_batched_tokens else share

    def _reusable_hashes(self, sequence: Sequence) -> list[bytes]:
        return sequence.block_hashes(sequence.num_cacheable_tokens // self._blocks.block_size)

    def _admit(self, sequence: Sequence) -> bool:
        """Let a waiting prompt run, behind what of it is cached; False if there are no blocks for it."""
        num_blocks = self._blocks.num_blocks_for(sequence.num_tokens)
        allocation = self._blocks.allocate(sequence_owner(sequence.key), num_blocks, self._reusable_hashes(sequence))
        if allocation is None:
            return False
        sequence.block_table = allocation.block_ids
        sequence.num_computed_tokens = sequence.num_cached_tokens = allocation.num_cached * self._blocks.block_size
        sequence.set_status(SequenceStatus.RUNNING)
        self.waiting.remove(sequence)
        del self._num_cached[sequence.key]
        bisect.insort(self.running, sequence, key=_arrival)
        return True


def _arrival(sequence: Sequence) -> float:
    return sequence.arrival_s
