"""The interface of drafters, which propose tokens for :mod:`kvrelay.decode_worker.drafts`.

The rest of the worker sees proposed tokens, and not which drafter they come from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvrelay.engine.step.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a step wants of a drafter."""

    num_tokens: Mapping[Sequence, int]  # at most, behind each sequence's last one; the most senior first
    num_places: int  # tokens that are taken of all drafts together
    spare_s: float | None  # what a drafter may compute of prompts beside the step (MixedSteps.spare_s)


class Drafter(Protocol):
    """Guesses what comes next. Model thread only."""

    @property
    def name(self) -> str:
        """For metrics."""

    @property
    def num_trusted(self) -> int:
        """Before it is known how a sequence's drafts go, as many tokens count as if they had come true."""

    def step_s(self, num_sequences: int) -> float:
        """Time that one more token takes in the drafts of so many sequences; 0: none, or not known yet."""

    def propose(self, wanted: Wanted) -> Mapping[Sequence, tuple[int, ...]]:
        """The tokens behind sequences' last ones; those of whom it has no idea may be left out.

        Called once for each step that may have drafts, also if nobody wants one: everybody waits for it.
        """

    def foresee(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...] | None:
        """What ``propose`` would say of the sequence as it is; None: it would have to compute something. Fast."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended or was preempted, or was never asked about."""


class LookUp(ABC):
    """A Drafter that computes nothing. It looks its guesses up in the text or in a guide."""

    def step_s(self, num_sequences: int) -> float:
        """See Drafter."""
        return 0.0

    def propose(self, wanted: Wanted) -> Mapping[Sequence, tuple[int, ...]]:
        """See Drafter."""
        return {sequence: self.foresee(sequence, most) for sequence, most in wanted.num_tokens.items()}

    @abstractmethod
    def foresee(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        """See Drafter. None without an idea."""
