"""Repetition, presence and frequency penalties: the counts that they need, and their application on the CPU.

A token that the step in front samples is not yet known to the host. It is counted on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.engine.sampling.rows import Asking
from kvrelay.engine.step.slots import PENALTIES, Floats

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of a batch: arrays ``[num_rows]``, and sparse entries.

    There is one entry for each distinct token of a row with penalties: of prompt and output with a repetition penalty, else of the
    output. Entries are ordered by row. They are views of the slots' counts, which a later step updates, so apply them before that.
    A batch may have half a million entries, so only their upload copies them.
    """

    repetition: Floats
    presence: Floats
    frequency: Floats
    num_under_way: Ints  # tokens of the row that no entry counts because the host does not know them: 0 or 1
    row_starts: Ints  # [num_rows + 1] start of each row's entries
    entries: list[Ints]  # per row with penalties ``[n, 2]``: tokens, and their occurrences in the output

    @classmethod
    def of(cls, asking: Asking, num_ahead: Ints | None = None) -> Penalties:
        """From the rows' parameters and counts. Updates the counts.

        ``num_ahead`` ``[num_rows]``: number of tokens of each row under way; None: none.
        """
        rows = asking.rows_with(PENALTIES)
        entries = [asking.sequences[row].count_tokens().entries for row in rows.tolist()]
        num_entries = np.zeros(len(asking.index), dtype=np.int32)
        num_entries[rows] = [len(of_row) for of_row in entries]
        num_under_way = np.zeros(len(asking.index), dtype=np.int32)
        if num_ahead is not None:
            num_under_way[rows] = num_ahead[rows]
        slots, index = asking.slots, asking.index
        return cls(
            repetition=slots.repetition[index],
            presence=slots.presence[index],
            frequency=slots.frequency[index],
            num_under_way=num_under_way,
            row_starts=np.concatenate(([0], np.cumsum(num_entries))).astype(np.int32),
            entries=entries,
        )

    @property
    def num_entries(self) -> int:
        """The number of entries of all rows."""
        return int(self.row_starts[-1])

    @property
    def change_nothing(self) -> bool:
        """Whether no token of any row is penalised."""
        return not self.num_entries and not self.has_under_way

    @property
    def has_under_way(self) -> bool:
        """Whether some row has a token that the host does not know."""
        return bool(self.num_under_way.any())


def penalize(logits: torch.Tensor, penalties: Penalties, last_tokens: torch.Tensor | None) -> None:
    """Apply penalties to ``logits`` ``[num_rows, vocab]`` in place, entry by entry, on the CPU.

    Repetition works like Hugging Face's processor: a positive logit is divided, a negative one multiplied. Frequency is subtracted
    per occurrence and presence once, as OpenAI's API defines them. ``last_tokens`` as in SamplerOps.
    """
    entry_rows = np.repeat(np.arange(len(logits)), np.diff(penalties.row_starts))
    entries = np.concatenate([np.empty((0, 2), np.int32), *penalties.entries])
    entry_tokens, entry_counts = entries[:, 0].astype(np.int64), entries[:, 1]
    if last_tokens is not None:
        under_way, last = penalties.num_under_way > 0, last_tokens.numpy()
        is_last = under_way[entry_rows] & (entry_tokens == last[entry_rows])
        entry_counts = entry_counts + is_last
        under_way[entry_rows[is_last]] = False
        others = np.flatnonzero(under_way)
        entry_rows = np.concatenate((entry_rows, others))
        entry_tokens = np.concatenate((entry_tokens, last[others]))
        entry_counts = np.concatenate((entry_counts, np.ones_like(others, dtype=np.int32)))
    index = torch.from_numpy(entry_rows), torch.from_numpy(entry_tokens)
    counts = torch.from_numpy(entry_counts).float()
    values = logits[index]
    repetition = torch.from_numpy(penalties.repetition[entry_rows])
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= torch.from_numpy(penalties.frequency[entry_rows]) * counts
    values -= torch.from_numpy(penalties.presence[entry_rows]) * (counts > 0)
    logits[index] = values
