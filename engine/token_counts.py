"""How often which token came in one sequence: what penalties go by, kept from step to step.

Counting anew would read all of prompt and output for each token that is added; here a step costs its new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

_MIN_SIZE = 64


class TokenCounts:
    """Of a sequence whose tokens are only ever appended to: its distinct tokens, in the order in which they came first.

    Of the output; with ``counts_prompt`` also those of the prompt, whose own occurrences do not count. Not thread-safe: the model
    thread's.
    """

    def __init__(self, token_ids: Seq[int], num_prompt_tokens: int, *, counts_prompt: bool) -> None:
        distinct = list(dict.fromkeys(token_ids[:num_prompt_tokens])) if counts_prompt else []
        self._places = {token_id: place for place, token_id in enumerate(distinct)}
        self._num_seen = num_prompt_tokens
        size = max(_MIN_SIZE, 2 * len(distinct))
        self._tokens = np.zeros(size, dtype=np.int64)
        self._tokens[: len(distinct)] = distinct
        self._counts = np.zeros(size, dtype=np.int32)
        self.update(token_ids)

    def update(self, token_ids: Seq[int]) -> None:
        """Count what was appended since the last time."""
        for token_id in token_ids[self._num_seen :]:
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self._tokens):
                self._tokens = np.concatenate((self._tokens, np.zeros_like(self._tokens)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._tokens[place] = token_id
            self._counts[place] += 1
        self._num_seen = len(token_ids)

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """The distinct tokens ``[n]``; a view, which the next update may change."""
        return self._tokens[: len(self._places)]

    @property
    def counts(self) -> npt.NDArray[np.int32]:
        """How often each of them is in the output, ``[n]``; a view, as ``tokens``."""
        return self._counts[: len(self._places)]
