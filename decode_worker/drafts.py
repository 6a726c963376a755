"""Speculation: rows of sequences that generate get drafts, which the step computes and samples behind.

What a step samples does not depend on drafts (:mod:`kvrelay.engine.step.leader`), so they change how fast a text comes, and not the
text. Each token of a draft costs the step a row. How many are worth that follows from how often the sequence's drafts came true,
and from what rows cost just now: a pure policy (:func:`num_to_draft`).

Model thread only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from kvrelay.decode_worker.metrics import DraftMetrics
from kvrelay.decode_worker.ngram import NgramDrafter
from kvrelay.decode_worker.row_cost import RowCost
from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.engine.step.sequence import Sequence

# A draft token that comes true less often is not worth its row, however cheap rows are.
_LEAST_CHANCE = 0.3
# Rows cost more than their share of the step says: kernels take rows by the tile, and one too many costs a whole tile.
_MARGIN = 2.0
_KEPT = 0.9  # of what earlier drafts told, with each new one
_KEPT_WITHOUT = 0.99  # … and with each step without one, so that one is tried again some day


class Drafter(Protocol):
    """Guesses what comes next."""

    @property
    def name(self) -> str:
        """For metrics."""

    def propose(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        """The tokens behind the sequence's last one, ``max_tokens`` at most; none without an idea. Fast: everybody waits."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended, or was never asked about."""


@dataclass(slots=True)
class Record:
    """How a sequence's drafts went. Old ones count less."""

    num_right: float = 0.0  # draft tokens
    num_wrong: float = 0.0  # drafts of which a token was wrong

    def hear(self, num_drafted: int, num_accepted: int) -> None:
        """Of a draft of so many tokens so many came true."""
        self.num_right = _KEPT * self.num_right + num_accepted
        self.num_wrong = _KEPT * self.num_wrong + (num_accepted < num_drafted)

    def skip(self) -> None:
        """None was tried in a step."""
        self.num_right *= _KEPT_WITHOUT
        self.num_wrong *= _KEPT_WITHOUT

    @property
    def chance(self) -> float:
        """That a draft token behind right ones is right; one half before the first (Laplace's rule of succession)."""
        return (self.num_right + 1) / (self.num_right + self.num_wrong + 2)


def num_to_draft(chance: float, row_share: float, most: int) -> int:
    """How many tokens of a draft are worth their rows.

    ``chance``: that one is right if all before it are, below 1. ``row_share``: how much of the step's time is for its rows; the
    rest any number of them would cost. A step that yields a token for each of ``n`` rows in ``t`` seconds, of which ``row_share``
    is the rows', pays ``row_share * t / n`` for one more; at its rate of ``n / t`` that is worth ``row_share`` tokens.
    """
    least = max(_LEAST_CHANCE, _MARGIN * row_share)
    if chance < least:
        return 0
    return min(most, int(math.log(least) / math.log(chance)))


class Drafts:
    """What a scheduler asks for drafts, and tells how they went."""

    def __init__(self, drafter: Drafter, max_tokens: int, metrics: DraftMetrics) -> None:
        """``max_tokens``: of a draft."""
        self._drafter = drafter
        self._max_tokens = max_tokens
        self._metrics = metrics
        self._records: dict[Sequence, Record] = {}
        self.row_cost = RowCost()  # its scheduler's to tell

    def draft(self, sequence: Sequence, row_share: float, most: int) -> tuple[int, ...]:
        """The draft that a sequence gets, of ``most`` tokens at most. ``row_share``: see ``num_to_draft``.

        No token of it ends the sequence, and its guide allows all of them.
        """
        record = self._records.setdefault(sequence, Record())
        num_tokens = num_to_draft(record.chance, row_share, most)
        if num_tokens == 0:
            record.skip()
            return ()
        return self._guess(sequence, num_tokens)

    def may_draft(self, sequence: Sequence, row_share: float, most: int) -> bool:
        """Whether a sequence whose next token is under way may get a draft behind that: the guess at it goes on."""
        record = self._records.get(sequence) or Record()
        return num_to_draft(record.chance, row_share, most) > 0 and len(self._guess(sequence, most + 1)) > 1

    def _guess(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        sampling = sequence.sampling
        most = min(most, self._max_tokens, sampling.max_tokens - sequence.num_output_tokens - 1)
        if most <= 0 or sampling.beam_search is not None:
            return ()
        found = self._drafter.propose(sequence, most)
        stops = sampling.stop_token_ids
        found = found[: next((place for place, token_id in enumerate(found) if token_id in stops), most)]
        if found and sequence.guide is not None:
            found = found[: sequence.guide.num_allowed(found)]
        return found

    def hear(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Of a sequence's draft so many tokens came true."""
        self._metrics.count(self._drafter.name, num_drafted, num_accepted)
        self._records[sequence].hear(num_drafted, num_accepted)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._records.pop(sequence, None)
        self._drafter.forget(sequence)


def drafter_of(settings: DecodeSchedulerSettings) -> Drafter | None:
    """What the settings ask for; None: no speculation."""
    return NgramDrafter() if settings.speculation == "ngram" else None
