"""Which sequences may be in the next step. Excluded are those in a step that still runs, and those about to be removed."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.sequence import Sequence
from kvrelay.worker.scheduling.suspects import Key


class Choice:
    """Among a worker's sequences, for one step."""

    def __init__(
        self,
        group: frozenset[Key] | None = None,
        leaving: frozenset[Key] = frozenset(),
        flying: Seq[StepRow] = (),
    ) -> None:
        """``group``: nobody else; None: everybody. ``leaving``: none of these. ``flying``: rows of the steps that still run."""
        self.group = group
        self._leaving = leaving
        self._busy = leaving.union(row.sequence.key for row in flying)
        self.num_ahead: dict[Sequence, int] = {}  # how many tokens of a sequence those steps compute
        for row in flying:
            self.num_ahead[row.sequence] = self.num_ahead.get(row.sequence, 0) + row.num_tokens

    def is_busy(self, sequence: Sequence) -> bool:
        """Whether it, or another beam of its search, is in a step that still runs, or about to be taken out."""
        return sequence.key in self._busy

    def among(self, sequences: list[Sequence]) -> list[Sequence]:
        """Those that may be in the step."""
        idle = [one for one in sequences if one.key not in self._busy] if self._busy else sequences
        return idle if self.group is None else [one for one in idle if one.key in self.group]

    def staying(self, sequences: list[Sequence]) -> list[Sequence]:
        """The same, of a role that knows how to go on behind a step that still runs."""
        staying = [one for one in sequences if one.key not in self._leaving] if self._leaving else sequences
        return staying if self.group is None else [one for one in staying if one.key in self.group]


EVERYBODY = Choice()
