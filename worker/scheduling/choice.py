"""Which sequences may be in the next step. Excluded are those in a running step, and those about to be removed."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.sequence import Sequence
from kvrelay.worker.scheduling.suspects import Key


class Choice:
    """The candidates for one step, among a worker's sequences."""

    def __init__(
        self,
        group: frozenset[Key] | None = None,
        leaving: frozenset[Key] = frozenset(),
        flying: Seq[StepRow] = (),
    ) -> None:
        """``group``: only these; None: all. ``leaving``: none of these. ``flying``: rows of the steps that still run."""
        self.group = group
        self._leaving = leaving
        self._busy = leaving.union(row.sequence.key for row in flying)
        self.num_ahead: dict[Sequence, int] = {}  # tokens of each sequence that the running steps compute
        for row in flying:
            self.num_ahead[row.sequence] = self.num_ahead.get(row.sequence, 0) + row.num_tokens

    def is_busy(self, sequence: Sequence) -> bool:
        """Whether the sequence, or another beam of its search, is in a running step or about to be removed."""
        return sequence.key in self._busy

    def among(self, sequences: list[Sequence]) -> list[Sequence]:
        """The sequences that may be in the step."""
        idle = [one for one in sequences if one.key not in self._busy] if self._busy else sequences
        return idle if self.group is None else [one for one in idle if one.key in self.group]

    def staying(self, sequences: list[Sequence]) -> list[Sequence]:
        """As ``among``, for roles that can schedule a sequence again while it is in a running step."""
        staying = [one for one in sequences if one.key not in self._leaving] if self._leaving else sequences
        return staying if self.group is None else [one for one in staying if one.key in self.group]


EVERYBODY = Choice()
