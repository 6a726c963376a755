"""The blocks of the running batch: which sequence gets a block, which one is preempted for it, and what stays reserved.

When blocks run out, the youngest sequence of the lowest class gives up its blocks and waits to be recomputed. So the most
senior sequence is always served. While a sequence waits for blocks, hand-offs leave as many free as it needs
(``BlockManager.set_aside``).
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
    """Of the sequences in ``places``, some of which are beams of one of the ``searches``."""

    def __init__(
        self, blocks: BlockManager, places: Places, searches: BeamSearches, on_preempted: Callable[[Sequence], None]
    ) -> None:
        """``on_preempted``: of each sequence that has just given its blocks up, beams too."""
        super().__init__(blocks)
        self._places = places
        self._searches = searches
        self._on_preempted = on_preempted
        # Whose prompt found no blocks, among how many, and the first of its hashes that was not cached.
        self._found_none: tuple[Sequence, int, list[bytes]] | None = None

    # -- for prompts that begin ------------------------------------------------------------------------------------

    @property
    def num_left_over(self) -> int:
        """Blocks that whoever joins may have."""
        return self._blocks.num_allocatable - self._blocks.num_next

    def find(self, sequence: Sequence) -> bool:
        """Give a prompt its blocks; False if there are none."""
        # Without a spare one the next that needs a block would take it from this one, which would have been computed for nothing.
        found = self.allocate(sequence, spare=self._blocks.num_next)
        if not found:
            hashes = self.reusable_hashes(sequence)
            missing = hashes[self._blocks.num_cached_prefix(hashes) :][:1]
            self._found_none = (sequence, self.num_left_over, missing)
        return found

    def may_find(self, sequence: Sequence) -> bool:
        """Whether there may be blocks for a prompt: not if there were none when it last looked, and neither have become more
        since nor is more of it cached."""
        if self._found_none is None or self._found_none[0] is not sequence:
            return True
        _, num_before, missing = self._found_none
        num_blocks = self.num_left_over
        self._found_none = (sequence, min(num_blocks, num_before), missing)
        return num_blocks > num_before or self._blocks.num_cached_prefix(missing) > 0

    def look_again(self) -> None:
        """Forget failed searches for blocks, because a new step is scheduled."""
        self._found_none = None

    # -- for those that run ----------------------------------------------------------------------------------------

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give a sequence blocks for ``num_tokens`` in all; False if there are none."""
        num_blocks = self._blocks.num_blocks_for(num_tokens)
        if num_blocks > sequence.num_blocks:
            fresh = self._blocks.extend(owner_of(sequence), num_blocks)
            if fresh is None:
                return False
            sequence.append_blocks(fresh)
        return True

    def make_room(self, sequence: Sequence, num_tokens: int, plan: Schedule, choice: Choice) -> bool:
        """Give a running sequence the blocks that it writes to until it has ``num_tokens``; False if it gave way itself.

        Or if the one that should give way is in a step that still runs: then it waits for that.
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
        """Tokens more that the sequence's blocks hold."""
        return sequence.num_blocks * self._blocks.block_size - sequence.num_tokens

    # -- for the most senior, from the least ----------------------------------------------------------------------

    def least_senior_holder(self) -> Sequence | None:
        """The sequence that is preempted next; None if no sequence holds blocks."""
        holders = self._places.running + [sequence for sequence in self._places.waiting if sequence.block_tables]
        return max(holders, key=seniority, default=None)

    def preempt(self, victim: Sequence, plan: Schedule) -> None:
        """Take the blocks of a sequence, or of all of its search; it waits to be computed again."""
        together = self._searches.restart(victim)
        for sequence in together:
            self._give_way(sequence, plan)
        victim = together[0]
        victim.num_preemptions += 1
        plan.preempted.append(victim)
        if victim not in self._places.waiting:
            self._places.wait(victim)
        self.set_aside()

    def _give_way(self, sequence: Sequence, plan: Schedule) -> None:
        # A row of this step may already be the victim's, if it decodes while a more senior one prefills: it must not
        # compute into blocks that it no longer owns.
        plan.rows[:] = [row for row in plan.rows if row.sequence is not sequence]
        plan.copies.pop(sequence, None)
        self._on_preempted(sequence)
        self.release(sequence)
        sequence.num_computed_tokens = 0
        if sequence.status is SequenceStatus.RUNNING:
            self._places.running.remove(sequence)
            sequence.set_status(SequenceStatus.WAITING)

    def release(self, sequence: Sequence) -> None:
        """It holds none any more."""
        self._blocks.release(owner_of(sequence), sequence.retention)
        sequence.block_tables = []

    # -- for those that wait ---------------------------------------------------------------------------------------

    def set_aside(self) -> None:
        """Keep free what the first that waits needs: hand-offs would take each block. To be called when that may be another."""
        self._blocks.set_aside = self._num_awaited

    def check_integrity(self) -> None:
        """Assert that so many are kept as should be."""
        found = self._blocks.set_aside
        assert found == self._num_awaited, f"{found} blocks set aside, not {self._num_awaited}"

    @property
    def _num_awaited(self) -> int:
        """Blocks of the first that waits to be computed, its next ones too."""
        first = next((sequence for sequence in self._places.waiting if not sequence.block_tables), None)
        if first is None:
            return 0
        num_blocks = self._blocks.num_physical_for(first.num_tokens, is_whole=not self._slides(first))
        return num_blocks + self._blocks.num_groups

    def _slides(self, sequence: Sequence) -> bool:
        """See SequenceBlocks. Another beam may."""
        return sequence.sampling.beam_search is None
