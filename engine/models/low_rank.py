"""What adapters add to a product, for all adapters of a step at once: the interface of a device's way, and the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from kvrelay.engine.step.batch import Batch
from kvrelay.engine.step.slots import Ints
from kvrelay.engine.weights.adapters import LowRank

NUM_ADAPTER_SLOTS = 256  # numbered from 1; 0 stands for no adapter


@dataclass(frozen=True, slots=True)
class TokenGroups:
    """A step's tokens, grouped by adapter. Tokens without an adapter are in no group."""

    slots: Ints  # [num_groups]
    starts: Ints  # [num_groups + 1], into ``tokens``
    tokens: Ints  # indices of the step's tokens

    @classmethod
    def of(cls, batch: Batch) -> TokenGroups | None:
        """The groups of a batch; None if no row has an adapter."""
        if batch.adapters is None:
            return None
        of_tokens = np.repeat(batch.adapters, np.diff(batch.query_start_loc))
        tokens = np.argsort(of_tokens, kind="stable")[int((of_tokens == 0).sum()) :]
        slots, counts = np.unique(of_tokens[tokens], return_counts=True)
        return cls(slots, np.concatenate(([0], np.cumsum(counts))), tokens)


class LowRankProducts(Protocol):
    """A device's way to multiply with the adapters' matrices."""

    def add_site(self, num_inputs: int, widths: Sequence[int]) -> None:
        """Add a site: linear layers over the same inputs, side by side, with ``widths`` outputs. Call it before the first step."""

    def put(self, slot: int, site: int, parts: Sequence[LowRank | None]) -> None:
        """Set an adapter's matrices for a site, one pair per linear layer. No running step may have rows of the slot.

        Any thread.
        """

    def drop(self, slot: int) -> None:
        """Forget a slot's adapter. No running step may have rows of the slot."""

    def begin_step(self, groups: TokenGroups | None) -> None:
        """Use these groups for the following products; None: no row has an adapter."""

    def add(self, site: int, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """Add to ``out`` ``[num_tokens, outputs]`` the adapters' products of ``hidden`` ``[num_tokens, inputs]``."""


class TorchLowRank:
    """Implements LowRankProducts in plain torch: the reference, for every device and dtype."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, int], list[LowRank]] = {}  # by slot and site
        self._groups: list[tuple[int, torch.Tensor]] = []

    def add_site(self, num_inputs: int, widths: Sequence[int]) -> None:
        """See LowRankProducts."""

    def put(self, slot: int, site: int, parts: Sequence[LowRank | None]) -> None:
        """See LowRankProducts."""
        self._parts[slot, site] = [part for part in parts if part is not None]

    def drop(self, slot: int) -> None:
        """See LowRankProducts."""
        for key in [key for key in self._parts if key[0] == slot]:
            del self._parts[key]

    def begin_step(self, groups: TokenGroups | None) -> None:
        """See LowRankProducts."""
        self._groups = []
        if groups is not None:
            of_groups = np.split(groups.tokens, groups.starts[1:-1])
            self._groups = list(zip(groups.slots.tolist(), map(torch.from_numpy, of_groups), strict=True))

    def add(self, site: int, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """See LowRankProducts. Sums are in fp32."""
        for slot, tokens in self._groups:
            where = tokens.to(out.device)
            for part in self._parts.get((slot, site), ()):
                lowered = (hidden[where].float() @ part.a.float().T) * part.scaling
                raised = lowered @ part.b.float().T
                columns = out[:, part.start : part.start + len(part.b)]
                columns[where] = (columns[where].float() + raised).to(out.dtype)
