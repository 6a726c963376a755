"""Where one sequence stands in its grammar: llguidance's matcher behind the GuideState protocol.

Touched by one thread at a time: by the compiler's until the state is handed out, by the model thread from then on. A state that
met a dead end, or a grammar too ambiguous to follow, says so at the next ``accept``: one sequence's trouble ends no step.

A mask takes some 20 us, in most grammars. Where the last one took long (counts in a regular expression), the next one is made on
another thread from the moment that the token came: while the model computes, which is when nobody needs it yet.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from concurrent.futures import Executor, Future

import llguidance
import numpy as np
import numpy.typing as npt

from kvrelay.engine.guides.errors import UnsupportedGuideError

_SLOW_S = 1e-4  # a mask that takes longer is worth a thread
_TOO_SLOW_S = 1e-3  # … and if so long, a draft is not worth its masks


class GrammarState:
    """Implements :class:`kvrelay.engine.step.sequence.GuideState`."""

    def __init__(
        self,
        vocabulary: llguidance.LLTokenizer,
        grammar: str,
        stop_token_ids: Seq[int],
        threads: Executor | None = None,
    ) -> None:
        """``grammar``: in Lark. ``stop_token_ids``: what may come where it may end; empty: nothing, and it ends where it must.

        ``threads``: for slow masks. Raises UnsupportedGuideError if llguidance does not take the grammar.
        """
        self._threads = threads
        self._coming: Future[npt.NDArray[np.int32]] | None = None
        self._mask_s = 0.0  # that the last mask took
        limits = llguidance.LLParserLimits(
            initial_lexer_fuel=20_000_000,  # for a schema of 64 KiB; the compiling process has bounds of its own
            max_lexer_states=50_000,  # some 100 MB
            verbose_errors=False,
        )
        self._matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        if self._matcher.is_error():
            raise UnsupportedGuideError(self._matcher.get_error())
        self.num_words = -(-vocabulary.vocab_size // 32)  # of a bitmask
        self._stop_bits = _bits(stop_token_ids, self.num_words)
        self._end_bits = _bits([vocabulary.eos_token], self.num_words)
        self._next: npt.NDArray[np.int32] | None = None  # the mask of where it stands, if that is known already
        self._is_complete = False
        self._trouble: str | None = None

    def fill(self, bitmask: npt.NDArray[np.int32]) -> None:
        """See GuideState. Clears the bits of all other tokens; in a dead end there are none."""
        bitmask[:] = self._here()

    def forced(self, most: int) -> tuple[int, ...]:
        """See GuideState. A grammar forces bytes: llguidance knows how a tokenizer splits them, up to where they may go on.

        Behind tokens that are split otherwise it does not; there the mask tells, if it has a single token.
        """
        found: list[int] = []
        if not self._may_draft():
            return ()
        while len(found) < most and not self._matcher.is_stopped():
            self._matcher.compute_ff_bytes()  # without this, nothing is known of tokens
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
        """See GuideState. The ValueError says why, in words for the client."""
        self._have_matcher()  # the mask reads what the token changes
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
        """Whether it can be followed further, and fast: a draft needs a mask for each of its tokens."""
        if self._is_complete or self._mask_s > _TOO_SLOW_S:
            return False
        self._have_matcher()
        return self._trouble is None

    def _have_matcher(self) -> None:
        """Wait for the thread that makes a mask: the matcher is that thread's meanwhile."""
        if self._coming is not None:
            self._next, self._coming = self._coming.result(), None

    def _here(self) -> npt.NDArray[np.int32]:
        """The mask of where it stands."""
        self._have_matcher()
        if self._next is None:
            self._next = self._mask()
        return self._next

    def _only_one(self, *, is_here: bool) -> list[int]:
        """The token that alone may come behind what the matcher has taken; none if there are several, or the text may end.

        ``is_here``: it has taken nothing that did not come.
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
            mask[:] = 0  # nothing but the end of the text, which nobody asked for
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
