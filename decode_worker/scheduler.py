"""Chooses the tokens of each step: inflight batching, where sequences join and leave at every step.

A step first takes one token of every decoding sequence. Then complete sequences that were handed over join. The rest of its time
(:mod:`kvrelay.worker.scheduling.step_cost`) goes to prompts: local prefill, and preempted sequences that are computed again. If no
sequence generates, prompts get whole steps. Waiting prompts get their turn in fair order (:mod:`kvrelay.common.fair_queue`), even
before running prompts whose keys are ahead. A much shorter prompt may overtake (:mod:`kvrelay.worker.scheduling.overtaking`). An
image that must be computed whole (:mod:`kvrelay.worker.scheduling.whole_images`) may take more than that time, in the step of which
it is the first prompt.

:mod:`kvrelay.decode_worker.batch_blocks` decides which sequence gets blocks, and which is preempted when they run out.

With speculation, a step without prompts may get drafts (:mod:`kvrelay.decode_worker.drafted_rows`). They fill free places of the
batch, in blocks that no other sequence needs next.

:mod:`kvrelay.engine.beams` knows which sequences form a beam search, and are preempted and removed together.

Runs on the model thread alone. Uses no sockets and no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from kvrelay.common.sampling import SampledToken
from kvrelay.decode_worker.batch_blocks import BatchBlocks
from kvrelay.decode_worker.drafted_rows import give_drafts, may_draft_behind
from kvrelay.decode_worker.drafts import Drafts, Room
from kvrelay.decode_worker.line import look_at, share_of_stage, shares
from kvrelay.decode_worker.run_ahead import who_goes_on
from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.engine.beams.searches import BeamSearches
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.plan import RowResult
from kvrelay.engine.step.sequence import Sequence, SequenceStatus
from kvrelay.worker.scheduling.choice import EVERYBODY, Choice
from kvrelay.worker.scheduling.overtaking import in_the_way, overtaking
from kvrelay.worker.scheduling.scheduler import Progress, Schedule, Scheduler, progress_of
from kvrelay.worker.scheduling.step_cost import MixedSteps
from kvrelay.worker.scheduling.suspects import Key
from kvrelay.worker.scheduling.whole_images import chunk, num_together


class DecodeScheduler(Scheduler):
    """A decode worker's scheduler."""

    def __init__(
        self,
        settings: DecodeSchedulerSettings,
        blocks: BlockManager,
        max_model_len: int,
        device_type: str,
        drafts: Drafts | None = None,
        num_stages: int = 1,
    ) -> None:
        """``drafts``: of speculation; None: no speculation."""
        super().__init__(settings, blocks, max_model_len, device_type, num_stages)
        self._drafts = drafts
        self._searches = BeamSearches(blocks, max_model_len)
        self._held = BatchBlocks(blocks, self._places, self._searches, self._forget_drafts, self._lose)
        # A sequence gets a token in one of ``num_stages`` steps.
        itl_budget_s = None if settings.itl_budget_ms is None else settings.itl_budget_ms / 1000 / num_stages
        self._steps = MixedSteps(itl_budget_s, self._max_batched_tokens, device_type)
        self._choice = EVERYBODY  # candidates for the step that is being scheduled

    def add(self, sequence: Sequence, first: SampledToken | None = None) -> None:
        """See Scheduler. A prompt, or a verified sequence with its blocks and, unless it is a beam search, a first token."""
        self._searches.add(sequence, first)
        self._places.wait(sequence)
        self._held.set_aside()

    def remove(self, key: Key) -> Sequence | None:
        """Remove a sequence, or a whole beam search, and release its blocks. None if it is not (or no longer) here."""
        found = self._searches.remove(key) or [one for one in self.waiting + self.running if one.key == key]
        for sequence in found:
            self._end(sequence)
        self._tell_speed()
        return found[0] if found else None

    def _lose(self, sequence: Sequence) -> None:
        self.remove(sequence.key)
        self.lost.append(sequence.key)

    def drop(self, sequence: Sequence) -> None:
        """Release a sequence after ``add`` raised."""
        self._searches.remove(sequence.key)
        self._end(sequence)

    def observe(self, rows: Seq[StepRow], step_s: float) -> None:
        """Learn the cost of steps, which bounds the prompt tokens of later steps."""
        num_prompt_tokens = sum(row.num_tokens for row in rows if row.num_tokens > 1)
        # A draft token costs as much as a generated one.
        num_generating = sum(1 + len(row.draft) for row in rows if row.num_tokens == 1)
        self._steps.observe(num_prompt_tokens, num_generating, step_s)
        if self._drafts is not None and num_prompt_tokens == 0:
            self._drafts.row_cost.observe(num_generating, step_s)

    def on_failed(self, rows: Seq[StepRow], group: frozenset[Key] | None) -> list[Sequence]:
        """See Scheduler. A beam search starts again, because it is not known whether its beams' shared blocks were copied.

        So does a sequence with states, which the step may have replaced. A search that joined with the step, and has nothing to
        compute before its beams are chosen, joins again.
        """
        suspects = super().on_failed(rows, group)
        for search in [one for one in self.running if self._searches.is_ready(one)]:
            self._places.stop(search)
        for sequence in suspects:
            is_spoiled = self._blocks.has_states or sequence.sampling.beam_search is not None
            if is_spoiled and sequence.status is SequenceStatus.RUNNING:
                self._held.preempt(sequence, Schedule(rows=[]))
        return suspects

    def check_integrity(self) -> None:
        """See Scheduler."""
        super().check_integrity()
        self._searches.check_integrity(self.waiting + self.running)
        self._held.check_integrity()

    def schedule(self, now_s: float, choice: Choice = EVERYBODY) -> Schedule:
        """Choose the next step's rows. Allocates blocks, admits, and preempts."""
        plan = Schedule(rows=[])
        self._choice = choice
        self._places.sort(now_s)
        self._held.set_aside()
        self._held.look_again()
        budget = self._max_batched_tokens
        generating = [one for one in choice.among(self.running) if one.num_uncomputed_tokens == 1]
        # Tokens that clients wait for come first. No prompt may delay a sequence that generates, or one that was handed
        # over complete.
        num_generating = sum(one.num_uncomputed_tokens == 1 for one in self.running)
        generating = share_of_stage(generating, num_generating, self._num_stages)
        budget = self._continue_running(plan, budget, generating)
        budget = self._admit_complete(plan, budget, choice.among(self.waiting))
        budget = min(budget, self._steps.prompt_tokens(len(plan.rows), self._num_behind(len(plan.rows))))
        budget = self._let_overtake(plan, budget)
        in_step = {row.sequence for row in plan.rows}
        prompts = [one for one in choice.among(self.running) if one not in in_step and one.num_uncomputed_tokens > 1]
        # Prompts whose keys are ahead let other prompts begin first.
        ahead = [one for one in prompts if self._places.fair.is_ahead(one, now_s)]
        budget = self._continue_running(plan, budget, [one for one in prompts if one not in ahead])
        if ahead and not (plan.preempted or self.lost):
            budget = self._admit_prompts(plan, budget, may=lambda one: not self._places.fair.is_ahead(one, now_s))
        budget = self._continue_running(plan, budget, ahead)
        if not (plan.preempted or self.lost):
            self._admit_prompts(plan, budget)
        if self._drafts is not None and choice.group is None and all(row.num_tokens == 1 for row in plan.rows):
            num_rows = len(plan.rows)
            room = Room(num_rows, self._max_num_seqs - num_rows, self._steps.spare_s(num_rows))
            give_drafts(plan.rows, self._drafts, self._held, self._max_model_len, room)
        return plan

    def _let_overtake(self, plan: Schedule, budget: int) -> int:
        """Add a row for the prompt that overtakes, if there is one. Returns what is left of the budget."""
        prompts = [one for one in self.running if one.num_uncomputed_tokens > 1]
        prompts = self._choice.among(prompts + [one for one in self.waiting if not one.block_tables])
        # Only one, because all prompts before it in line get their blocks, too.
        num_left = [one.num_uncomputed_tokens for one in prompts]
        first = in_the_way(num_left, budget)
        if first is not None:
            long = prompts[first]
            if num_together(long.whole_spans, long.num_computed_tokens, long.num_tokens) > budget // 2:
                return budget  # it would find no room behind the one that overtakes
        for place, share in overtaking(num_left, budget)[:1]:
            self._admit_prompts(plan, 0, last=prompts[place])
            if prompts[place].status is SequenceStatus.RUNNING:  # otherwise there was no room
                budget += self._continue_running(plan, share, [prompts[place]], takes_more=False) - share
        return budget

    def ahead(self, flying: Seq[StepRow]) -> Schedule | None:
        """See Scheduler, and :mod:`kvrelay.decode_worker.run_ahead`. Preempts no sequence."""
        if self._drafts is not None and may_draft_behind(flying, self._drafts, self._max_num_seqs):
            return None
        line = look_at(self.waiting, self._num_free_places())
        may_begin = line.prompt is not None and line.has_places and self._held.may_find(line.prompt)
        awaits_room = line.prompt is not None and not may_begin
        going_on = who_goes_on(flying, self.running, line.complete, self._max_model_len, awaits_room=awaits_room)
        if going_on is None:
            return None
        num_generating = len(going_on.generating) + len(line.complete)
        num_tokens = self._steps.prompt_tokens(num_generating, self._num_behind(num_generating))
        budget = min(self._max_batched_tokens - num_generating, num_tokens)
        if budget < 0:
            return None
        num_left = [row.num_tokens for row in going_on.prompts]
        if line.prompt is not None and may_begin and self._would_begin(line.prompt, going_on.prompts, budget):
            return None
        plan = Schedule(rows=list(going_on.generating))
        for row, num_tokens in zip(going_on.prompts, shares(num_left, budget), strict=True):
            if num_tokens:
                plan.rows.append(StepRow(row.sequence, num_tokens, row.num_ahead))
        for row in plan.rows:
            if not self._held.extend(row.sequence, row.sequence.num_computed_tokens + row.num_ahead + row.num_tokens):
                return None
        self._admit_complete(plan, len(line.complete), self.waiting)
        return plan if plan.rows else None

    def _would_begin(self, prompt: Sequence, running: Seq[StepRow], budget: int) -> bool:
        """Whether a step with ``budget`` for prompts has tokens for ``prompt`` or another waiting one, beside ``running``."""
        num_left = [row.num_tokens for row in running]
        are_ahead = any(self._places.fair.is_ahead(row.sequence, self._places.now_s) for row in running)
        if sum(num_left) < budget or (are_ahead and not self._places.fair.is_ahead(prompt, self._places.now_s)):
            return True
        waiting = [one.num_uncomputed_tokens for one in self.waiting if not one.block_tables]
        return any(place >= len(num_left) for place, _ in overtaking(num_left + waiting, budget)[:1])

    def abandon(self, rows: Seq[StepRow]) -> None:
        """A step that ran ahead has ended without results: release blocks that only it still held."""
        for row in rows:
            if row.sequence.status is SequenceStatus.FINISHED:
                self._held.release(row.sequence)

    def postprocess(self, rows: Seq[StepRow], results: Seq[RowResult], behind: Seq[StepRow] = ()) -> list[Progress]:
        """Advance the sequences by the results. Finished ones leave, and their blocks are released.

        ``behind``: rows of the step that runs already. A finished sequence in it keeps its blocks, to which that step writes, until
        the step is postprocessed or abandoned.
        """
        progress: list[Progress] = []
        writes_on = {row.sequence for row in behind}
        self.abandon(rows)
        for row, result in zip(rows, results, strict=True):
            sequence = row.sequence
            if sequence.status is SequenceStatus.FINISHED:
                continue  # finished with the previous step's token; this token is dropped
            self._held.advance(sequence, row.num_tokens)
            sequence.prompt_logprobs += result.prompt_logprobs
            if row.draft and self._drafts is not None:
                self._drafts.hear(sequence, len(row.draft), len(result.tokens) - 1)
            for place, token in enumerate(result.tokens):
                if place > 0:
                    self._held.advance(sequence, 1)  # the token before it was a draft token, whose K/V are computed
                if sequence.sampling.beam_search is not None:
                    self._searches.hear(sequence, token)
                    continue
                sequence.append(token, self._max_model_len)
                progress.append(progress_of(sequence, token, sequence.num_blocks))
                if sequence.is_over:
                    self._end(sequence, keeps_blocks=sequence in writes_on)
                    break
        for change in self._searches.go_forward():
            for beam in change.joined:
                self._places.run(beam)
            for beam in change.ended:
                self._end(beam)
            if change.told is not None:
                progress.append(progress_of(change.told, None, 0, change.beams))
        self._tell_speed()
        return progress

    def _tell_speed(self) -> None:
        num_generating = sum(1 for one in self.running if one.num_uncomputed_tokens == 1)
        self.prompt_tokens_per_s = self._steps.tokens_per_s(num_generating, self._num_behind(num_generating))

    def _num_behind(self, num_generating: int) -> int:
        """Prompts behind the first one that the batch has places for, if ``num_generating`` sequences generate in a step.

        With several stages a step has only its share of the sequences here.
        """
        num_here = min(len(self.running) + len(self.waiting), self._max_num_seqs)
        return max(0, num_here // self._num_stages - num_generating - 1)

    def _continue_running(
        self, plan: Schedule, budget: int, sequences: Seq[Sequence], *, takes_more: bool = True
    ) -> int:
        """Add rows for running ``sequences``, the most senior first. Returns what is left of the budget.

        ``takes_more``: whether an image that must be computed whole may take more than the budget.
        """
        for sequence in sequences:
            if budget == 0:
                break
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # preempted by a more senior one in this loop
            num_tokens = self._size(sequence, budget, plan if takes_more else None)
            if num_tokens == 0:
                continue
            if self._held.make_room(sequence, sequence.num_computed_tokens + num_tokens, plan, self._choice):
                plan.rows.append(StepRow(sequence, num_tokens))
                budget = max(0, budget - num_tokens)
        return budget

    def _size(self, sequence: Sequence, budget: int, plan: Schedule | None) -> int:
        """Tokens of a sequence in a step. More than ``budget`` for a whole image, if ``plan`` has no prompt. 0: it must wait."""
        share = min(budget, sequence.num_uncomputed_tokens)
        if share == 0 or not sequence.whole_spans:
            return share
        is_first = plan is not None and all(row.num_tokens == 1 for row in plan.rows)
        room = self._max_batched_tokens - len(plan.rows) if plan is not None and is_first else 0
        return chunk(sequence.whole_spans, sequence.num_computed_tokens, share, sequence.num_tokens, room)

    def _admit_complete(self, plan: Schedule, budget: int, waiting: Seq[Sequence]) -> int:
        """Let verified sequences join. They hold their blocks and need one token each; a beam search needs none yet."""
        for sequence in look_at(waiting, self._num_free_places()).complete:
            if budget == 0:
                break
            budget -= self._admit(sequence, plan, budget)
        return budget

    def _admit_prompts(
        self,
        plan: Schedule,
        budget: int,
        last: Sequence | None = None,
        may: Callable[[Sequence], bool] = lambda one: True,
    ) -> int:
        """Let prompts that ``may`` begin in order while there is budget, and without budget as far as ``last``.

        Returns what is left of the budget.
        """
        while budget > 0 or (last is not None and last.status is SequenceStatus.WAITING):
            line = look_at(self._choice.among(self.waiting), self._num_free_places())
            if line.prompt is None or not line.has_places or not may(line.prompt):
                break
            if self._held.find(line.prompt):
                budget = max(0, budget - self._admit(line.prompt, plan, budget))
                continue
            # Verified sequences that wait for a place hold blocks, too. If the first prompt lacks only these, none would
            # ever advance.
            if self.running or (victim := self._held.least_senior_holder()) is None:
                break
            self._held.preempt(victim, plan)
        return budget

    def _num_free_places(self) -> int:
        return self._max_num_seqs - len(self.running) - self._searches.num_reserved

    def _admit(self, sequence: Sequence, plan: Schedule, budget: int) -> int:
        """Let a sequence that has blocks run. Returns the tokens that it computes in this step."""
        self._places.begin(sequence, self._places.now_s)
        self._held.set_aside()
        plan.admitted.append(sequence)
        num_tokens = self._size(sequence, budget, plan)
        if num_tokens:
            plan.rows.append(StepRow(sequence, num_tokens))
        return num_tokens

    def _end(self, sequence: Sequence, *, keeps_blocks: bool = False) -> None:
        """Remove a sequence, waiting or running, and release its blocks, unless a step still writes to them."""
        self._places.leave(sequence)
        self._forget_drafts(sequence)
        if sequence.tags.start is not None:
            # The beams of a search share their tags; each has an output of its own behind the same prompt.
            num_others = sequence.sampling.num_sequences - 1
            self._places.fair.settle(sequence, sequence.num_tokens + num_others * sequence.num_output_tokens)
        self._held.set_aside()
        if not keeps_blocks:
            self._held.release(sequence)

    def _forget_drafts(self, sequence: Sequence) -> None:
        if self._drafts is not None:
            self._drafts.forget(sequence)
