"""The state that an engine keeps of its sequences from step to step; plans change it.

Numbers that every step needs are in arrays over all slots, so that a step can index its rows at once. All of it is on the host;
backends keep what is on a device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.images.interface import ReadImages
from kvrelay.engine.step.plan import SlotJoin, StepPlan, TableDelta
from kvrelay.engine.step.token_counts import TokenCounts

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

# Features of a row's sampling beyond argmax; bits of ``Slots.asks``.
RANDOM, LOGPROBS, PENALTIES, WATERMARK, PROCESSORS = (1 << bit for bit in range(5))

_LOW32 = 2**32 - 1
_LOW64 = 2**64 - 1
# Smaller values, which a client may ask for, would turn logits into infinities and the row into NaN.
_MIN_TEMPERATURE = 1e-6
_MIN_REPETITION_PENALTY = 1e-6


@dataclass(slots=True, eq=False)
class SlotSequence:
    """The part of a slot's sequence that is not a number."""

    name: str
    token_ids: list[int]  # tokens that the host knows
    num_prompt_tokens: int
    sampling: SamplingParams
    counts: TokenCounts | None = None  # for penalties, once they are needed
    images: ReadImages | None = None  # while some of their tokens may be uncomputed
    rotary_positions: Ints | None = None  # [axes, …], of its leading tokens; see ReadImages.positions
    position_offset: int = 0  # of all tokens behind these

    def count_tokens(self) -> TokenCounts:
        """The counts, updated. The sequence must have penalties."""
        if self.counts is None:
            counts_prompt = self.sampling.repetition_penalty != 1.0
            self.counts = TokenCounts(self.token_ids, self.num_prompt_tokens, counts_prompt=counts_prompt)
        else:
            self.counts.update(self.token_ids)
        return self.counts

    def behind(self, draft: tuple[int, ...]) -> SlotSequence:
        """A copy with the draft's tokens appended."""
        counts = self.count_tokens().copy() if self.sampling.needs_penalties else None
        return SlotSequence(self.name, self.token_ids + list(draft), self.num_prompt_tokens, self.sampling, counts)


NOBODY = SlotSequence("nobody", [0], 1, SamplingParams(max_tokens=1, temperature=0.0))
"""For free slots and ended sequences: greedy, with nothing else asked for."""


class Slots:
    """All slots of an engine. Arrays are indexed by slot; those of blocks by group first. Use it on the model thread only."""

    def __init__(self, num_slots: int, max_blocks: int, num_groups: int = 1) -> None:
        """``max_blocks``: blocks of the longest sequence."""
        self.sequences = [NOBODY] * num_slots
        self.block_tables: Ints = np.zeros((num_groups, num_slots, max_blocks), dtype=np.int64)  # 0 after their ends
        self.num_blocks: Ints = np.zeros((num_groups, num_slots), dtype=np.int64)
        self.is_special = np.zeros(num_slots, dtype=bool)  # has images, or an offset of its positions
        self.first_told: Ints = np.zeros(num_slots, dtype=np.int64)  # what tokens before it take of images did not come
        self.asks = np.zeros(num_slots, dtype=np.int64)
        self.temperature: Floats = np.zeros(num_slots, dtype=np.float32)  # 0 = greedy
        self.top_k = np.zeros(num_slots, dtype=np.int32)  # 0 = off
        self.top_p: Floats = np.ones(num_slots, dtype=np.float32)
        self.min_p: Floats = np.zeros(num_slots, dtype=np.float32)
        self.typical_p: Floats = np.ones(num_slots, dtype=np.float32)
        self.seeds = np.zeros(num_slots, dtype=np.uint64)
        self.choices = np.zeros(num_slots, dtype=np.uint64)
        self.repetition: Floats = np.ones(num_slots, dtype=np.float32)
        self.presence: Floats = np.zeros(num_slots, dtype=np.float32)
        self.frequency: Floats = np.zeros(num_slots, dtype=np.float32)

    def apply(self, plan: StepPlan) -> None:
        """Apply a plan. Raises ValueError if it names something that does not exist, or if a table does not fit."""
        if plan.resets:
            self.sequences = [NOBODY] * len(self.sequences)
        for slot in plan.leaves:
            self.sequences[slot] = NOBODY
        for join in plan.joins:
            self._join(join)
        for delta in plan.tables:
            self._change_table(delta)
        for row in plan.rows:
            if row.new_tokens:
                self.sequences[row.slot].token_ids.extend(row.new_tokens)

    def learn(self, new_tokens: Iterable[tuple[int, tuple[int, ...]]]) -> None:
        """Append new tokens, given as (slot, tokens)."""
        for slot, tokens in new_tokens:
            self.sequences[slot].token_ids.extend(tokens)

    def _join(self, join: SlotJoin) -> None:
        slot, params = join.slot, join.sampling
        self.sequences[slot] = SlotSequence(
            join.name,
            list(join.token_ids),
            join.num_prompt_tokens,
            params,
            images=join.images,
            rotary_positions=_positions(join.images),
            position_offset=join.position_offset,
        )
        self.is_special[slot] = join.images is not None or join.position_offset != 0
        self.first_told[slot] = 0 if join.images is not None else max((span.stop for span in join.spans), default=0)
        self.block_tables[:, slot, : self.num_blocks[:, slot].max()] = 0
        self.num_blocks[:, slot] = 0
        self.asks[slot] = (
            RANDOM * (params.temperature > 0)
            | LOGPROBS * (params.num_top_logprobs is not None)
            | PENALTIES * params.needs_penalties
            | WATERMARK * (params.watermark is not None)
            | PROCESSORS * bool(params.processors)
        )
        self.temperature[slot] = max(params.temperature, _MIN_TEMPERATURE) if params.temperature > 0 else 0.0
        self.top_k[slot] = min(params.top_k, 2**31 - 1)
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.typical_p[slot] = params.typical_p
        self.seeds[slot] = params.seed & _LOW64
        self.choices[slot] = params.choice & _LOW32
        self.repetition[slot] = max(params.repetition_penalty, _MIN_REPETITION_PENALTY)
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty

    def _change_table(self, delta: TableDelta) -> None:
        group, slot, end = delta.group, delta.slot, delta.start + len(delta.block_ids)
        num_groups, _, max_blocks = self.block_tables.shape
        if group >= num_groups or end > max_blocks:
            raise ValueError(
                f"{self.sequences[slot].name}: a table of {end} blocks in group {group}; there are {num_groups} groups, "
                f"of tables of {max_blocks}"
            )
        self.block_tables[group, slot, delta.start : end] = delta.block_ids
        # Stale entries after the end would be read as keys, if only under a mask.
        self.block_tables[group, slot, end : self.num_blocks[group, slot]] = 0
        self.num_blocks[group, slot] = end


def _positions(images: ReadImages | None) -> Ints | None:
    if images is None or images.positions is None:
        return None
    numbers = images.positions
    return np.frombuffer(numbers.data, dtype=numbers.dtype).reshape(numbers.shape)
