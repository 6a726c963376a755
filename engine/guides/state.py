"""The state of one sequence's grammar: llguidance's matcher behind the GuideState protocol.

One thread at a time uses it: the compiler's until the state is handed out, then the model thread. If it meets a dead end, or a
grammar that is too ambiguous, the next ``accept`` says so: trouble of one sequence does not end the step.

A mask takes about 20 us in most grammars. If the last one was slow (counts in a regular expression), another thread makes the next
one as soon as the token is accepted, while the model computes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from concurrent.futures import Executor, Future

import llguidance
import numpy as np
import numpy.typing as npt

from kvrelay.engine.guides.errors import UnsupportedGuideError

_SLOW_S = 1e-4  # slower masks are made on a thread
_TOO_SLOW_S = 1e-3  # with masks this slow, drafts are not used


class GrammarState:
    """Implements :class:`kvrelay.engine.step.sequence.GuideState`."""

    def __init__(
        self,
        vocabulary: llguidance.LLTokenizer,
        grammar: str,
        stop_token_ids: Seq[int],
        threads: Executor | None = None,
    ) -> None:
        """``grammar``: in Lark. ``stop_token_ids``: tokens that may come where the text may end; if empty, it ends only where it
        must.

        ``threads``: for slow masks. Raises UnsupportedGuideError if llguidance refuses the grammar.
        """
        self._threads = threads
        self._coming: Future[npt.NDArray[np.int32]] | None = None
        self._mask_s = 0.0  # duration of the last mask
        limits = llguidance.LLParserLimits(
            initial_lexer_fuel=20_000_000,  # enough for a schema of 64 KiB; the compiling process has its own limits
            max_lexer_states=50_000,  # about 100 MB
            verbose_errors=False,
        )
        self._matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        if self._matcher.is_error():
            raise UnsupportedGuideError(self._matcher.get_error())
        self.num_words = -(-vocabulary.vocab_size // 32)  # words of a bitmask
        self._stop_bits = _bits(stop_token_ids, self.num_words)
        self._end_bits = _bits([vocabulary.eos_token], self.num_words)
        self._next: npt.NDArray[np.int32] | None = None  # the mask at the current position, if it is already known
        self._is_complete = False
        self._trouble: str | None = None

    def fill(self, bitmask: npt.NDArray[np.int32]) -> None:
        """See GuideState. Clears the bits of all other tokens; in a dead end it clears all."""
        bitmask[:] = self._here()

    def forced(self, most: int) -> tuple[int, ...]:
        """See GuideState. A grammar forces bytes. llguidance knows how a tokenizer splits them, up to where they may continue.

        After tokens that were split in another way it does not. There the mask tells, if it allows a single token.
        """
        found: list[int] = []
        if not self._may_draft():
            return ()
        while len(found) < most and not self._matcher.is_stopped():
            self._matcher.compute_ff_bytes()  # without this call, llguidance has no forced tokens
            following = self._matcher.compute_ff_tokens()[: most - len(found)] or self._only_one(is_here=not found)
            num_taken = self._matcher.try_consume_tokens(following)
            found += following[:num_taken]
            if not num_taken or num_taken < len(following):
                break
        self._matcher.rollback(len(found))
        return tuple(found)

    def num_allowed(self, draft: Seq[int]) -> int:
        """See GuideState."""
        if not self._may_draft():
            return 0
        num_text = next((place for place, token_id in enumerate(draft) if self._is_stop(token_id)), len(draft))
        num_valid: int = self._matcher.validate_tokens(list(draft[:num_text]))
        return num_valid

    def fill_along(self, bitmask: npt.NDArray[np.int32], draft: Seq[int]) -> None:
        """See GuideState."""
        num_taken, trouble = 0, self._trouble
        for words, token_id in zip(bitmask, draft, strict=True):
            if self._matcher.is_stopped():
                break
            taken = self._matcher.consume_token(token_id)
            assert taken, f"a guide was drafted {draft}, and does not allow token {num_taken} of it"
            num_taken += 1
            if not self._matcher.is_stopped():
                words[:] = self._mask()
        self._matcher.rollback(num_taken)
        self._trouble = trouble  # it is that of a place where it does not stand

    def accept(self, token_id: int) -> None:
        """See GuideState. The ValueError's message is for the client."""
        self._have_matcher()  # the thread that makes a mask reads the state that the token changes
        if self._trouble is not None:
            raise ValueError(self._trouble)
        if self._is_stop(token_id) or not self._matcher.consume_token(token_id):
            raise ValueError(f"token {token_id} came where the guide does not allow it")
        self._next = None
        self._is_complete = self._matcher.is_stopped() and self._matcher.is_accepting()
        if self._mask_s > _SLOW_S and not self._is_complete and self._threads is not None:
            self._coming = self._threads.submit(self._mask)

    @property
    def trouble(self) -> str | None:
        """Why no token can be accepted any more."""
        return self._trouble

    @property
    def is_complete(self) -> bool:
        """See GuideState."""
        return self._is_complete

    def _may_draft(self) -> bool:
        """Whether the grammar can be followed further, and fast: a draft needs one mask per token."""
        if self._is_complete or self._mask_s > _TOO_SLOW_S:
            return False
        self._have_matcher()
        return self._trouble is None

    def _have_matcher(self) -> None:
        """Wait for the thread that makes a mask, which uses the matcher."""
        if self._coming is not None:
            self._next, self._coming = self._coming.result(), None

    def _here(self) -> npt.NDArray[np.int32]:
        """The mask at the current position."""
        self._have_matcher()
        if self._next is None:
            self._next = self._mask()
        return self._next

    def _only_one(self, *, is_here: bool) -> list[int]:
        """The only token that may follow the tokens that the matcher has taken; empty if there are several, or the text may end.

        ``is_here``: the matcher is at the current position, not behind a draft.
        """
        if is_here:
            mask = self._here()
        else:
            trouble = self._trouble
            mask = self._mask()
            self._trouble = trouble  # it is that of a place where it does not stand
        words = np.flatnonzero(mask)
        bits = int(mask.view(np.uint32)[words[0]]) if len(words) == 1 else 0
        if bits.bit_count() != 1:
            return []
        token_id = 32 * int(words[0]) + bits.bit_length() - 1
        return [] if self._is_stop(token_id) else [token_id]

    def _is_stop(self, token_id: int) -> bool:
        return bool(self._stop_bits.view(np.uint32)[token_id // 32] >> np.uint32(token_id % 32) & np.uint32(1))

    def _mask(self) -> npt.NDArray[np.int32]:
        mask = np.zeros_like(self._stop_bits)
        start_s = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._mask_s = time.thread_time() - start_s
        error, _, _ = self._matcher.get_error().partition("\n")
        if error:
            mask[:] = 0  # only the end of the text may follow, and there is no stop token for it
        may_end = np.any(mask & self._end_bits)
        mask &= ~(self._end_bits | self._stop_bits)
        if may_end:
            mask |= self._stop_bits
        if error and error != "NoExtensionBias":
            self._trouble = f"the guide is too ambiguous to follow ({error}): make it simpler"
        elif not may_end and not mask.any():
            self._trouble = "the guide allows no token at all here: nothing can match it"
        return mask


def _bits(token_ids: Seq[int], num_words: int) -> npt.NDArray[np.int32]:
    bits = np.zeros(num_words, dtype=np.int32)
    for token_id in token_ids:
        bits.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)
    return bits
