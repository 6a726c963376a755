"""Speculation: rows of sequences that generate get drafts, which the step computes and samples behind.

What a step samples does not depend on drafts (:mod:`kvrelay.engine.step.leader`), so they change how fast a text comes, and not the
text. Each token of a draft costs the step a row. How many are worth that follows from how often the sequence's drafts came true,
and from what rows cost just now: a pure policy (:func:`num_to_draft`). Of several drafters the first that has an idea is taken.

Model thread only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from kvrelay.decode_worker.forced import GuideDrafter
from kvrelay.decode_worker.metrics import DraftMetrics
from kvrelay.decode_worker.ngram import NgramDrafter
from kvrelay.decode_worker.row_cost import RowCost
from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.engine.step.sequence import Sequence

# A draft token that comes true less often is not worth its row, however cheap rows are.
_LEAST_CHANCE = 0.15
# Rows cost more than their share of the step says: kernels take rows by the tile, and one too many costs a whole tile.
_MARGIN = 2.5
_KEPT = 0.9  # of what earlier drafts told, with each new one
_KEPT_WITHOUT = 0.99  # … and with each step without one, so that one is tried again some day


class Drafter(Protocol):
    """Guesses what comes next."""

    @property
    def name(self) -> str:
        """For metrics."""

    @property
    def num_trusted(self) -> int:
        """Before it is known how a sequence's drafts go, as many tokens count as if they had come true."""

    def propose(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        """The tokens behind the sequence's last one, ``max_tokens`` at most; none without an idea. Fast: everybody waits."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended, or was never asked about."""


@dataclass(slots=True)
class Record:
    """How a sequence's drafts went. Old ones count less."""

    num_right: float  # draft tokens
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
        """That a draft token behind right ones is right (Laplace's rule of succession)."""
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

    def __init__(self, drafters: Seq[Drafter], max_tokens: int, metrics: DraftMetrics) -> None:
        """``max_tokens``: of a draft."""
        self._drafters = drafters
        self._max_tokens = max_tokens
        self._metrics = metrics
        self._records: dict[Sequence, list[Record]] = {}  # of each drafter
        self._asked: dict[Sequence, int] = {}  # whose draft it has in the step under way
        self.row_cost = RowCost()  # its scheduler's to tell

    def draft(self, sequence: Sequence, row_share: float, most: int) -> tuple[int, ...]:
        """The draft that a sequence gets, of ``most`` tokens at most. ``row_share``: see ``num_to_draft``.

        No token of it ends the sequence, and its guide allows all of them.
        """
        for place, (drafter, record) in enumerate(zip(self._drafters, self._records_of(sequence), strict=True)):
            num_tokens = num_to_draft(record.chance, row_share, most)
            if num_tokens == 0:
                record.skip()
            elif found := self._guess(drafter, sequence, num_tokens):
                self._asked[sequence] = place
                return found
        return ()

    def may_draft(self, sequence: Sequence, row_share: float, most: int) -> bool:
        """Whether a sequence whose next token is under way may get a draft behind that: the guess at it goes on."""
        return any(
            num_to_draft(record.chance, row_share, most) > 0 and len(self._guess(drafter, sequence, most + 1)) > 1
            for drafter, record in zip(self._drafters, self._records_of(sequence), strict=True)
        )

    def _records_of(self, sequence: Sequence) -> list[Record]:
        records = self._records.get(sequence)
        if records is None:
            records = self._records[sequence] = [Record(drafter.num_trusted) for drafter in self._drafters]
        return records

    def _guess(self, drafter: Drafter, sequence: Sequence, most: int) -> tuple[int, ...]:
        sampling = sequence.sampling
        most = min(most, self._max_tokens, sampling.max_tokens - sequence.num_output_tokens - 1)
        if most <= 0 or sampling.beam_search is not None:
            return ()
        found = drafter.propose(sequence, most)
        stops = sampling.stop_token_ids
        found = found[: next((place for place, token_id in enumerate(found) if token_id in stops), most)]
        if found and sequence.guide is not None:
            found = found[: sequence.guide.num_allowed(found)]
        return found

    def hear(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Of a sequence's draft so many tokens came true."""
        place = self._asked[sequence]
        self._metrics.count(self._drafters[place].name, num_drafted, num_accepted)
        self._records[sequence][place].hear(num_drafted, num_accepted)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._records.pop(sequence, None)
        self._asked.pop(sequence, None)
        for drafter in self._drafters:
            drafter.forget(sequence)


def drafters_of(settings: DecodeSchedulerSettings) -> list[Drafter]:
    """What the settings ask for; none: no speculation."""
    match settings.speculation:
        case "guide":
            return [GuideDrafter()]
        case "ngram":
            return [GuideDrafter(), NgramDrafter()]
    return []
