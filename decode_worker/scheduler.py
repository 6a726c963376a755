"""Which tokens to compute next: inflight batching, sequences join and leave at every step.

A step takes one token of every decoding sequence first, lets sequences that were handed over complete join, and spends what
is left of its time (:mod:`kvrelay.worker.step_cost`) on prompts: local prefill, and preempted sequences that are computed again.
Who waits gets its turn in fair order (:mod:`kvrelay.common.fair_queue`), also before prompts that compute already if their keys
are ahead; a much shorter prompt may overtake another (:mod:`kvrelay.worker.overtaking`). Where nobody generates, prompts have
whole steps.

When blocks run out, the least senior sequence gives its blocks up and waits to be recomputed: of the lowest class the youngest. So
the most senior is always served. While a sequence waits for blocks, hand-offs leave as many free as it needs
(``BlockManager.set_aside``).

With speculation a step without prompts may get drafts (:mod:`kvrelay.decode_worker.drafts`): as many more rows as there are places
in the batch, and in blocks that nobody else needs next.

Which sequences belong to one beam search, and are preempted and removed together, :mod:`kvrelay.engine.beams` knows.

Runs on the model thread alone. Knows no sockets and no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from kvrelay.common.fair_queue import seniority
from kvrelay.common.sampling import SampledToken
from kvrelay.decode_worker.drafts import Drafts, Room
from kvrelay.decode_worker.line import look_at, shares
from kvrelay.decode_worker.run_ahead import who_goes_on
from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.engine.beams.searches import BeamSearches
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.plan import RowResult
from kvrelay.engine.step.sequence import Sequence, SequenceStatus
from kvrelay.worker.choice import EVERYBODY, Choice
from kvrelay.worker.overtaking import overtaking
from kvrelay.worker.scheduler import Progress, Schedule, Scheduler, owner_of, progress_of
from kvrelay.worker.step_cost import MixedSteps
from kvrelay.worker.suspects import Key


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
        """``drafts``: of speculation; None: there is none."""
        super().__init__(settings, blocks, max_model_len, device_type, num_stages)
        self._drafts = drafts
        self._searches = BeamSearches(blocks, max_model_len)
        # A sequence gets a token in one of as many steps.
        itl_budget_s = None if settings.itl_budget_ms is None else settings.itl_budget_ms / 1000 / num_stages
        self._steps = MixedSteps(itl_budget_s, self._max_batched_tokens, device_type)
        self._choice = EVERYBODY  # of the step that is scheduled
        # Whose prompt found no blocks, among how many, and the first of its hashes that was not cached.
        self._found_none: tuple[Sequence, int, list[bytes]] | None = None

    def add(self, sequence: Sequence, first: SampledToken | None = None) -> None:
        """See Scheduler. One to prefill here, or a verified one: that holds its blocks and, unless it searches, a first token."""
        self._searches.add(sequence, first)
        self._wait(sequence)

    def remove(self, key: Key) -> Sequence | None:
        """Take a sequence, or all of a beam search, out and release the blocks. None if it is not (or no longer) here."""
        found = self._searches.remove(key) or [one for one in self.waiting + self.running if one.key == key]
        for sequence in found:
            self._end(sequence)
        self._tell_speed()
        return found[0] if found else None

    def drop(self, sequence: Sequence) -> None:
        """Release a sequence that ``add`` could not take in."""
        self._searches.remove(sequence.key)
        self._end(sequence)

    def observe(self, rows: Seq[StepRow], step_s: float) -> None:
        """The step of ``rows`` took so long: what the next one may take of prompts follows from it."""
        num_prompt_tokens = sum(row.num_tokens for row in rows if row.num_tokens > 1)
        # A token that is drafted costs what one costs that generates.
        num_generating = sum(1 + len(row.draft) for row in rows if row.num_tokens == 1)
        self._steps.observe(num_prompt_tokens, num_generating, step_s)
        if self._drafts is not None and num_prompt_tokens == 0:
            self._drafts.row_cost.observe(num_generating, step_s)

    def on_failed(self, rows: Seq[StepRow], group: frozenset[Key] | None) -> list[Sequence]:
        """See Scheduler. A search begins anew: whether a block that its beams shared has been copied is not known."""
        suspects = super().on_failed(rows, group)
        for sequence in suspects:
            if sequence.sampling.beam_search is not None and sequence.status is SequenceStatus.RUNNING:
                self._preempt(sequence, Schedule(rows=[]))
        return suspects

    def check_integrity(self) -> None:
        """See Scheduler."""
        super().check_integrity()
        self._searches.check_integrity(self.waiting + self.running)
        assert (found := self._blocks.set_aside) == self._num_awaited, (
            f"{found} blocks set aside, not {self._num_awaited}"
        )

    def schedule(self, now_s: float, choice: Choice = EVERYBODY) -> Schedule:
        """Choose the next step's rows: allocates blocks, admits, preempts."""
        plan = Schedule(rows=[])
        self._choice = choice
        self._sort(now_s)
        self._found_none = None
        budget = self._max_batched_tokens
        generating = [one for one in choice.among(self.running) if one.num_uncomputed_tokens == 1]
        # Tokens that clients wait for come first: nobody's prompt may delay a sequence that generates, nor one that was
        # handed over complete.
        budget = self._continue_running(plan, budget, self._share(generating))
        budget = self._admit_complete(plan, budget, choice.among(self.waiting))
        budget = min(budget, self._steps.prompt_tokens(len(plan.rows)))
        budget = self._let_overtake(plan, budget)
        in_step = {row.sequence for row in plan.rows}
        prompts = [one for one in choice.among(self.running) if one not in in_step and one.num_uncomputed_tokens > 1]
        # Those of keys that are ahead of their share let others begin, too.
        ahead = [one for one in prompts if self._fair.is_ahead(one, now_s)]
        budget = self._continue_running(plan, budget, [one for one in prompts if one not in ahead])
        if ahead and not plan.preempted:
            budget = self._admit_prompts(plan, budget, may=lambda one: not self._fair.is_ahead(one, now_s))
        budget = self._continue_running(plan, budget, ahead)
        if not plan.preempted:
            self._admit_prompts(plan, budget)
        if self._drafts is not None and choice.group is None and all(row.num_tokens == 1 for row in plan.rows):
            self._draft(plan, self._drafts)
        return plan

    def _share(self, idle: list[Sequence]) -> list[Sequence]:
        """Which of those that may generate do so in this step: with several stages as many as in the steps of the others.

        Who is left is in one of the next: none has more, so all have places in as many steps as there are stages. A beam search is
        in one step.
        """
        if self._num_stages == 1:
            return idle
        num_generating = sum(1 for one in self.running if one.num_uncomputed_tokens == 1)
        keys = {one.key for one in idle[: -(-num_generating // self._num_stages)]}
        return [one for one in idle if one.key in keys]

    def _draft(self, plan: Schedule, drafts: Drafts) -> None:
        """Give the rows drafts. Nobody is preempted for one."""
        num_places = self._max_num_seqs - len(plan.rows)
        may_extend = self._num_left_over > 0
        limits = {
            row.sequence: min(
                self._max_model_len - row.sequence.num_tokens - 1,
                num_places if may_extend else self._num_left_in_blocks(row.sequence),
            )
            for row in plan.rows
            if row.samples
        }
        found = drafts.draft(limits, Room(len(plan.rows), num_places, self._steps.spare_s(len(plan.rows))))
        for place, row in enumerate(plan.rows):
            sequence = row.sequence
            draft = found.get(sequence, ())
            if draft and self._num_left_over > 0:
                self._extend(sequence, sequence.num_tokens + len(draft))
            if draft := draft[: self._num_left_in_blocks(sequence)]:
                plan.rows[place] = StepRow(sequence, 1, draft=draft)

    def _num_left_in_blocks(self, sequence: Sequence) -> int:
        """Tokens more that the sequence's blocks hold."""
        return sequence.num_blocks * self._blocks.block_size - sequence.num_tokens

    def _let_overtake(self, plan: Schedule, budget: int) -> int:
        """A row for the prompt that overtakes others, if one does; returns what is left of the budget."""
        prompts = [one for one in self.running if one.num_uncomputed_tokens > 1]
        prompts = self._choice.among(prompts + [one for one in self.waiting if not one.block_tables])
        # One alone: all that stand before the prompt that overtakes get their blocks, too.
        for place, share in overtaking([one.num_uncomputed_tokens for one in prompts], budget)[:1]:
            self._admit_prompts(plan, 0, last=prompts[place])
            if prompts[place].status is SequenceStatus.RUNNING:  # else there is no room
                budget += self._continue_running(plan, share, [prompts[place]]) - share
        return budget

    def ahead(self, flying: Seq[StepRow]) -> Schedule | None:
        """See Scheduler, and :mod:`kvrelay.decode_worker.run_ahead`. Nobody is preempted."""
        if self._drafts is not None and self._may_draft(flying, self._drafts):
            return None
        line = look_at(self.waiting, self._num_free_places())
        may_begin = line.prompt is not None and line.has_places and self._may_find_blocks(line.prompt)
        awaits_room = line.prompt is not None and not may_begin
        going_on = who_goes_on(flying, self.running, line.complete, self._max_model_len, awaits_room=awaits_room)
        if going_on is None:
            return None
        num_generating = len(going_on.generating) + len(line.complete)
        budget = min(self._max_batched_tokens - num_generating, self._steps.prompt_tokens(num_generating))
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
            if not self._extend(row.sequence, row.sequence.num_computed_tokens + row.num_ahead + row.num_tokens):
                return None
        self._admit_complete(plan, len(line.complete), self.waiting)
        return plan if plan.rows else None

    def _may_draft(self, flying: Seq[StepRow], drafts: Drafts) -> bool:
        """Whether the step behind may get drafts, or has to wait for tokens of which it is not known how many come."""
        if any(row.draft for row in flying):
            return True
        room = Room(len(flying), self._max_num_seqs - len(flying), None)
        # Who has finished with the step before is in the one under way all the same, and forgotten.
        return drafts.may_draft(
            (row.sequence for row in flying if row.sequence.status is not SequenceStatus.FINISHED), room
        )

    def _would_begin(self, prompt: Sequence, running: Seq[StepRow], budget: int) -> bool:
        """Whether a step with ``budget`` for prompts, of which ``running`` run, would have tokens for ``prompt`` or another."""
        num_left = [row.num_tokens for row in running]
        are_ahead = any(self._fair.is_ahead(row.sequence, self._now_s) for row in running)
        if sum(num_left) < budget or (are_ahead and not self._fair.is_ahead(prompt, self._now_s)):
            return True
        waiting = [one.num_uncomputed_tokens for one in self.waiting if not one.block_tables]
        return any(place >= len(num_left) for place, _ in overtaking(num_left + waiting, budget)[:1])

    def abandon(self, rows: Seq[StepRow]) -> None:
        """A step that ran ahead is over and yields nothing: release the blocks that only it still held."""
        for row in rows:
            if row.sequence.status is SequenceStatus.FINISHED:
                self._release(row.sequence)

    def postprocess(self, rows: Seq[StepRow], results: Seq[RowResult], behind: Seq[StepRow] = ()) -> list[Progress]:
        """Advance the sequences by what was computed; finished ones leave and their blocks are released.

        ``behind``: the step that runs already. Who finishes and is in it keeps its blocks until that step is postprocessed or
        abandoned: it writes to them.
        """
        progress: list[Progress] = []
        writes_on = {row.sequence for row in behind}
        self.abandon(rows)
        for row, result in zip(rows, results, strict=True):
            sequence = row.sequence
            if sequence.status is SequenceStatus.FINISHED:
                continue  # with a token of the step before: this one is too many
            self._advance(sequence, row.num_tokens)
            sequence.prompt_logprobs += result.prompt_logprobs
            if row.draft and self._drafts is not None:
                self._drafts.hear(sequence, len(row.draft), len(result.tokens) - 1)
            for place, token in enumerate(result.tokens):
                if place > 0:
                    self._advance(sequence, 1)  # the one in front was drafted: its K/V are there
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
                self._run(beam)
            for beam in change.ended:
                self._end(beam)
            if change.told is not None:
                progress.append(progress_of(change.told, None, 0, change.beams))
        self._tell_speed()
        return progress

    def _tell_speed(self) -> None:
        self.prompt_tokens_per_s = self._steps.tokens_per_s(
            sum(1 for one in self.running if one.num_uncomputed_tokens == 1)
        )

    def _continue_running(self, plan: Schedule, budget: int, sequences: Seq[Sequence]) -> int:
        """Rows for running ``sequences``, the most senior first; returns what is left of the budget."""
        for sequence in sequences:
            if budget == 0:
                break
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # preempted by a more senior one in this very loop
            num_tokens = min(budget, sequence.num_uncomputed_tokens)
            if self._make_room(sequence, sequence.num_computed_tokens + num_tokens, plan):
                plan.rows.append(StepRow(sequence, num_tokens))
                budget -= num_tokens
        return budget

    def _admit_complete(self, plan: Schedule, budget: int, waiting: Seq[Sequence]) -> int:
        """Let verified sequences join: they hold their blocks and need one token each, a beam search none yet."""
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
        """Let prompts that ``may`` begin in order while there is budget for them, and as far as ``last`` without.

        Returns what is left of the budget.
        """
        while budget > 0 or (last is not None and last.status is SequenceStatus.WAITING):
            line = look_at(self._choice.among(self.waiting), self._num_free_places())
            if line.prompt is None or not line.has_places or not may(line.prompt):
                break
            if self._find_blocks(line.prompt):
                budget -= self._admit(line.prompt, plan, budget)
                continue
            # Verified sequences that wait for a place in the batch hold blocks too. If they are all that stands
            # between the first prompt and its blocks, nobody would ever move.
            if self.running or (victim := self._least_senior_holder()) is None:
                break
            self._preempt(victim, plan)
        return budget

    def _may_find_blocks(self, sequence: Sequence) -> bool:
        """Whether there may be blocks for a prompt: not if there were none when it last looked, and neither have become more
        since nor is more of it cached."""
        if self._found_none is None or self._found_none[0] is not sequence:
            return True
        _, num_before, missing = self._found_none
        num_blocks = self._num_left_over
        self._found_none = (sequence, min(num_blocks, num_before), missing)
        return num_blocks > num_before or self._blocks.num_cached_prefix(missing) > 0

    @property
    def _num_left_over(self) -> int:
        """Blocks that whoever joins may have."""
        return self._blocks.num_allocatable - self._blocks.num_next

    def _num_free_places(self) -> int:
        return self._max_num_seqs - len(self.running) - self._searches.num_reserved

    def _admit(self, sequence: Sequence, plan: Schedule, budget: int) -> int:
        """Let a sequence with blocks run; returns the tokens that it computes in this step."""
        self.waiting.remove(sequence)
        self._blocks.set_aside = self._num_awaited
        self._fair.begin(sequence, self._now_s)
        self._run(sequence)
        plan.admitted.append(sequence)
        num_tokens = min(budget, sequence.num_uncomputed_tokens)
        if num_tokens:
            plan.rows.append(StepRow(sequence, num_tokens))
        return num_tokens

    def _find_blocks(self, sequence: Sequence) -> bool:
        # Else the next one that needs a block would take it from this one, which would have been computed for nothing.
        found = self._allocate(sequence, spare=self._blocks.num_next)
        if not found:
            hashes = self._reusable_hashes(sequence)
            missing = hashes[self._blocks.num_cached_prefix(hashes) :][:1]
            self._found_none = (sequence, self._num_left_over, missing)
        return found

    def _make_room(self, sequence: Sequence, num_tokens: int, plan: Schedule) -> bool:
        """Give a running sequence the blocks that it writes to until it has ``num_tokens``; False if it gave way itself.

        Or if the one that should give way is in a step that still runs: then it waits for that.
        """
        while not (self._extend(sequence, num_tokens) and self._searches.unshare(sequence, plan.copies)):
            victim = self._least_senior_holder()
            assert victim is not None, "nobody holds blocks, yet there is no room"
            if self._choice.is_busy(victim):
                return False
            self._preempt(victim, plan)
            if sequence.status is not SequenceStatus.RUNNING:
                return False
        return True

    def _extend(self, sequence: Sequence, num_tokens: int) -> bool:
        num_blocks = self._blocks.num_blocks_for(num_tokens)
        if num_blocks > sequence.num_blocks:
            fresh = self._blocks.extend(owner_of(sequence), num_blocks)
            if fresh is None:
                return False
            sequence.append_blocks(fresh)
        return True

    def _least_senior_holder(self) -> Sequence | None:
        holders = self.running + [sequence for sequence in self.waiting if sequence.block_tables]
        return max(holders, key=seniority, default=None)

    def _preempt(self, victim: Sequence, plan: Schedule) -> None:
        """Take the blocks of a sequence, or of all of its search; it waits to be computed again."""
        together = self._searches.restart(victim)
        for sequence in together:
            self._give_way(sequence, plan)
        victim = together[0]
        victim.num_preemptions += 1
        plan.preempted.append(victim)
        if victim not in self.waiting:
            self._wait(victim)
        else:
            self._blocks.set_aside = self._num_awaited

    def _give_way(self, sequence: Sequence, plan: Schedule) -> None:
        # A row of this step may already be the victim's, if it decodes while a more senior one prefills: it must not
        # compute into blocks that it no longer owns.
        plan.rows[:] = [row for row in plan.rows if row.sequence is not sequence]
        plan.copies.pop(sequence, None)
        self._forget_drafts(sequence)
        self._release(sequence)
        sequence.num_computed_tokens = 0
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            sequence.set_status(SequenceStatus.WAITING)

    def _sort(self, now_s: float) -> None:
        super()._sort(now_s)
        self._blocks.set_aside = self._num_awaited

    def _slides(self, sequence: Sequence) -> bool:
        """See Scheduler. Another beam may."""
        return sequence.sampling.beam_search is None

    @property
    def _num_awaited(self) -> int:
        """Blocks of the first that waits to be computed, its next ones too. Hand-offs would take each block that comes free."""
        first = next((sequence for sequence in self.waiting if not sequence.block_tables), None)
        if first is None:
            return 0
        num_blocks = self._blocks.num_physical_for(first.num_tokens, is_whole=not self._slides(first))
        return num_blocks + self._blocks.num_groups

    def _end(self, sequence: Sequence, *, keeps_blocks: bool = False) -> None:
        """Take a sequence out, wherever it is, and release its blocks, unless a step still writes to them."""
        self._leave(sequence)
        self._forget_drafts(sequence)
        if sequence.tags.start is not None:
            self._fair.settle(sequence, sequence.num_tokens)
        self._blocks.set_aside = self._num_awaited
        if not keeps_blocks:
            self._release(sequence)

    def _forget_drafts(self, sequence: Sequence) -> None:
        if self._drafts is not None:
            self._drafts.forget(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._blocks.release(owner_of(sequence), sequence.retention)
        sequence.block_tables = []
