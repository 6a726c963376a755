"""A draft model's state of each sequence: its text and guesses, as another sequence with blocks in the draft model's pool.

A sequence is *followed* from its first draft until it is forgotten. Before each draft its text is compared with the guesses. K/V of
right guesses stay; later K/V are overwritten. Full blocks of text are published under the hashes of the worker's own blocks. So
sequences with the same prompt find them, and so does a sequence that comes back.

Only bookkeeping, no steps. Model thread only.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import msgspec

from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.owners import sequence_owner
from kvrelay.engine.step.sequence import Sequence, SequenceStatus


@dataclass(slots=True)
class _Followed:
    """The draft model's state of one sequence."""

    own: Sequence  # with the draft model's blocks; its tokens are the last seen text, then a guess
    num_text_tokens: int
    num_published: int  # blocks


class DraftSequences:
    """All followed sequences. ``blocks``: the draft model's, of the same size as the worker's."""

    def __init__(self, blocks: BlockManager, max_model_len: int, vocab_size: int) -> None:
        """``max_model_len``, ``vocab_size``: the draft model's limits. A text beyond them is not followed."""
        self._blocks = blocks
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._followed: dict[Sequence, _Followed | None] = {}  # None: never follow again

    def may_follow(self, sequence: Sequence) -> bool:
        """Whether ``follow`` would find room now, if the sequence had one more token."""
        followed = self._followed.get(sequence)
        if followed is None:
            num_spare = self._blocks.num_next
            return sequence not in self._followed and self._num_missing(0, sequence.num_tokens + 1, num_spare) <= 0
        return self._num_missing(followed.own.num_blocks, sequence.num_tokens + 1, 0) <= 0

    def follow(self, sequence: Sequence) -> Sequence | None:
        """Follow ``sequence``. Returns the draft model's own sequence with all its tokens; at least the last is not computed.

        None: there is no room, or the text is beyond the draft model's limits.
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
        """Give the draft model's sequence ``own`` blocks for ``num_tokens``. False if there are too few."""
        fresh = self._blocks.extend(sequence_owner(own.key), self._blocks.num_blocks_for(num_tokens))
        if fresh is None:
            return False
        own.append_blocks(fresh)
        return True

    def forget(self, sequence: Sequence) -> None:
        """Release the draft model's state of ``sequence``. No running step may use it."""
        followed = self._followed.pop(sequence, None)
        if followed is not None:
            followed.own.set_status(SequenceStatus.FINISHED)
            self._blocks.release(sequence_owner(followed.own.key))

    def forget_all(self) -> None:
        """Forget all sequences."""
        for sequence in list(self._followed):
            self.forget(sequence)

    def check_integrity(self) -> None:
        """Assert that the books agree with the block manager's. Called after every test."""
        self._blocks.check_integrity()
        owners = {sequence_owner(one.own.key): one.own.num_blocks for one in self._followed.values() if one is not None}
        assert self._blocks.owners() == owners, f"{self._blocks.owners()} hold blocks, followed are {owners}"

    def _num_missing(self, num_blocks: int, num_tokens: int, num_spare: int) -> int:
        """Physical blocks that are missing for ``num_tokens`` tokens; 0 or less: enough."""
        num_fresh = max(0, self._blocks.num_blocks_for(num_tokens) - num_blocks)
        return num_fresh * self._blocks.num_groups + num_spare - self._blocks.num_allocatable

    def _takes(self, token_ids: Seq[int], start: int) -> bool:
        return len(token_ids) < self._max_model_len and max(token_ids[start:], default=0) < self._vocab_size

    def _within_vocabulary(self, sampling: SamplingParams) -> SamplingParams:
        """The parameters without rules for tokens that only the worker's model has: the draft model has no logits for these."""
        size = self._vocab_size
        return msgspec.structs.replace(
            sampling,
            logit_bias=tuple((token_id, bias) for token_id, bias in sampling.logit_bias if token_id < size),
            allowed_token_ids=tuple(token_id for token_id in sampling.allowed_token_ids if token_id < size),
            bad_words=tuple(word for word in sampling.bad_words if max(word) < size),
        )

    def _begin(self, sequence: Sequence) -> _Followed | None:
        num_tokens = sequence.num_tokens
        hashes = sequence.block_hashes((num_tokens - 1) // self._blocks.block_size)
        # Allocate all blocks, whatever windows the layers have: after a wrong guess, earlier tokens are needed again.
        allocation = self._blocks.allocate(
            sequence_owner(sequence.key),
            self._blocks.num_blocks_for(num_tokens),
            hashes,
            spare=self._blocks.num_next,
            is_whole=True,
        )
        if allocation is None:
            return None
        # A guess is right if the model samples the same. So it uses the same sampling parameters and noise. The guide is
        # left out, because its state is the worker's and advances only with the worker's tokens.
        sampling = msgspec.structs.replace(
            self._within_vocabulary(sequence.sampling),
            guide=None,
            processors=(),
            num_logprobs=None,
            num_prompt_logprobs=None,
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
    """The draft model's sequence with the text's tokens from ``start`` on. A new sequence if it had guessed wrong.

    New, because an engine never takes back a sequence's tokens.
    """
    guessed, came = own.token_ids[start:], text[start:]
    pairs = zip(guessed, came, strict=False)
    num_same = start + next(
        (place for place, (one, other) in enumerate(pairs) if one != other), min(len(guessed), len(came))
    )
    # The last token is computed again if necessary, because the next one is sampled after it.
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
