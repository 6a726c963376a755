"""Speculation: rows of generating sequences get drafts, which the step computes and samples after them.

The sampled tokens do not depend on drafts (:mod:`kvrelay.engine.step.leader`). So drafts change a text's speed, but not the text.
Each draft token costs the step a row, and perhaps its drafter some time. A pure policy (:func:`num_to_draft`) decides how many are
worth it, from how often the sequence's drafts were right, and from measured costs. Several drafters
(:mod:`kvrelay.decode_worker.drafter`) are asked in order, and the first proposal is used.

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

# Least chance of a draft token that is worth its row, however cheap rows are.
_LEAST_CHANCE = 0.15
# Rows cost more than their share of the step's time: kernels take rows in tiles, and one row too many costs a tile.
_MARGIN = 2.5
_KEPT = 0.9  # weight that earlier drafts keep with each new one …
_KEPT_WITHOUT = 0.99  # … and with each step without a draft, so that one is tried again


@dataclass(slots=True)
class Record:
    """How often a sequence's drafts were right. Old drafts count less."""

    num_right: float  # draft tokens that were right
    num_wrong: float = 0.0  # drafts with a wrong token

    def hear(self, num_drafted: int, num_accepted: int) -> None:
        """Record a draft of ``num_drafted`` tokens, of which the first ``num_accepted`` were right."""
        self.num_right = _KEPT * self.num_right + num_accepted
        self.num_wrong = _KEPT * self.num_wrong + (num_accepted < num_drafted)

    def skip(self) -> None:
        """Record a step without a draft."""
        self.num_right *= _KEPT_WITHOUT
        self.num_wrong *= _KEPT_WITHOUT

    @property
    def chance(self) -> float:
        """The probability that a draft token is right if all before it are (Laplace's rule of succession)."""
        return (self.num_right + 1) / (self.num_right + self.num_wrong + 2)


def num_to_draft(chance: float, row_share: float, draft_share: float, most: int) -> int:
    """How many draft tokens are worth their rows and the time to guess them.

    ``chance``: below 1, that a token is right if all before it are. ``row_share``: the rows' share of the step's time; the rest is
    fixed. A step yields one token for each of ``n`` rows in ``t`` seconds. One more row costs ``row_share * t / n`` seconds. At the
    step's rate of ``n / t`` this time is worth ``row_share`` tokens. ``draft_share``: the drafter's time for the token at the same
    rate. It is ``n * d / (m * t)`` if a guess for ``m`` sequences at once takes ``d`` seconds.
    """
    least = max(_LEAST_CHANCE, _MARGIN * row_share + draft_share)
    if chance < least:
        return 0
    return min(most, int(math.log(least) / math.log(chance)))


@dataclass(frozen=True, slots=True)
class Room:
    """A step's room for drafts."""

    num_rows: int  # rows without drafts
    num_places: int  # places for draft tokens
    spare_s: float | None  # see MixedSteps.spare_s


class Drafts:
    """Gives a scheduler drafts, and learns from it which were right."""

    def __init__(self, drafters: Seq[Drafter], max_tokens: int, metrics: DraftMetrics) -> None:
        """``drafters``: in the order in which they are asked. ``max_tokens``: the most of a draft."""
        self._drafters = drafters
        self._max_tokens = max_tokens
        self._metrics = metrics
        self._records: dict[Sequence, list[Record]] = {}  # one per drafter
        self._asked: dict[Sequence, int] = {}  # index of the drafter whose draft is in the running step
        self.row_cost = RowCost()  # the scheduler records steps in it

    def draft(self, limits: Mapping[Sequence, int], room: Room) -> dict[Sequence, tuple[int, ...]]:
        """Drafts for the sequences in ``limits``, which has each one's most tokens. Together they fill at most ``room.num_places``.

        No draft token ends its sequence, and a guide allows all of them.
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
        """Whether a sequence may get a draft after its pending token: a guess is longer than that, or must be computed."""
        limits = {one: self._most(one, room.num_places + 1) for one in sequences}
        asked = {one: min(limit, room.num_places) for one, limit in limits.items()}
        for place, drafter in enumerate(self._drafters):
            for sequence in self._worth(place, asked, room.num_rows):
                found = drafter.foresee(sequence, limits[sequence])
                if found is None or len(_usable(sequence, found)) > 1:
                    return True
        return False

    def _worth(self, place: int, asked: Mapping[Sequence, int], num_rows: int) -> dict[Sequence, int]:
        """The sequences that should get a draft from drafter ``place``, and its tokens, ``asked`` at most. See ``num_to_draft``."""
        row_share, step_s = self.row_cost.share(num_rows), self.row_cost.step_s(num_rows)
        chances = {one: self._records_of(one)[place].chance for one, most in asked.items() if most > 0}
        while chances:
            drafting_s = self._drafters[place].step_s(len(chances))
            # All rows wait while tokens are guessed for some. The fewer these are, the more each costs.
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
        """The most tokens of a draft of the sequence. It leaves room for the last token, and is 0 for a beam."""
        sampling = sequence.sampling
        if sampling.beam_search is not None:
            return 0
        return max(0, min(limit, self._max_tokens, sampling.max_tokens - sequence.num_output_tokens - 1))

    def hear(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Record that ``num_accepted`` tokens of the sequence's draft were right."""
        place = self._asked[sequence]
        self._metrics.count(self._drafters[place].name, num_drafted, num_accepted)
        self._records[sequence][place].hear(num_drafted, num_accepted)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended, or was preempted: forget its records and its drafters' state."""
        self._records.pop(sequence, None)
        self._asked.pop(sequence, None)
        for drafter in self._drafters:
            drafter.forget(sequence)


def _usable(sequence: Sequence, found: tuple[int, ...]) -> tuple[int, ...]:
    """The part of a guess before a stop token that the guide allows."""
    stops = sequence.sampling.stop_token_ids
    found = found[: next((place for place, token_id in enumerate(found) if token_id in stops), len(found))]
    if found and sequence.guide is not None:
        found = found[: sequence.guide.num_allowed(found)]
    return found
