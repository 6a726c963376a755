"""Speculation: rows of sequences that generate get drafts, which the step computes and samples behind.

What a step samples does not depend on drafts (:mod:`kvrelay.engine.step.leader`), so they change the speed of a text, not the
text. Each token of a draft costs the step a row, and perhaps its drafter some time. A pure policy (:func:`num_to_draft`)
decides how many are worth it, from how often the sequence's drafts were right, and from the measured costs. Of several drafters
(:mod:`kvrelay.decode_worker.drafter`) the first that proposes something is taken.

Model thread only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kvrelay.decode_worker.drafter import Drafter, Wanted
from kvrelay.decode_worker.metrics import DraftMetrics
from kvrelay.decode_worker.row_cost import RowCost
from kvrelay.engine.step.sequence import Sequence

# A draft token that comes true less often is not worth its row, however cheap rows are.
_LEAST_CHANCE = 0.15
# Rows cost more than their share of the step says: kernels take rows by the tile, and one too many costs a whole tile.
_MARGIN = 2.5
_KEPT = 0.9  # of what earlier drafts told, with each new one
_KEPT_WITHOUT = 0.99  # … and with each step without one, so that one is tried again some day


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


def num_to_draft(chance: float, row_share: float, draft_share: float, most: int) -> int:
    """How many tokens of a draft are worth their rows, and what guessing them takes.

    ``chance``: that one is right if all before it are, below 1. ``row_share``: how much of the step's time is for its rows; the
    rest any number of them would cost. A step that yields a token for each of ``n`` rows in ``t`` seconds, of which ``row_share``
    is the rows', pays ``row_share * t / n`` for one more; at its rate of ``n / t`` that is worth ``row_share`` tokens.
    ``draft_share``: by the same rate, what a drafter takes to guess the token: ``n * d / (m * t)``, if a guess for ``m`` sequences
    at once takes ``d`` seconds.
    """
    least = max(_LEAST_CHANCE, _MARGIN * row_share + draft_share)
    if chance < least:
        return 0
    return min(most, int(math.log(least) / math.log(chance)))


@dataclass(frozen=True, slots=True)
class Room:
    """What the step has for drafts."""

    num_rows: int  # that it has without
    num_places: int  # for more
    spare_s: float | None  # see MixedSteps.spare_s


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

    def draft(self, limits: Mapping[Sequence, int], room: Room) -> dict[Sequence, tuple[int, ...]]:
        """The drafts that sequences get, of so many tokens at most each, and together of as many as there are places.

        No token of a draft ends its sequence, and its guide allows all of them.
        """
        drafts: dict[Sequence, tuple[int, ...]] = {}
        num_places = room.num_places
        for place, drafter in enumerate(self._drafters):
            asked = {one: min(num_places, self._most(one, limit)) for one, limit in limits.items() if one not in drafts}
            wanted = self._worth(place, asked, room.num_rows)
            for sequence in asked:
                if sequence not in wanted:
                    self._records_of(sequence)[place].skip()
            for sequence, token_ids in drafter.propose(Wanted(wanted, num_places, room.spare_s)).items():
                if found := _usable(sequence, token_ids)[:num_places]:
                    drafts[sequence] = found
                    self._asked[sequence] = place
                    num_places -= len(found)
        return drafts

    def may_draft(self, sequences: Iterable[Sequence], room: Room) -> bool:
        """Whether any whose next token is under way may get a draft behind that: the guess at it goes on, or is to be computed."""
        limits = {one: self._most(one, room.num_places + 1) for one in sequences}
        asked = {one: min(limit, room.num_places) for one, limit in limits.items()}
        for place, drafter in enumerate(self._drafters):
            for sequence in self._worth(place, asked, room.num_rows):
                found = drafter.foresee(sequence, limits[sequence])
                if found is None or len(_usable(sequence, found)) > 1:
                    return True
        return False

    def _worth(self, place: int, asked: Mapping[Sequence, int], num_rows: int) -> dict[Sequence, int]:
        """Who gets how many tokens of a drafter, so many at most; those who get any. See ``num_to_draft``."""
        row_share, step_s = self.row_cost.share(num_rows), self.row_cost.step_s(num_rows)
        chances = {one: self._records_of(one)[place].chance for one, most in asked.items() if most > 0}
        while chances:
            drafting_s = self._drafters[place].step_s(len(chances))
            # All rows wait while tokens are guessed for some: the fewer these are, the dearer is each.
            draft_share = 0.0 if step_s is None else drafting_s / step_s * num_rows / len(chances)
            worth = {one: num_to_draft(chance, row_share, draft_share, asked[one]) for one, chance in chances.items()}
            chances = {one: chance for one, chance in chances.items() if worth[one]}
            if len(chances) == len(worth) or drafting_s == 0:
                return {one: worth[one] for one in chances}
        return {}

    def _records_of(self, sequence: Sequence) -> list[Record]:
        records = self._records.get(sequence)
        if records is None:
            records = self._records[sequence] = [Record(drafter.num_trusted) for drafter in self._drafters]
        return records

    def _most(self, sequence: Sequence, limit: int) -> int:
        """Tokens that a draft of the sequence may have; none in front of its last one, or of a beam."""
        sampling = sequence.sampling
        if sampling.beam_search is not None:
            return 0
        return max(0, min(limit, self._max_tokens, sampling.max_tokens - sequence.num_output_tokens - 1))

    def hear(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Of a sequence's draft so many tokens came true."""
        place = self._asked[sequence]
        self._metrics.count(self._drafters[place].name, num_drafted, num_accepted)
        self._records[sequence][place].hear(num_drafted, num_accepted)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended, or was preempted."""
        self._records.pop(sequence, None)
        self._asked.pop(sequence, None)
        for drafter in self._drafters:
            drafter.forget(sequence)


def _usable(sequence: Sequence, found: tuple[int, ...]) -> tuple[int, ...]:
    """Of a guess what is in front of a stop token, and allowed by the guide."""
    stops = sequence.sampling.stop_token_ids
    found = found[: next((place for place, token_id in enumerate(found) if token_id in stops), len(found))]
    if found and sequence.guide is not None:
        found = found[: sequence.guide.num_allowed(found)]
    return found
