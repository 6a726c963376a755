"""What a batch's sequences ask of the draw, as arrays: built once per step from parameters and positions."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvrelay.engine.sampling.noise import uniforms
from kvrelay.engine.step.sequence import Sequence

_LOW32 = 2**32 - 1
_LOW64 = 2**64 - 1
# A smaller one, which a client may ask for, would turn logits into infinities and the row into NaN.
_MIN_TEMPERATURE = 1e-6

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """All arrays are ``[num_rows]``."""

    temperature: Floats  # 0 = greedy
    top_k: npt.NDArray[np.int32]  # 0 = off
    top_p: Floats
    min_p: Floats
    typical_p: Floats
    uniforms: npt.NDArray[np.float64]

    @classmethod
    def of(cls, sequences: Seq[Sequence], num_ahead: Seq[int] | None = None) -> SamplingRows:
        """From the sequences' parameters; the noise is that of the next position.

        ``num_ahead``: how many tokens each sequence will have by then that it does not have yet; None: none.
        """
        positions = np.array([len(sequence.token_ids) for sequence in sequences], dtype=np.uint64)
        if num_ahead is not None:
            positions += np.array(num_ahead, dtype=np.uint64)
        params = [sequence.sampling for sequence in sequences]
        return cls(
            temperature=np.array(
                [max(row.temperature, _MIN_TEMPERATURE) if row.temperature > 0 else 0.0 for row in params],
                dtype=np.float32,
            ),
            top_k=np.array([min(row.top_k, 2**31 - 1) for row in params], dtype=np.int32),
            top_p=np.array([row.top_p for row in params], dtype=np.float32),
            min_p=np.array([row.min_p for row in params], dtype=np.float32),
            typical_p=np.array([row.typical_p for row in params], dtype=np.float32),
            uniforms=uniforms(
                np.array([row.seed & _LOW64 for row in params], dtype=np.uint64),
                np.array([row.choice & _LOW32 for row in params], dtype=np.uint64),
                positions,
            ),
        )
