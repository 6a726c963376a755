"""The products of adapters with our Triton kernels: two launches per site for all adapters of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.common.adapter_files import MAX_RANK
from kvrelay.engine.models.adapters import Adapters
from kvrelay.engine.models.low_rank import NUM_ADAPTER_SLOTS, TokenGroups
from kvrelay.engine.step.batch import Batch
from kvrelay.engine.weights.adapters import LowRank
from kvrelay.kernels.linear.low_rank import (
    FEW_ROWS,
    FP32_ROWS,
    MANY_ROWS,
    AdaptedRows,
    LowRankTable,
    Tiling,
    add_low_rank,
)

# Tiles of few rows read an adapter's matrices again for each 16 rows. With more rows there are enough programs without
# splits, which
# take memory.
_MAX_FEW_PER_ADAPTER, _MAX_FEW = 32, 1024
Upload = Callable[[Sequence[npt.NDArray[Any]]], list[torch.Tensor]]


class CudaLowRank:
    """Implements LowRankProducts, also inside CUDA graphs."""

    def __init__(self, upload: Upload, dtype: torch.dtype, device: torch.device) -> None:
        self._upload = upload
        self._dtype = dtype
        self._device = device
        self._tables: list[LowRankTable] = []  # per site
        self._rows: AdaptedRows | None = None  # of the step

    @property
    def tilings(self) -> tuple[Tiling, ...]:
        """All tilings that steps use; each has its own kernel. The first is for few rows, and for graphs."""
        return (FP32_ROWS,) if self._dtype == torch.float32 else (FEW_ROWS, MANY_ROWS)

    def add_site(self, num_inputs: int, widths: Sequence[int]) -> None:
        """See LowRankProducts."""
        self._tables.append(LowRankTable(NUM_ADAPTER_SLOTS, num_inputs, widths, MAX_RANK, self._dtype, self._device))

    def put(self, slot: int, site: int, parts: Sequence[LowRank | None]) -> None:
        """See LowRankProducts."""
        for index, part in enumerate(parts):
            if part is not None:
                self._tables[site].put(slot, index, part.a, part.b, part.scaling)

    def drop(self, slot: int) -> None:
        """See LowRankProducts."""
        for table in self._tables:
            table.drop(slot)

    def begin_step(self, groups: TokenGroups | None) -> None:
        """See LowRankProducts."""
        if groups is not None:
            num_tokens = len(groups.tokens)
            is_few = num_tokens <= min(_MAX_FEW, _MAX_FEW_PER_ADAPTER * len(groups.slots))
            tiling = self.tilings[0 if is_few else -1]
            self.use(AdaptedRows(tiling, *self._upload((groups.tokens, tiles_of(groups, tiling.rows)))))

    def use(self, rows: AdaptedRows) -> None:
        """Use ``rows`` for the following products of a step, or of a graph."""
        self._rows = rows

    def no_rows(self, most: int, tiling: Tiling) -> AdaptedRows:
        """Memory for at most ``most`` rows and their tiles, which is empty at first."""
        rows = torch.zeros(most, dtype=torch.int64, device=self._device)
        return AdaptedRows(tiling, rows, torch.zeros(most, 3, dtype=torch.int32, device=self._device))

    def fill(self, rows: AdaptedRows, groups: TokenGroups) -> None:
        """Write a step's groups into memory from :meth:`no_rows`."""
        tokens, tiles = self._upload((groups.tokens, tiles_of(groups, rows.tiling.rows)))
        rows.rows[: len(tokens)] = tokens
        rows.tiles[: len(tiles)] = tiles
        rows.tiles[len(tiles) :] = 0  # the step before may have had more tiles

    def add(self, site: int, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """See LowRankProducts."""
        assert self._rows is not None, "a step has begun"
        add_low_rank(hidden, out, self._tables[site], self._rows)


class AdaptedSteps:
    """Steps with adapters over rows in fixed memory: those in CUDA graphs, and those that only compile kernels."""

    def __init__(self, adapters: Adapters, products: CudaLowRank) -> None:
        """``products``: the products of ``adapters``."""
        self._adapters = adapters
        self._products = products

    @property
    def tilings(self) -> tuple[Tiling, ...]:
        """See CudaLowRank."""
        return self._products.tilings

    def no_rows(self, most: int, tiling: Tiling) -> AdaptedRows:
        """See CudaLowRank."""
        return self._products.no_rows(most, tiling)

    @contextmanager
    def over(self, rows: AdaptedRows) -> Iterator[None]:
        """Within this context, the model computes a step with these rows, whatever is in their memory."""
        self._products.use(rows)
        self._adapters.is_on = True
        try:
            yield
        finally:
            self._adapters.is_on = False

    def fill(self, rows: AdaptedRows, batch: Batch) -> None:
        """Write ``batch``, which has rows with adapters, into memory from :meth:`no_rows`. Raises as Adapters.begin_step."""
        groups = self._adapters.groups_of(batch)
        assert groups is not None, "no row has an adapter"
        self._products.fill(rows, groups)


def tiles_of(groups: TokenGroups, num_rows: int) -> npt.NDArray[np.int32]:
    """``[num_tiles, 3]``: slot, first index in ``groups.tokens``, and number of tokens.

    A tile has at most ``num_rows`` tokens of one group.
    """
    counts = np.diff(groups.starts)
    num_tiles = -(-counts // num_rows)
    of_tiles = np.repeat(np.arange(len(counts)), num_tiles)
    index = np.arange(len(of_tiles)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    first = groups.starts[of_tiles] + index * num_rows
    count = np.minimum(num_rows, groups.starts[of_tiles + 1] - first)
    return np.stack((groups.slots[of_tiles], first, count), axis=1).astype(np.int32)
