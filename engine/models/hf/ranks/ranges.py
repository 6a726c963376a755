"""What a rank has of a linear layer and of a parameter: ranges along one dimension. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LinearCut:
    """A rank's part of a linear layer: some of its outputs, or some of its inputs.

    In the second case the ranks' results must be summed.
    """

    by_outputs: bool
    ranges: tuple[range, ...]  # of the whole layer's outputs or inputs; the rank has them one behind the other

    @property
    def size(self) -> int:
        """Outputs or inputs that the rank has."""
        return sum(map(len, self.ranges))


@dataclass(frozen=True, slots=True)
class ParameterCut:
    """A rank's part of a parameter: ranges along ``dim``, one behind the other."""

    dim: int
    ranges: tuple[range, ...]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The rank's part: a view of a single range, a copy of several."""
        parts = [whole.narrow(self.dim, one.start, len(one)) for one in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


def of_each(part: range, num_sections: int, size: int) -> tuple[range, ...]:
    """``part`` of each of some sections that follow each other. ``size``: of a section."""
    firsts = range(0, num_sections * size, size)
    return tuple(range(first + part.start, first + part.stop) for first in firsts)


def shares(sections: Sequence[int], rank: int, num_ranks: int) -> tuple[range, ...]:
    """A rank's share of each of some sections that follow each other. ``sections``: their sizes, which ``num_ranks`` divides."""
    ranges, first = [], 0
    for size in sections:
        share = size // num_ranks
        ranges.append(range(first + rank * share, first + (rank + 1) * share))
        first += size
    return tuple(ranges)
