"""The drafter that looks up: what came behind the last few tokens when they came before, in prompt or output.

Text that quotes, edits or repeats is drafted well, and nothing has to be computed for it (Saxena, "Prompt Lookup Decoding", 2023).
"""

from __future__ import annotations

from kvrelay.decode_worker.drafter import LookUp
from kvrelay.engine.step.sequence import Sequence

# Tokens that must have come before: the more, the likelier the same comes behind them. Two begin a quotation soonest.
_LENGTHS = (4, 2)
_MAX_PLACES = 2**14  # of a sequence, that are remembered for each length: some 4 MB


class NgramDrafter(LookUp):
    """Implements :class:`kvrelay.decode_worker.drafter.Drafter`."""

    name = "ngram"
    num_trusted = 2

    def __init__(self) -> None:
        self._indices: dict[Sequence, list[_Index]] = {}

    def foresee(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        """See Drafter. What came behind the latest place of the same tokens; if that reaches the text's end, from there again."""
        indices = self._indices.get(sequence)
        if indices is None:
            indices = self._indices[sequence] = [_Index(length) for length in _LENGTHS]
        token_ids = sequence.token_ids
        places = (index.place_behind(token_ids) for index in indices)
        place = next((place for place in places if place is not None), None)
        if place is None:
            return ()
        period = len(token_ids) - place
        if max_tokens <= period:
            return tuple(token_ids[place : place + max_tokens])
        return tuple(token_ids[place + offset % period] for offset in range(max_tokens))

    def forget(self, sequence: Sequence) -> None:
        """See Drafter."""
        self._indices.pop(sequence, None)


class _Index:
    """Where each ``length`` tokens of one sequence came last. Tokens are only ever appended to it.

    Two tables, so that the oldest places go without a search for them: when the newer one is full, it takes the older one's place.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._newer: dict[tuple[int, ...], int] = {}  # the place behind the tokens
        self._older: dict[tuple[int, ...], int] = {}
        self._next = length  # the first place that is not in them

    def place_behind(self, token_ids: list[int]) -> int | None:
        """The latest place behind the tokens that the text ends with, but for its end; None: they never came before."""
        end = len(token_ids)
        self._next = max(self._next, end - _MAX_PLACES)
        tail = token_ids[self._next - self._length :] if self._next < end else []
        keys = zip(*(tail[offset:-1] for offset in range(self._length)), strict=False)
        for place, key in enumerate(keys, start=self._next):
            if len(self._newer) >= _MAX_PLACES // 2:
                self._older, self._newer = self._newer, {}
            self._newer[key] = place
        self._next = max(self._next, end)
        last = tuple(token_ids[-self._length :])
        return self._newer.get(last, self._older.get(last))
