"""Where a chunk of a prompt may end, and so how many tokens it has. A pure policy.

Blocks are sent whole. So a chunk ends with a block or with the prompt, unless blocks are large relative to a step. With states it
must end with a block, because a failed chunk is computed again from the state before it.

Where images must be computed whole (:mod:`kvrelay.worker.scheduling.whole_images`), a step may get larger than it should.
"""

from __future__ import annotations

from kvrelay.engine.step.sequence import Sequence
from kvrelay.worker.scheduling.whole_images import chunk, first_end, last_end, num_together

_MAX_WASTE = 8  # what a chunk gives up to end with a block is at most one of so many parts of the largest step


class ChunkEnds:
    """The ends of a worker's chunks."""

    def __init__(self, block_size: int, max_step_tokens: int, *, has_states: bool) -> None:
        """``has_states``: see BlockManager."""
        self._block_size = block_size
        self._max_step_tokens = max_step_tokens
        self._has_states = has_states
        self._unit = block_size if has_states else 1  # chunks end at multiples of it

    def num_tokens(self, sequence: Sequence, start: int, share: int, room: int | None, *, must: bool) -> int:
        """How many tokens to compute from ``start`` on; 0: the prompt waits.

        ``share``: tokens that it should take at most. ``room``: those that it may take for an image that must be computed whole;
        None: any number. ``must``: it takes some even if it would get only part of a block, or would need more than its share.
        """
        spans, length = sequence.whole_spans, sequence.num_tokens
        num_tokens = chunk(spans, start, self._whole_blocks(sequence, start, share), length, room, self._unit)
        if num_tokens or not must or self.num_together(sequence, start):
            return num_tokens
        if self._has_states:
            return first_end(spans, start, length, self._unit) - start
        return last_end(spans, start, start + share, length) - start

    def num_together(self, sequence: Sequence, start: int) -> int:
        """Tokens from ``start`` on that a step must compute together because of an image; 0 if it need not."""
        return num_together(sequence.whole_spans, start, sequence.num_tokens, self._unit)

    def _whole_blocks(self, sequence: Sequence, start: int, share: int) -> int:
        """How many of ``share`` tokens to compute: all that are left, or else up to a block's end.

        A prompt that would get only part of a block gets nothing: it would hold all its blocks for that.
        """
        num_left = sequence.num_tokens - start
        if share >= num_left:
            return num_left
        num_past = (start + share) % self._block_size
        is_small = self._has_states or _MAX_WASTE * num_past <= self._max_step_tokens
        return max(0, share - num_past) if is_small else share
