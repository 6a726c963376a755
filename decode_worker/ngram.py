"""The drafter that looks up: what came behind the last few tokens when they came before, in prompt or output.

Text that quotes, edits or repeats is drafted well, and nothing has to be computed for it (Saxena, "Prompt Lookup Decoding", 2023).
"""

from __future__ import annotations

from kvrelay.engine.step.sequence import Sequence

_NUM_TOKENS = 3  # that must have come before; two come again in any text, without the same behind them
_MAX_PLACES = 2**14  # of a sequence, that are remembered: some 2 MB


class NgramDrafter:
    """Implements :class:`kvrelay.decode_worker.drafts.Drafter`."""

    name = "ngram"
    num_trusted = 0

    def __init__(self) -> None:
        self._indices: dict[Sequence, _Index] = {}

    def propose(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        """See Drafter. What came behind the latest place of the same tokens; if that reaches the text's end, from there again."""
        index = self._indices.get(sequence)
        if index is None:
            index = self._indices[sequence] = _Index()
        token_ids = sequence.token_ids
        place = index.place_behind(token_ids)
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
    """Where each few tokens of one sequence came last. Tokens are only ever appended to it.

    Two tables, so that the oldest places go without a search for them: when the newer one is full, it takes the older one's place.
    """

    def __init__(self) -> None:
        self._newer: dict[tuple[int, ...], int] = {}  # the place behind the tokens
        self._older: dict[tuple[int, ...], int] = {}
        self._next = _NUM_TOKENS  # the first place that is not in them

    def place_behind(self, token_ids: list[int]) -> int | None:
        """The latest place behind the tokens that the text ends with, but for its end; None: they never came before."""
        end = len(token_ids)
        self._next = max(self._next, end - _MAX_PLACES)
        tail = token_ids[self._next - _NUM_TOKENS :] if self._next < end else []
        keys = zip(*(tail[offset:-1] for offset in range(_NUM_TOKENS)), strict=False)
        for place, key in enumerate(keys, start=self._next):
            if len(self._newer) >= _MAX_PLACES // 2:
                self._older, self._newer = self._newer, {}
            self._newer[key] = place
        self._next = max(self._next, end)
        last = tuple(token_ids[-_NUM_TOKENS:])
        return self._newer.get(last, self._older.get(last))
