"""Chooses the prompt tokens of each step: chunked prefill under a token budget, in fair order (:mod:`kvrelay.common.fair_queue`).

``step()`` of the prefill worker is schedule → run → postprocess. An admitted prompt gets all its blocks, starts after its cached
prefix, and is computed in chunks. Several prompts share a step. :mod:`kvrelay.prefill_worker.chunking` decides the size of a step,
and which prompts overtake a long one. :mod:`kvrelay.prefill_worker.chunk_ends` decides where a chunk ends. If a tier below the pool
has more of a prompt, it begins when that is copied (:mod:`kvrelay.prefill_worker.fetches`). A computed prompt leaves the scheduler,
but still holds its blocks: its hand-off reads them, and the service releases them afterwards.

Runs on the model thread alone. Uses no sockets and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from kvrelay.common.sampling import SampledToken
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.plan import RowResult
from kvrelay.engine.step.sequence import Sequence, SequenceStatus
from kvrelay.prefill_worker.chunk_ends import ChunkEnds
from kvrelay.prefill_worker.chunking import Prompt, step_tokens, turns
from kvrelay.prefill_worker.fetches import Fetches
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings
from kvrelay.worker.scheduling.choice import EVERYBODY, Choice
from kvrelay.worker.scheduling.scheduler import Progress, Schedule, Scheduler, progress_of
from kvrelay.worker.scheduling.sequence_blocks import SequenceBlocks
from kvrelay.worker.scheduling.step_cost import StepCosts
from kvrelay.worker.scheduling.suspects import Key

# The part of a step that prompts whose keys are ahead leave empty, because a new prompt waits for the running step.
_PART_FOR_OTHERS = 0.5


class PrefillScheduler(Scheduler):
    """A prefill worker's scheduler."""

    def __init__(
        self,
        settings: PrefillSchedulerSettings,
        blocks: BlockManager,
        max_model_len: int,
        device_type: str,
        num_stages: int = 1,
    ) -> None:
        super().__init__(settings, blocks, max_model_len, device_type, num_stages)
        self._held = SequenceBlocks(blocks)
        blocks.leaves_owed = True  # a running prompt never waits for another one's blocks
        self._ttft_budget_s = settings.ttft_budget_ms / 1000
        self._costs = StepCosts()
        self._ends = ChunkEnds(blocks.block_size, self._max_batched_tokens, has_states=blocks.has_states)
        self._fetches = Fetches(blocks.tier, self._held, self._look_up)
        self._num_cached: dict[Key, int] = {}  # per waiting prompt: leading tokens that were cached when last looked up

    def add(self, sequence: Sequence, first: SampledToken | None = None) -> None:
        """Queue a prompt."""
        self._look_up(sequence)
        self._places.wait(sequence)

    def observe(self, rows: Seq[StepRow], step_s: float) -> None:
        """Learn the cost of steps, which sets the next step's size."""
        self._costs.observe(sum(row.num_tokens for row in rows), step_s)
        self.prompt_tokens_per_s = self._costs.tokens_per_s

    def remove(self, key: Key) -> Sequence | None:
        """Remove a prompt, waiting or running; its blocks stay held. None if it is not (or no longer) here."""
        found = next((one for one in self.waiting + self.running if one.key == key), None)
        if found is not None:
            self._num_cached.pop(key, None)
            self._fetches.forget(key)
            self._places.leave(found)
        return found

    def schedule(self, now_s: float, choice: Choice = EVERYBODY) -> Schedule:
        """See Scheduler. Chunks in fair order, except for overtaking. Prompts that are in a running step may be continued."""
        ahead, cost, block_size = choice.num_ahead, self._costs.cost, self._blocks.block_size
        line = self._line(now_s, choice)
        room = self._max_batched_tokens
        num_left = step_tokens(self._ttft_budget_s, cost, room, block_size, self._costs.largest_step)
        num_for_others = int(num_left * _PART_FOR_OTHERS)
        prompts = [self._in_line(sequence, ahead.get(sequence, 0)) for sequence in line]
        plan, has_room = Schedule(rows=[]), True
        for turn in turns(prompts, num_left, now_s, self._ttft_budget_s, cost, block_size):
            sequence = line[turn.index]
            num_ahead, is_first = ahead.get(sequence, 0), not plan.rows
            share = num_left if turn.max_tokens is None else min(num_left, turn.max_tokens)
            if self._places.fair.is_ahead(sequence, now_s):
                share = min(share, num_left - num_for_others)
            its_room = None if is_first and not num_ahead else room
            num_tokens = self._chunk(sequence, num_ahead, share, its_room, must=is_first)
            if num_tokens == 0:
                continue
            if sequence.status is SequenceStatus.WAITING:
                # No prompt starts before one that finds no room, which would otherwise wait for ever.
                has_room = has_room and len(self.running) < self._max_num_seqs
                if not has_room or self._fetches.begin(sequence):
                    continue
                has_room = self._admit(sequence, now_s)
                if not has_room:
                    continue
                plan.admitted.append(sequence)
                # Less of it may be cached than when it came, and its first chunk exceed the step.
                must = is_first or not self._blocks.has_states
                num_tokens = self._chunk(sequence, num_ahead, share, its_room, must=must)
                if num_tokens == 0:
                    continue
            plan.rows.append(StepRow(sequence, num_tokens, num_ahead))
            room -= num_tokens
            num_left -= num_tokens
            if num_left <= 0:
                break
        if has_room:
            self._fetches.begin_next(line)
        return plan

    def postprocess(self, rows: Seq[StepRow], results: Seq[RowResult], behind: Seq[StepRow] = ()) -> list[Progress]:
        """Advance the sequences by the results. Computed prompts leave."""
        computed: list[Progress] = []
        for row, result in zip(rows, results, strict=True):
            sequence = row.sequence
            token = result.tokens[0] if result.tokens else None
            sequence.prompt_logprobs += result.prompt_logprobs
            self._held.advance(sequence, row.num_tokens)
            num_ready_blocks = sequence.num_computed_tokens // self._blocks.block_size
            if token is not None:
                num_ready_blocks = self._blocks.num_blocks_for(sequence.num_computed_tokens)
                self.running.remove(sequence)
                # The decode worker chooses a beam search's first tokens, from the candidates that come with this token.
                if sequence.sampling.beam_search is None:
                    sequence.append(token, self._max_model_len)
                sequence.set_status(SequenceStatus.FINISHED)
            computed.append(progress_of(sequence, token, num_ready_blocks))
        return computed

    def _line(self, now_s: float, choice: Choice) -> list[Sequence]:
        """The prompts that could be in the step, in fair order."""
        in_order = self._places.fair.in_order(self.running + self.waiting, now_s)
        line = [one for one in choice.staying(in_order) if self._goes_on(one, choice.num_ahead.get(one, 0))]
        return [one for one in line if not self._fetches.is_under_way(one)]

    @staticmethod
    def _goes_on(sequence: Sequence, num_ahead: int) -> bool:
        """Whether tokens are left after the running steps. With log probabilities of the prompt it waits for these steps."""
        if num_ahead and sequence.sampling.num_prompt_logprobs is not None:
            return False
        return num_ahead < sequence.num_uncomputed_tokens

    def _look_up(self, sequence: Sequence) -> None:
        num_blocks = self._blocks.num_cached_prefix(self._held.reusable_hashes(sequence))
        self._num_cached[sequence.key] = num_blocks * self._blocks.block_size

    def _in_line(self, sequence: Sequence, num_ahead: int) -> Prompt:
        start = self._start(sequence, num_ahead)
        num_together = max(1, self._ends.num_together(sequence, start))
        is_started = sequence.status is SequenceStatus.RUNNING
        return Prompt(sequence.num_tokens - start, sequence.arrival_s, is_started, num_together)

    def _start(self, sequence: Sequence, num_ahead: int) -> int:
        """Its first token that no running step computes. Of a waiting prompt: if as much is still cached as when it came."""
        return sequence.num_computed_tokens + num_ahead + self._num_cached.get(sequence.key, 0)

    def _chunk(self, sequence: Sequence, num_ahead: int, share: int, room: int | None, *, must: bool) -> int:
        """The tokens of the prompt's next chunk; 0: it waits. See ``ChunkEnds.num_tokens``. A running one stays in its blocks."""
        start = self._start(sequence, num_ahead)
        if sequence.status is SequenceStatus.RUNNING:
            num_in_blocks = sequence.num_blocks * self._blocks.block_size - start
            share, room = min(share, num_in_blocks), None if room is None else min(room, num_in_blocks)
        return 0 if share <= 0 else self._ends.num_tokens(sequence, start, share, room, must=must)

    def _admit(self, sequence: Sequence, now_s: float) -> bool:
        """Give a waiting prompt its blocks and let it run. False if there are too few."""
        if not self._held.allocate(sequence):
            return False
        del self._num_cached[sequence.key]
        self._fetches.forget(sequence.key)
        self._places.begin(sequence, now_s)
        return True
