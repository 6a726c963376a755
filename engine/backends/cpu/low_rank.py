"""The products of adapters with our C++ kernel: one call per site for all adapters of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.engine.backends.cpu.native import CpuKernels
from kvrelay.engine.models.low_rank import NUM_ADAPTER_SLOTS, TokenGroups
from kvrelay.engine.step.slots import Ints
from kvrelay.engine.weights.adapters import LowRank

_OUTPUTS = _INPUTS = 32  # widths of the packed layouts of b and of a: see low_rank.cpp
_RANKS = 4
_PART = np.dtype([(name, np.int64) for name in ("a", "b", "rank", "first", "outputs")] + [("scaling", np.float64)])


class NativeLowRank:
    """Implements LowRankProducts for bf16."""

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels
        self._tables: list[npt.NDArray[np.void]] = []  # per site [slots, parts]; zeros where an adapter has no matrices
        # By slot; keeps the tensors alive whose addresses are in the tables.
        self._kept: dict[int, list[torch.Tensor]] = {}
        self._sites: list[tuple[int, int]] = []  # per table: its address, and its number of parts
        self._arrays: tuple[Ints, ...] = ()  # keeps the arrays of the step's groups alive
        self._groups: tuple[int, int, int, int] | None = None  # their addresses, and the number of groups

    def add_site(self, num_inputs: int, widths: Sequence[int]) -> None:
        """See LowRankProducts."""
        table = np.zeros((NUM_ADAPTER_SLOTS + 1, len(widths)), dtype=_PART)
        self._tables.append(table)
        self._sites.append((table.ctypes.data, len(widths)))

    def put(self, slot: int, site: int, parts: Sequence[LowRank | None]) -> None:
        """See LowRankProducts."""
        kept = self._kept.setdefault(slot, [])
        for index, part in enumerate(parts):
            if part is not None:
                a, panels = _tiles(part.a), _panels(part.b)
                kept += [a, panels]
                outputs, rank = part.b.shape
                self._tables[site][slot, index] = (
                    a.data_ptr(), panels.data_ptr(), rank, part.start, outputs, part.scaling
                )  # fmt: skip

    def drop(self, slot: int) -> None:
        """See LowRankProducts."""
        for table in self._tables:
            table[slot] = np.zeros((), dtype=_PART)
        self._kept.pop(slot, None)

    def begin_step(self, groups: TokenGroups | None) -> None:
        """See LowRankProducts."""
        if groups is not None:
            arrays = (groups.slots, groups.starts, groups.tokens)
            slots, starts, tokens = self._arrays = tuple(np.ascontiguousarray(one, np.int64) for one in arrays)
            self._groups = slots.ctypes.data, starts.ctypes.data, tokens.ctypes.data, len(slots)

    def add(self, site: int, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """See LowRankProducts. A token's result has the same bits whatever else is in the step."""
        assert self._groups is not None, "a step has begun"
        self._kernels.add_low_rank(*self._sites[site], self._groups, hidden.contiguous(), out)


def _panels(b: torch.Tensor) -> torch.Tensor:
    """``[outputs, rank]`` in the kernel's layout: ``[panels, rank, 32]``."""
    outputs, rank = b.shape
    padded = b.new_zeros((-(-outputs // _OUTPUTS) * _OUTPUTS, rank))
    padded[:outputs] = b
    return padded.view(-1, _OUTPUTS, rank).transpose(1, 2).contiguous()


def _tiles(a: torch.Tensor) -> torch.Tensor:
    """``[rank, inputs]`` in the kernel's layout: ``[tiles of 4 ranks, stretches of 32 inputs, 4, 32]``."""
    rank, inputs = a.shape
    padded = a.new_zeros((-(-rank // _RANKS) * _RANKS, -(-inputs // _INPUTS) * _INPUTS))
    padded[:rank, :inputs] = a
    return padded.view(-1, _RANKS, padded.shape[1] // _INPUTS, _INPUTS).transpose(1, 2).contiguous()
