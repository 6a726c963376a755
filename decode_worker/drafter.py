"""The interface of drafters, which propose tokens for :mod:`kvrelay.decode_worker.drafts`.

The rest of the worker does not know which drafter proposed a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvrelay.engine.step.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Wanted:
    """A step's request to a drafter."""

    num_tokens: Mapping[Sequence, int]  # most tokens after each sequence's last one; the most senior first
    num_places: int  # most tokens of all drafts together
    spare_s: float | None  # seconds that a drafter may compute texts for; see MixedSteps.spare_s


class Drafter(Protocol):
    """Guesses the next tokens of sequences. Model thread only."""

    @property
    def name(self) -> str:
        """Label in metrics."""

    @property
    def num_trusted(self) -> int:
        """How many draft tokens count as right for a sequence without drafts so far."""

    def step_s(self, num_sequences: int) -> float:
        """Seconds for one more token in drafts of ``num_sequences``; 0: no time, or not known yet."""

    def propose(self, wanted: Wanted) -> Mapping[Sequence, tuple[int, ...]]:
        """Tokens after the sequences' last ones. Sequences without a guess may be left out.

        Called once for each step that may have drafts, even if ``wanted`` is empty. All sequences wait for it.
        """

    def foresee(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...] | None:
        """The guess of ``propose`` for the sequence as it is; None: it must be computed first. Fast."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended or was preempted. It may be unknown to the drafter."""


class LookUp(ABC):
    """A Drafter that computes nothing. It looks up guesses in the text or in a guide."""

    def step_s(self, num_sequences: int) -> float:
        """See Drafter."""
        return 0.0

    def propose(self, wanted: Wanted) -> Mapping[Sequence, tuple[int, ...]]:
        """See Drafter."""
        return {sequence: self.foresee(sequence, most) for sequence, most in wanted.num_tokens.items()}

    @abstractmethod
    def foresee(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        """See Drafter. Empty without a guess."""
