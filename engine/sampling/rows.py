"""What a step's rows ask of the sampler, read from the slots' arrays once per step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvrelay.engine.sampling.noise import uniforms
from kvrelay.engine.step.slots import (
    NOBODY,
    PENALTIES,
    PROCESSORS,
    RANDOM,
    WATERMARK,
    Floats,
    Ints,
    Slots,
    SlotSequence,
)

_BY_TOKENS = PENALTIES | WATERMARK | PROCESSORS  # features that need the tokens so far


@dataclass(frozen=True, slots=True)
class Asking:
    """The rows that sample."""

    slots: Slots
    index: Ints  # [num_rows] each row's slot
    sequences: list[SlotSequence]
    asks: Ints  # [num_rows] see Slots
    positions: Ints  # [num_rows] of the tokens to sample

    @classmethod
    def of(
        cls,
        slots: Slots,
        index: Ints,
        positions: Ints,
        over: Seq[int] = (),
        drafts: Seq[tuple[int, ...]] = (),
    ) -> Asking:
        """``over``: rows whose token does not count. ``drafts``: per row, tokens after its slot's tokens; empty for no row."""
        sequences, asks = [slots.sequences[slot] for slot in index.tolist()], slots.asks[index]
        for row in over:
            sequences[row], asks[row] = NOBODY, 0
        for row, draft in enumerate(drafts):
            if draft and asks[row] & _BY_TOKENS:
                sequences[row] = sequences[row].behind(draft)
        return cls(slots, index, sequences, asks, positions)

    def rows_with(self, ask: int) -> Ints:
        """The rows that ask for any of ``ask``."""
        return np.flatnonzero(self.asks & ask)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The parameters of a draw. All arrays are ``[num_rows]``."""

    temperature: Floats  # 0 = greedy
    top_k: npt.NDArray[np.int32]  # 0 = off
    top_p: Floats
    min_p: Floats
    typical_p: Floats
    uniforms: npt.NDArray[np.float64]

    @classmethod
    def of(cls, asking: Asking) -> SamplingRows:
        """From the slots' parameters, with the noise of the positions."""
        slots, index = asking.slots, asking.index
        return cls(
            temperature=np.where(asking.asks & RANDOM, slots.temperature[index], np.float32(0)),
            top_k=slots.top_k[index],
            top_p=slots.top_p[index],
            min_p=slots.min_p[index],
            typical_p=slots.typical_p[index],
            uniforms=uniforms(slots.seeds[index], slots.choices[index], asking.positions.astype(np.uint64)),
        )
