"""What a draft model knows of each sequence: its tokens and guesses, as a sequence of its own with blocks in the draft model's
pool.

A sequence is *followed* from the first draft of it until it is forgotten. Each time its text is compared with the guesses: K/V
of right guesses stay, later K/V are overwritten. Full blocks of text are published under the hashes of the worker's own blocks,
so that sequences with the same prompt, or one that comes back, find them.

Only bookkeeping, no steps. Model thread only.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import msgspec

from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.owners import sequence_owner
from kvrelay.engine.step.sequence import Sequence, SequenceStatus


@dataclass(slots=True)
class _Followed:
    """A sequence as the draft model has it."""

    own: Sequence  # with the draft model's blocks; its tokens are the text as it was last seen, and a guess behind it
    num_text_tokens: int
    num_published: int  # blocks


class DraftSequences:
    """``blocks``: the draft model's. Their size is that of the worker's blocks."""

    def __init__(self, blocks: BlockManager, max_model_len: int, vocab_size: int) -> None:
        """``max_model_len``, ``vocab_size``: of the draft model; a text beyond them is not followed."""
        self._blocks = blocks
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._followed: dict[Sequence, _Followed | None] = {}  # None: never again

    def may_follow(self, sequence: Sequence) -> bool:
        """Whether ``follow`` would find room for it now, behind a further token."""
        followed = self._followed.get(sequence)
        if followed is None:
            num_spare = self._blocks.num_next
            return sequence not in self._followed and self._num_missing(0, sequence.num_tokens + 1, num_spare) <= 0
        return self._num_missing(followed.own.num_blocks, sequence.num_tokens + 1, 0) <= 0

    def follow(self, sequence: Sequence) -> Sequence | None:
        """The draft model's own sequence with all tokens of ``sequence``, of which at least the last is to be computed.

        It is followed from now on. None: it has no room, or is beyond what the draft model takes.
        """
        followed = self._followed.get(sequence)
        start = 0 if followed is None else followed.num_text_tokens
        if followed is None and sequence in self._followed:
            return None
        if not self._takes(sequence.token_ids, start):
            self.forget(sequence)
            self._followed[sequence] = None
            return None
        if followed is None:
            followed = self._begin(sequence)
            if followed is None:
                return None
        own = followed.own = _with_text(followed.own, start, sequence.token_ids)
        followed.num_text_tokens = sequence.num_tokens
        self._publish(sequence, followed)
        return own if self.make_room(own, sequence.num_tokens) else None

    def make_room(self, own: Sequence, num_tokens: int) -> bool:
        """Blocks for so many tokens of the draft model's own sequence; False if there are none."""
        fresh = self._blocks.extend(sequence_owner(own.key), self._blocks.num_blocks_for(num_tokens))
        if fresh is None:
            return False
        own.append_blocks(fresh)
        return True

    def forget(self, sequence: Sequence) -> None:
        """Release what the draft model has of it. No step computes it."""
        followed = self._followed.pop(sequence, None)
        if followed is not None:
            followed.own.set_status(SequenceStatus.FINISHED)
            self._blocks.release(sequence_owner(followed.own.key))

    def forget_all(self) -> None:
        """As ``forget``, of all."""
        for sequence in list(self._followed):
            self.forget(sequence)

    def check_integrity(self) -> None:
        """Assert that the books agree with the block manager's: after every test."""
        self._blocks.check_integrity()
        owners = {sequence_owner(one.own.key): one.own.num_blocks for one in self._followed.values() if one is not None}
        assert self._blocks.owners() == owners, f"{self._blocks.owners()} hold blocks, followed are {owners}"

    def _num_missing(self, num_blocks: int, num_tokens: int, num_spare: int) -> int:
        """Physical blocks that are not there for so many tokens; 0 or less: there are enough."""
        num_fresh = max(0, self._blocks.num_blocks_for(num_tokens) - num_blocks)
        return num_fresh * self._blocks.num_groups + num_spare - self._blocks.num_allocatable

    def _takes(self, token_ids: Seq[int], start: int) -> bool:
        return len(token_ids) < self._max_model_len and max(token_ids[start:], default=0) < self._vocab_size

    def _begin(self, sequence: Sequence) -> _Followed | None:
        num_tokens = sequence.num_tokens
        hashes = sequence.block_hashes((num_tokens - 1) // self._blocks.block_size)
        # All of it, whatever windows the layers have: a guess that fails leads back to earlier tokens.
        allocation = self._blocks.allocate(
            sequence_owner(sequence.key),
            self._blocks.num_blocks_for(num_tokens),
            hashes,
            spare=self._blocks.num_next,
            is_whole=True,
        )
        if allocation is None:
            return None
        # A guess is right if it is what the model samples: so it is sampled by the same rules and the same noise. A guide's state
        # is the worker's own, and goes on with its tokens alone.
        sampling = msgspec.structs.replace(
            sequence.sampling, guide=None, processors=(), num_logprobs=None, num_prompt_logprobs=None
        )
        own = Sequence(
            sequence.request_id,
            sequence.attempt,
            list(sequence.token_ids),
            sequence.num_prompt_tokens,
            sampling,
            sequence.arrival_s,
            block_tables=allocation.block_tables,
            num_computed_tokens=allocation.num_cached * self._blocks.block_size,
        )
        followed = self._followed[sequence] = _Followed(own, num_tokens, allocation.num_cached)
        return followed

    def _publish(self, sequence: Sequence, followed: _Followed) -> None:
        num_full = followed.own.num_computed_tokens // self._blocks.block_size
        if num_full > followed.num_published:
            hashes = sequence.block_hashes(num_full)
            for index in range(followed.num_published, num_full):
                self._blocks.publish(sequence_owner(followed.own.key), index, hashes[index])
            followed.num_published = num_full


def _with_text(own: Sequence, start: int, text: Seq[int]) -> Sequence:
    """The draft model's sequence behind further tokens of the text, of which it had ``start``; another one if it had guessed wrong.

    Another one, because tokens that an engine has heard of a sequence are never taken back.
    """
    guessed, came = own.token_ids[start:], text[start:]
    pairs = zip(guessed, came, strict=False)
    num_same = start + next(
        (place for place, (one, other) in enumerate(pairs) if one != other), min(len(guessed), len(came))
    )
    # The last token is computed again if need be: what comes next is sampled behind it.
    num_computed_tokens = min(own.num_computed_tokens, num_same, len(text) - 1)
    if num_same < own.num_tokens:
        own.set_status(SequenceStatus.FINISHED)
        own = Sequence(
            own.request_id,
            own.attempt,
            list(text),
            own.num_prompt_tokens,
            own.sampling,
            own.arrival_s,
            block_tables=own.block_tables,
        )
    else:
        own.token_ids += text[num_same:]
    own.num_computed_tokens = num_computed_tokens
    return own
