"""The numbers of one step on a GPU, also in the memory that a CUDA graph reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.engine.step.batch import Batch
from kvrelay.engine.step.uploads import Uploader, packed_nbytes


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's numbers on the device. Rows with a single token come first."""

    positions: torch.Tensor  # [num_tokens] int64
    slot_mapping: torch.Tensor  # [num_groups, num_tokens] int64
    slots: torch.Tensor  # [num_rows] int64, the slots whose block tables the rows use
    seq_lens: torch.Tensor  # [num_rows] int32, 0 for padding
    query_start_loc: torch.Tensor  # for the rows after num_decode_rows
    num_decode_rows: int
    max_query_len: int
    last_seen: torch.Tensor | None = None  # int32, Batch.last_seen of the rows after num_decode_rows
    # Known on the host: no row sees more tokens than ``longest``; tokens and ``seq_lens`` of the rows after num_decode_rows.
    longest: int = 0
    prompts: tuple[tuple[int, int], ...] = ()


class GraphInputs:
    """The numbers of a decode step in the memory that a graph reads: one contiguous piece, which one copy fills."""

    def __init__(
        self,
        uploader: Uploader,
        num_groups: int,
        num_rows: int,
        padding_slot: int,
        device: torch.device,
        longest: int = 0,
    ) -> None:
        """``num_rows`` rows, all padding at first: they have no keys to read, and their K/V go to ``padding_slot``. ``longest``:
        see StepInputs.
        """
        self._uploader = uploader
        self._positions, self._slots = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
        self._slot_mapping = np.full((num_groups, num_rows), padding_slot, np.int64)
        self._seq_lens = np.zeros(num_rows, np.int32)
        self._padding_slot = padding_slot
        self._memory = torch.empty(packed_nbytes(self._arrays), dtype=torch.uint8, device=device)
        positions, slot_mapping, slots, seq_lens, starts = uploader.upload(self._arrays, self._memory)
        self.inputs = StepInputs(positions, slot_mapping, slots, seq_lens, starts, num_rows, 1, longest=longest)

    @property
    def _arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """The arrays in the order of StepInputs."""
        no_prompts = np.zeros(1, np.int32)
        return self._positions, self._slot_mapping, self._slots, self._seq_lens, no_prompts

    def fill(self, batch: Batch) -> None:
        """Copy ``batch``, which must decode, followed by padding. Does not wait for the device."""
        num_rows = len(batch.rows)
        self._positions[:num_rows] = batch.positions
        self._slots[:num_rows] = batch.slots
        self._slot_mapping[:, :num_rows], self._slot_mapping[:, num_rows:] = batch.slot_mapping, self._padding_slot
        self._seq_lens[:num_rows], self._seq_lens[num_rows:] = batch.seq_lens, 0
        self._uploader.upload(self._arrays, self._memory)
