"""Where one sequence stands in its grammar: xgrammar's matcher behind the GuideState protocol.

Touched by one thread at a time: by the compiler's until the state is handed out, by the model thread from then on. A state that
met a dead end, or a grammar too slow to follow, says so at the next ``accept``: one sequence's trouble ends no step.

A mask takes some 20 us, in most grammars. Where the last one took long (a tool's argument with a ``maxLength`` above 128), the next
one is made on another thread from the moment that the token came: while the model computes, which is when nobody needs it yet.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from concurrent.futures import Executor, Future

import numpy as np
import numpy.typing as npt
import xgrammar as xgr

MAX_FILL_S = 0.25  # for one mask. Everything in the batch waits for it
_SLOW_S = 2e-4  # a mask that takes longer is worth a thread


class XGrammarState:
    """Implements :class:`kvrelay.engine.sequence.GuideState`."""

    def __init__(
        self, grammar: xgr.CompiledGrammar, stop_token_ids: Seq[int], vocab_size: int, threads: Executor | None = None
    ) -> None:
        """``stop_token_ids``: what may come where the grammar may end; empty: nothing, and it ends where it must.

        ``threads``: for slow masks.
        """
        self._threads = threads
        self._coming: Future[npt.NDArray[np.int32]] | None = None
        self._is_slow = False
        self._matcher = xgr.GrammarMatcher(grammar, override_stop_tokens=list(stop_token_ids) or None)
        self._has_stop_tokens = bool(stop_token_ids)
        self._stop_bits = np.zeros(-(-vocab_size // 32), dtype=np.int32)
        for token_id in self._matcher.stop_token_ids:
            self._stop_bits.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)
        self._next: npt.NDArray[np.int32] | None = None  # the mask of where it stands, if that is known already
        self._is_complete = False
        self._trouble: str | None = None

    def fill(self, bitmask: npt.NDArray[np.int32]) -> None:
        """See GuideState. Clears the bits of all other tokens; in a dead end there are none."""
        if self._next is None:
            self._next = self._mask() if self._coming is None else self._coming.result()
        bitmask[:] = self._next

    def accept(self, token_id: int) -> None:
        """See GuideState. The ValueError says why, in words for the client."""
        if self._trouble is not None:
            raise ValueError(self._trouble)
        if self._coming is not None:
            self._coming.result()  # it reads what the token changes
            self._coming = None
        if self._is_stop(token_id) or not self._matcher.accept_token(token_id):
            raise ValueError(f"token {token_id} came where the guide does not allow it")
        self._next = None
        if self._matcher.is_completed():
            # Asked for only here: it costs a mask. The next step needs the same one.
            self._next = self._mask()
            self._is_complete = not np.any(self._next & ~self._stop_bits)
        elif self._is_slow and self._threads is not None:
            self._coming = self._threads.submit(self._mask)

    @property
    def trouble(self) -> str | None:
        """Why no token can be accepted any more."""
        return self._trouble

    @property
    def is_complete(self) -> bool:
        """See GuideState."""
        return self._is_complete

    def _mask(self) -> npt.NDArray[np.int32]:
        mask = np.zeros_like(self._stop_bits)
        start_s = time.thread_time()
        self._matcher.fill_next_token_bitmask(mask)
        elapsed_s = time.thread_time() - start_s
        self._is_slow = elapsed_s > _SLOW_S
        if not self._has_stop_tokens:
            mask &= ~self._stop_bits
        if elapsed_s > MAX_FILL_S:
            self._trouble = (
                f"the guide took {elapsed_s:.2f} s to say which tokens may come next, more than {MAX_FILL_S} s: it is too "
                "ambiguous; make it simpler"
            )
        elif not mask.any() and not self._matcher.is_completed():
            self._trouble = "the guide allows no token at all here: nothing can match it"
        return mask

    def _is_stop(self, token_id: int) -> bool:
        return bool(self._stop_bits.view(np.uint32)[token_id // 32] >> np.uint32(token_id % 32) & np.uint32(1))
