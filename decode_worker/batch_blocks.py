"""The blocks of the running batch: which sequence gets a block, which is preempted for it, and what stays reserved.

When blocks run out, the youngest sequence of the lowest class loses its blocks and waits to be computed again. So the most senior
sequence always advances. A sequence whose images only another worker can read ends instead; its request goes on there. While a
sequence waits for blocks, hand-offs leave as many allocatable as it needs (``BlockManager.set_aside``).
"""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.common.fair_queue import seniority
from kvrelay.engine.beams.searches import BeamSearches
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.step.sequence import Sequence, SequenceStatus
from kvrelay.worker.scheduling.choice import Choice
from kvrelay.worker.scheduling.places import Places
from kvrelay.worker.scheduling.scheduler import Schedule
from kvrelay.worker.scheduling.sequence_blocks import SequenceBlocks, owner_of


class BatchBlocks(SequenceBlocks):
    """The blocks of the sequences in ``places``. Some of these are beams of one of the ``searches``."""

    def __init__(
        self,
        blocks: BlockManager,
        places: Places,
        searches: BeamSearches,
        on_preempted: Callable[[Sequence], None],
        on_lost: Callable[[Sequence], None],
    ) -> None:
        """``on_preempted``: called with each sequence, also each beam, that has just lost its blocks.

        ``on_lost``: must remove the sequence, or its whole search, which has just lost its blocks and cannot start again.
        """
        super().__init__(blocks)
        self._places = places
        self._searches = searches
        self._on_preempted = on_preempted
        self._on_lost = on_lost
        # The prompt that found no blocks, how many there were, and the first of its hashes that was not cached.
        self._found_none: tuple[Sequence, int, list[bytes]] | None = None

    # -- for prompts that begin ------------------------------------------------------------------------------------

    @property
    def num_left_over(self) -> int:
        """Blocks that a joining sequence may have."""
        return self._blocks.num_allocatable - self._blocks.num_next

    @property
    def num_left_over_tokens(self) -> int:
        """Tokens of one sequence that those blocks hold at least."""
        return max(0, self.num_left_over) // self._blocks.num_groups * self._blocks.block_size

    def find(self, sequence: Sequence) -> bool:
        """Give a prompt its blocks. False if there are too few."""
        # Without spare blocks, the next sequence in need would preempt this one, whose computation would be lost.
        found = self.allocate(sequence, spare=self._blocks.num_next)
        if not found:
            hashes = self.reusable_hashes(sequence)
            missing = hashes[self._blocks.num_cached_prefix(hashes) :][:1]
            self._found_none = (sequence, self.num_left_over, missing)
        return found

    def may_find(self, sequence: Sequence) -> bool:
        """False if ``find`` failed for it, and since then no blocks came free and no more of the prompt was cached."""
        if self._found_none is None or self._found_none[0] is not sequence:
            return True
        _, num_before, missing = self._found_none
        num_blocks = self.num_left_over
        self._found_none = (sequence, min(num_blocks, num_before), missing)
        return num_blocks > num_before or self._blocks.num_cached_prefix(missing) > 0

    def look_again(self) -> None:
        """Forget failed ``find``s, because a new step is scheduled."""
        self._found_none = None

    # -- for those that run ----------------------------------------------------------------------------------------

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give a sequence blocks for ``num_tokens`` in all. False if there are too few."""
        num_blocks = self._blocks.num_blocks_for(num_tokens)
        if num_blocks > sequence.num_blocks:
            fresh = self._blocks.extend(owner_of(sequence), num_blocks)
            if fresh is None:
                return False
            sequence.append_blocks(fresh)
        return True

    def make_room(self, sequence: Sequence, num_tokens: int, plan: Schedule, choice: Choice) -> bool:
        """Give a running sequence writable blocks for ``num_tokens`` tokens, preempting less senior ones. False if it got none.

        It gets none if it was itself preempted, or if the victim is in a running step, which it must wait for.
        """
        while not (self.extend(sequence, num_tokens) and self._searches.unshare(sequence, plan.copies)):
            victim = self.least_senior_holder()
            assert victim is not None, "nobody holds blocks, yet there is no room"
            if choice.is_busy(victim):
                return False
            self.preempt(victim, plan)
            if sequence.status is not SequenceStatus.RUNNING:
                return False
        return True

    def num_left(self, sequence: Sequence) -> int:
        """How many more tokens the sequence's blocks hold."""
        return sequence.num_blocks * self._blocks.block_size - sequence.num_tokens

    # -- for the most senior, from the least ----------------------------------------------------------------------

    def least_senior_holder(self) -> Sequence | None:
        """The sequence to preempt next; None if no sequence holds blocks."""
        holders = self._places.running + [sequence for sequence in self._places.waiting if sequence.block_tables]
        return max(holders, key=seniority, default=None)

    def preempt(self, victim: Sequence, plan: Schedule) -> None:
        """Take the blocks of a sequence, or of its whole search. It waits to be computed again, or ends if it cannot be."""
        together = self._searches.restart(victim)
        for sequence in together:
            self._give_way(sequence, plan)
        victim = together[0]
        if not victim.may_start_again:
            return self._on_lost(victim)
        victim.num_preemptions += 1
        plan.preempted.append(victim)
        if victim not in self._places.waiting:
            self._places.wait(victim)
        self.set_aside()

    def _give_way(self, sequence: Sequence, plan: Schedule) -> None:
        # The victim may have a row in this step, if it decodes while a more senior one prefills. It no longer owns its
        # blocks.
        plan.rows[:] = [row for row in plan.rows if row.sequence is not sequence]
        plan.copies.pop(sequence, None)
        self._on_preempted(sequence)
        self.release(sequence)
        sequence.num_computed_tokens = 0
        if sequence.status is SequenceStatus.RUNNING:
            self._places.running.remove(sequence)
            sequence.set_status(SequenceStatus.WAITING)

    def release(self, sequence: Sequence) -> None:
        """Release the sequence's blocks."""
        self._blocks.release(owner_of(sequence), sequence.retention)
        sequence.block_tables = []

    # -- for those that wait ---------------------------------------------------------------------------------------

    def set_aside(self) -> None:
        """Reserve what the first waiting sequence needs, which hand-offs would take. Call this when the first may have changed."""
        self._blocks.set_aside = self._num_awaited

    def check_integrity(self) -> None:
        """Assert that the right number of blocks is set aside."""
        found = self._blocks.set_aside
        assert found == self._num_awaited, f"{found} blocks set aside, not {self._num_awaited}"

    @property
    def _num_awaited(self) -> int:
        """Blocks that the first waiting sequence needs to be computed, with one more in each group."""
        first = next((sequence for sequence in self._places.waiting if not sequence.block_tables), None)
        if first is None:
            return 0
        num_blocks = self._blocks.num_physical_for(first.num_tokens, is_whole=not self._slides(first))
        return num_blocks + self._blocks.num_groups

    def _slides(self, sequence: Sequence) -> bool:
        """See SequenceBlocks. False for a beam search: another beam may continue from an earlier token."""
        return sequence.sampling.beam_search is None
