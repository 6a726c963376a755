"""Occurrences of tokens in one sequence, for penalties, kept from step to step.

Counting again would read the whole prompt and output for each new token. Here a step costs only its new tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

_MIN_SIZE = 64


class TokenCounts:
    """The distinct tokens of an append-only sequence, in the order of first occurrence, with counts.

    Covers the output; with ``counts_prompt`` also the prompt's tokens, whose own occurrences do not count. Not thread-safe: for the
    model thread only.
    """

    def __init__(self, token_ids: Seq[int], num_prompt_tokens: int, *, counts_prompt: bool) -> None:
        distinct = list(dict.fromkeys(token_ids[:num_prompt_tokens])) if counts_prompt else []
        self._places = {token_id: place for place, token_id in enumerate(distinct)}
        self._num_seen = num_prompt_tokens
        self._entries = np.zeros((max(_MIN_SIZE, 2 * len(distinct)), 2), dtype=np.int32)
        self._entries[: len(distinct), 0] = distinct
        self.update(token_ids)

    def update(self, token_ids: Seq[int]) -> None:
        """Count the tokens appended since the last call."""
        for token_id in token_ids[self._num_seen :]:
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self._entries):
                self._entries = np.concatenate((self._entries, np.zeros_like(self._entries)))
            self._entries[place, 0] = token_id
            self._entries[place, 1] += 1
        self._num_seen = len(token_ids)

    def copy(self) -> TokenCounts:
        """An independent copy."""
        copied = copy.copy(self)
        copied._places, copied._entries = dict(self._places), self._entries.copy()
        return copied

    @property
    def entries(self) -> npt.NDArray[np.int32]:
        """The distinct tokens with their numbers of occurrences in the output, ``[n, 2]``; a view, which the next update may
        change.
        """
        return self._entries[: len(self._places)]
