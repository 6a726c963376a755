"""What layers keep that compress their tokens (DeepSeek-V4): rows of the last tokens, and an entry for each window of tokens.

Such a layer keeps a row of each token for as long as a sliding window sees it, and one more row with what goes into an entry. When
the last token of a window is computed, the rows of the window become an entry, which stays. So rows are groups with windows, and
entries a group without. Tables, ledger, prefix cache and hand-off need no case for them, and a token can be computed twice.

An entry lies in the block of its last token. A block has room for as many entries of each layer as can end in it. The rest of the
room is zero, so that equal blocks have equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.engine.config.model import ModelShape
from kvrelay.engine.kv.geometry import LayerGroups, entries_per_block
from kvrelay.engine.kv.views import view_group
from kvrelay.engine.step.batch import Batch

Upload = Callable[[Sequence[npt.NDArray[Any]]], list[torch.Tensor]]


class EntryPool:
    """Rows and entries of all layers of a model."""

    def __init__(self, shape: ModelShape, pool: torch.Tensor, upload: Upload) -> None:
        """``pool``: as :attr:`kvrelay.engine.kv.pool.KvPool.tensor`. ``upload``: brings arrays to its device."""
        self.block_size = pool.shape[4]
        self.groups = LayerGroups.of_shape(shape, self.block_size)
        self.entry_group, place = self.groups.places[len(shape.sliding_windows)]
        assert place == 0, "entries share their blocks with no other layer"
        self.rates = tuple(one.rate for one in shape.entries)
        counts = [entries_per_block(rate, self.block_size) for rate in self.rates]
        ends = list(accumulate(count * one.size for count, one in zip(counts, shape.entries, strict=True)))
        flat = pool.view(len(pool), -1)
        self.all_entries = flat[:, : self.block_size * self.groups.sizes[self.entry_group].count]
        # [num_blocks, entries per block, size] of each layer that compresses
        self.entries = [
            flat[:, end - count * one.size : end].view(len(pool), count, one.size)
            for end, count, one in zip(ends, counts, shape.entries, strict=True)
        ]
        # [num_blocks, num_layers, block_size, size] of each group
        self.rows = [view_group(pool, sizes).keys[:, :, 0] for sizes in self.groups.sizes]
        self._upload = upload

    def begin_step(self, batch: Batch) -> EntryStep:
        """The rows and entries of the batch's sequences. Side effect: sets the room for entries in new blocks to zero."""
        counts = np.diff(batch.query_start_loc)
        row_of_token = np.repeat(np.arange(len(batch.rows)), counts)
        rates = sorted(set(self.rates))
        ending = [np.flatnonzero((batch.positions + 1) % rate == 0) for rate in rates]
        first = np.flatnonzero(batch.positions % self.block_size == 0)
        new_blocks = batch.slot_mapping[self.entry_group][first] // self.block_size
        tables = batch.slot_tables[:, batch.slots, : batch.max_blocks]
        positions, of_token, mapping, blocks, new, *ends = self._upload(
            (batch.positions, row_of_token, batch.slot_mapping, tables, new_blocks, *ending)
        )
        if len(first):
            self.all_entries[new.long()] = 0
        return EntryStep(
            pool=self,
            positions=positions,
            row_of_token=of_token.long(),
            slot_mapping=mapping.long(),
            tables=blocks.long(),
            ending=dict(zip(rates, (one.long() for one in ends), strict=True)),
            bounds=batch.query_start_loc.tolist(),
            seq_lens=batch.seq_lens.tolist(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryStep:
    """One step's tokens. Tensors are on the pool's device, int64."""

    pool: EntryPool
    positions: torch.Tensor  # [num_tokens]
    row_of_token: torch.Tensor  # [num_tokens] the row of the batch
    slot_mapping: torch.Tensor  # [num_groups, num_tokens]
    tables: torch.Tensor  # [num_groups, num_rows, max_blocks]
    ending: dict[int, torch.Tensor]  # by rate: [n] the tokens of the step that end a window
    bounds: list[int]  # [num_rows + 1] where rows of the batch begin among the tokens
    seq_lens: list[int]  # [num_rows]

    def write_rows(self, rows: torch.Tensor, layer: int) -> None:
        """Write the tokens' ``rows`` ``[num_tokens, size]`` of a layer of the pool."""
        group, place = self.pool.groups.places[layer]
        blocks, offsets = self._split(self.slot_mapping[group])
        # NaN of a broken sequence must not enter the pool: its blocks may be cached all the same.
        self.pool.rows[group][blocks, place, offsets] = rows.nan_to_num(0.0, 0.0, 0.0)

    def rows_before(self, tokens: torch.Tensor, count: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The last ``count`` rows up to each of ``tokens`` ``[n]``, and whether there are any at these places of the sequence.

        ``[n, count, size]`` and ``[n, count]``. Where there are none it has the token's own row.
        """
        group, place = self.pool.groups.places[layer]
        own = self.positions[tokens, None]
        positions = own - torch.arange(count - 1, -1, -1, device=own.device)
        is_there = positions >= 0
        blocks, offsets = self._split(torch.where(is_there, positions, own))
        found = self.tables[group][self.row_of_token[tokens, None], blocks]
        return self.pool.rows[group][found, place, offsets], is_there

    def write_entries(self, entries: torch.Tensor, number: int) -> None:
        """Write ``entries`` ``[n, size]`` of the windows that end in the step. ``number``: among the layers that compress."""
        rate = self.pool.rates[number]
        tokens = self.ending[rate]
        blocks = self.slot_mapping[self.pool.entry_group, tokens] // self.pool.block_size
        self.pool.entries[number][blocks, self._places(self.positions[tokens] // rate, number)] = entries.nan_to_num(
            0.0, 0.0, 0.0
        )

    def entries(self, rows: torch.Tensor, numbers: torch.Tensor, number: int) -> torch.Tensor:
        """The entries ``[*shape, size]`` of a layer: ``numbers`` of the sequences in ``rows`` of the batch, both of one shape."""
        ends = (numbers + 1) * self.pool.rates[number] - 1
        blocks = self.tables[self.pool.entry_group][rows, ends // self.pool.block_size]
        found: torch.Tensor = self.pool.entries[number][blocks, self._places(numbers, number)]
        return found

    def _places(self, numbers: torch.Tensor, number: int) -> torch.Tensor:
        """Where in their blocks entries lie."""
        return torch.remainder(numbers, self.pool.entries[number].shape[1])

    def _split(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return numbers // self.pool.block_size, numbers % self.pool.block_size
