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
        self._is_slow = False
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
        if self._next is None:
            self._next = self._mask() if self._coming is None else self._coming.result()
        bitmask[:] = self._next

    def num_allowed(self, draft: Seq[int]) -> int:
        """See GuideState. None where masks are slow: a draft needs one for each of its tokens."""
        if self._is_slow or self._trouble is not None or self._is_complete:
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
        if self._coming is not None:
            self._coming.result()  # it reads what the token changes
            self._coming = None
        if self._trouble is not None:
            raise ValueError(self._trouble)
        if self._is_stop(token_id) or not self._matcher.consume_token(token_id):
            raise ValueError(f"token {token_id} came where the guide does not allow it")
        self._next = None
        self._is_complete = self._matcher.is_stopped() and self._matcher.is_accepting()
        if self._is_slow and not self._is_complete and self._threads is not None:
            self._coming = self._threads.submit(self._mask)

    @property
    def trouble(self) -> str | None:
        """Why no token can be accepted any more."""
        return self._trouble

    @property
    def is_complete(self) -> bool:
        """See GuideState."""
        return self._is_complete

    def _is_stop(self, token_id: int) -> bool:
        return bool(self._stop_bits.view(np.uint32)[token_id // 32] >> np.uint32(token_id % 32) & np.uint32(1))

    def _mask(self) -> npt.NDArray[np.int32]:
        mask = np.zeros_like(self._stop_bits)
        start_s = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._is_slow = time.thread_time() - start_s > _SLOW_S
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
