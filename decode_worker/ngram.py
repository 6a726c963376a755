"""The drafter that looks up tokens: where the last few tokens occurred before in the text, it proposes what followed.

Text that quotes, edits or repeats is drafted well, at no computing cost (Saxena, "Prompt Lookup Decoding", 2023).
"""

from __future__ import annotations

from kvrelay.decode_worker.drafter import LookUp
from kvrelay.engine.step.sequence import Sequence

# Lengths of the match, tried in order. A longer match is more reliable; two tokens start a quotation soonest.
_LENGTHS = (4, 2)
_MAX_PLACES = 2**14  # most remembered places of a sequence per length: about 4 MB


class NgramDrafter(LookUp):
    """Implements :class:`kvrelay.decode_worker.drafter.Drafter`."""

    name = "ngram"
    num_trusted = 2

    def __init__(self) -> None:
        self._indices: dict[Sequence, list[_Index]] = {}

    def foresee(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        """See Drafter. The tokens after the latest match. If they reach the end of the text, they repeat from the match on."""
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
    """The latest place of each run of ``length`` tokens in one sequence, to which tokens are only appended.

    It has two tables, so that the oldest places can be dropped without a search. A full newer table replaces the older one.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._newer: dict[tuple[int, ...], int] = {}  # run of tokens → the place after it
        self._older: dict[tuple[int, ...], int] = {}
        self._next = length  # the first place that is not indexed

    def place_behind(self, token_ids: list[int]) -> int | None:
        """The latest earlier place after the tokens that end the text; None if they did not occur before."""
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
