"""The blocks of a worker's sequences: allocated after the cached prefix, published when full, and released."""

from __future__ import annotations

from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.owners import Owner, sequence_owner
from kvrelay.engine.step.sequence import Sequence


class SequenceBlocks:
    """Moves blocks between the block manager and sequences. Model thread only."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks

    def reusable_hashes(self, sequence: Sequence) -> list[bytes]:
        """Hashes of the leading blocks that may come from the prefix cache."""
        return sequence.block_hashes(sequence.num_cacheable_tokens // self._blocks.block_size)

    def allocate(self, sequence: Sequence, spare: int = 0) -> bool:
        """Give a sequence blocks for all its tokens, cached ones included. False if there are too few, beside ``spare`` ones."""
        num_blocks = self._blocks.num_blocks_for(sequence.num_tokens)
        hashes = self.reusable_hashes(sequence)
        is_whole = self._blocks.has_windows and not self._slides(sequence)
        if is_whole:  # another beam may share only the prompt
            hashes = hashes[: sequence.num_prompt_tokens // self._blocks.block_size]
        allocation = self._blocks.allocate(owner_of(sequence), num_blocks, hashes, spare=spare, is_whole=is_whole)
        if allocation is None:
            return False
        sequence.block_tables = allocation.block_tables
        sequence.num_computed_tokens = allocation.num_cached * self._blocks.block_size
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        return True

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        """``num_tokens`` more tokens are computed: publish blocks that are full now, and ``slide``."""
        num_full_before = sequence.num_computed_tokens // self._blocks.block_size
        sequence.num_computed_tokens += num_tokens
        num_full = sequence.num_computed_tokens // self._blocks.block_size
        if num_full > num_full_before:
            hashes = sequence.block_hashes(num_full)
            for index in range(num_full_before, num_full):
                self._blocks.publish(owner_of(sequence), index, hashes[index])
        self.slide(sequence)

    def slide(self, sequence: Sequence) -> None:
        """Release blocks that no later token sees, and take the blocks that the sequence needs next."""
        if self._blocks.has_windows and self._slides(sequence):
            sequence.append_blocks(self._blocks.slide(owner_of(sequence), sequence.num_computed_tokens))

    def _slides(self, sequence: Sequence) -> bool:
        """Whether no other sequence continues from an earlier token of it."""
        return True


def owner_of(sequence: Sequence) -> Owner:
    """The owner under which the sequence holds blocks."""
    return sequence_owner(sequence.key, sequence.beam)
