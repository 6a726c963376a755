"""Repetition, presence and frequency penalties: what they cost which token, and their application on the CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.engine.sequence import Sequence

# A smaller one, which a client may ask for, would turn logits into infinities and the row into NaN.
_MIN_REPETITION_PENALTY = 1e-6

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of a batch: arrays ``[num_rows]``, and sparse entries ``[num_entries]``.

    There is one entry for each distinct token of a sequence that has penalties: of prompt and output if it has a
    repetition penalty, else of the output.
    """

    repetition: Floats
    presence: Floats
    frequency: Floats
    entry_rows: list[int]
    entry_tokens: list[int]
    entry_counts: list[int]  # occurrences in the output

    @classmethod
    def of(cls, sequences: Seq[Sequence]) -> Penalties:
        """From the sequences' parameters and tokens."""
        params = [sequence.sampling for sequence in sequences]
        entry_rows: list[int] = []
        entry_tokens: list[int] = []
        entry_counts: list[int] = []
        for row, sequence in enumerate(sequences):
            if sequence.sampling.needs_penalties:
                counts = Counter(sequence.token_ids[sequence.num_prompt_tokens :])
                if sequence.sampling.repetition_penalty != 1.0:
                    counts.update(dict.fromkeys(sequence.token_ids[: sequence.num_prompt_tokens], 0))
                entry_rows += [row] * len(counts)
                entry_tokens += counts.keys()
                entry_counts += counts.values()
        return cls(
            repetition=np.array(
                [max(row.repetition_penalty, _MIN_REPETITION_PENALTY) for row in params], dtype=np.float32
            ),
            presence=np.array([row.presence_penalty for row in params], dtype=np.float32),
            frequency=np.array([row.frequency_penalty for row in params], dtype=np.float32),
            entry_rows=entry_rows,
            entry_tokens=entry_tokens,
            entry_counts=entry_counts,
        )


def penalize(logits: torch.Tensor, penalties: Penalties) -> None:
    """Apply penalties to ``logits`` ``[num_rows, vocab]`` in place, entry by entry, on the CPU.

    Repetition as Hugging Face's processor does it (a positive logit is divided, a negative one multiplied), then
    frequency per occurrence and presence once, as OpenAI's API defines them.
    """
    entry_rows = np.array(penalties.entry_rows)
    index = torch.from_numpy(entry_rows), torch.tensor(penalties.entry_tokens)
    counts = torch.tensor(penalties.entry_counts, dtype=torch.float32)
    values = logits[index]
    repetition = torch.from_numpy(penalties.repetition[entry_rows])
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= torch.from_numpy(penalties.frequency[entry_rows]) * counts
    values -= torch.from_numpy(penalties.presence[entry_rows]) * (counts > 0)
    logits[index] = values
