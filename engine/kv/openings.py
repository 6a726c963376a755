"""The blocks that a new owner gets in each group of layers: found before anything changes.

Not thread-safe: the block manager calls it under its lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

from kvrelay.common.kv_geometry import Window, first_block, reach
from kvrelay.engine.kv.physical_blocks import PhysicalBlocks


@dataclass(frozen=True, slots=True)
class Opening:
    """The blocks that a new owner gets in one group."""

    first: int  # index of the first block that it needs
    found: list[int | None]  # the published blocks from there on; None: it needs a fresh one there

    @property
    def shared(self) -> list[int]:
        """The published blocks."""
        return [block_id for block_id in self.found if block_id is not None]

    @property
    def num_fresh(self) -> int:
        """The number of fresh blocks."""
        return self.found.count(None)


class Openings:
    """Finds them in a pool's blocks."""

    def __init__(
        self, physical: PhysicalBlocks, windows: Sequence[Window | None], block_size: int, max_step_tokens: int
    ) -> None:
        """``windows``: per group; None: no window. ``max_step_tokens``: most tokens of a sequence that a step computes."""
        self._physical = physical
        self._windows = windows
        self._block_size = block_size
        self._max_step_tokens = max_step_tokens

    def of_sequence(
        self, num_blocks: int, published: Sequence[bytes], num_computed_tokens: int, *, is_whole: bool
    ) -> list[Opening]:
        """What a sequence of ``num_blocks`` gets, by group, to go on at ``num_computed_tokens``.

        ``published``: hashes of its leading blocks that every group shares as far as it needs them. ``is_whole``: in a group with a
        window it gets all blocks to the end, not only as many as it needs at a time.
        """
        openings = []
        for group, window in enumerate(self._windows):
            first = min(first_block(window, num_computed_tokens, self._block_size), num_blocks)
            end = num_blocks if is_whole else self.end(window, first, num_blocks)
            shared = self._physical.published(group, published[first:])
            openings.append(Opening(first, [*shared, *repeat(None, max(0, end - first - len(shared)))]))
        return openings

    def of_return(self, hashes: Sequence[bytes]) -> list[Opening]:
        """What is needed, by group, to go on behind the blocks with these ``hashes``, whichever of them are published."""
        openings = []
        for group, window in enumerate(self._windows):
            first = first_block(window, len(hashes) * self._block_size, self._block_size)
            openings.append(Opening(first, [self._physical.find(group, one) for one in hashes[first:]]))
        return openings

    def end(self, window: Window | None, first: int, num_blocks: int) -> int:
        """The end of a group's table if the group needs block ``first`` and those after it."""
        if window is None:
            return num_blocks
        return min(num_blocks, first + reach(window, self._max_step_tokens, self._block_size))
