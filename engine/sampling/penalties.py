"""Repetition, presence and frequency penalties: what they cost which token, and their application on the CPU.

A token that the host does not know yet, since the step in front samples it, is counted where it is: on the device.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.engine.step.sequence import Sequence
from kvrelay.engine.step.token_counts import TokenCounts

# A smaller one, which a client may ask for, would turn logits into infinities and the row into NaN.
_MIN_REPETITION_PENALTY = 1e-6

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of a batch: arrays ``[num_rows]``, and sparse entries.

    There is one entry for each distinct token of a sequence that has penalties: of prompt and output if it has a
    repetition penalty, else of the output. Entries are ordered by row. They are the sequences' own, which a later step's penalties
    bring up to date: apply these before. A batch may have half a million, so nothing but their upload copies them.
    """

    repetition: Floats
    presence: Floats
    frequency: Floats
    num_under_way: Ints  # of the row's tokens, that no entry counts and the host does not know: 0 or 1
    row_starts: Ints  # [num_rows + 1] where each row's entries begin
    entries: list[Ints]  # of each row that has penalties, ``[n, 2]``: tokens, and their occurrences in the output

    @classmethod
    def of(cls, sequences: Seq[Sequence], num_ahead: Seq[int] | None = None) -> Penalties:
        """From the sequences' parameters and tokens, whose counts it brings up to date.

        ``num_ahead``: how many tokens of each are under way, None: none.
        """
        params = [sequence.sampling for sequence in sequences]
        row_starts = [0]
        entries: list[Ints] = []
        for sequence in sequences:
            num_entries = 0
            if sequence.sampling.needs_penalties:
                entries.append(_counts_of(sequence).entries)
                num_entries = len(entries[-1])
            row_starts.append(row_starts[-1] + num_entries)
        return cls(
            repetition=np.array(
                [max(row.repetition_penalty, _MIN_REPETITION_PENALTY) for row in params], dtype=np.float32
            ),
            presence=np.array([row.presence_penalty for row in params], dtype=np.float32),
            frequency=np.array([row.frequency_penalty for row in params], dtype=np.float32),
            num_under_way=np.array(
                [
                    count if row.needs_penalties else 0
                    for row, count in zip(params, num_ahead or [0] * len(params), strict=True)
                ],
                dtype=np.int32,
            ),
            row_starts=np.array(row_starts, dtype=np.int32),
            entries=entries,
        )

    @property
    def num_entries(self) -> int:
        """Of all rows."""
        return int(self.row_starts[-1])

    @property
    def change_nothing(self) -> bool:
        """Whether no token of any row costs anything."""
        return not self.num_entries and not self.has_under_way

    @property
    def has_under_way(self) -> bool:
        """Whether a token must be counted that the host does not know."""
        return bool(self.num_under_way.any())


def _counts_of(sequence: Sequence) -> TokenCounts:
    if sequence.token_counts is None:
        counts_prompt = sequence.sampling.repetition_penalty != 1.0
        sequence.token_counts = TokenCounts(sequence.token_ids, sequence.num_prompt_tokens, counts_prompt=counts_prompt)
    else:
        sequence.token_counts.update(sequence.token_ids)
    return sequence.token_counts


def penalize(logits: torch.Tensor, penalties: Penalties, last_tokens: torch.Tensor | None = None) -> None:
    """Apply penalties to ``logits`` ``[num_rows, vocab]`` in place, entry by entry, on the CPU.

    Repetition as Hugging Face's processor does it (a positive logit is divided, a negative one multiplied), then
    frequency per occurrence and presence once, as OpenAI's API defines them. ``last_tokens`` as in SamplerOps.
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
