"""The states of recurrent layers in the pool."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvrelay.common.kv_geometry import GroupKind, KvGeometry
from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.config.model import KvSizes, ModelShape, StateTensor
from kvrelay.engine.kv.geometry import geometry_of, state_block_size
from kvrelay.engine.kv.pool import KvPool
from kvrelay.engine.kv.states import LayerStates, StatePool
from kvrelay.engine.step.batch import Batch, build_batch
from kvrelay.engine.step.plan import PlanRow, SlotJoin, StepPlan, TableDelta
from kvrelay.engine.step.slots import Slots

BLOCK_SIZE = 4
NUM_TOKENS = 11  # of each sequence
CONV = StateTensor("conv", 0, (6, 3), "bfloat16", 36)
RECURRENT = StateTensor("recurrent", 0, (2, 4, 4), "float32", 128)
SHAPE = ModelShape(
    architecture="Hybrid",
    vocab_size=100,
    num_layers=2,
    num_q_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_position_embeddings=64,
    sliding_windows=(None, None),
    states=((CONV, RECURRENT),) * 3,
    dtype="bfloat16",
    rope_text="none",
)
# Qwen3-Next 80B: 36 recurrent layers, 12 with attention.
QWEN3_NEXT = replace(
    SHAPE,
    num_kv_heads=2,
    head_dim=256,
    sliding_windows=(None,) * 12,
    states=(
        (
            StateTensor("conv", 0, (8192, 4), "bfloat16", 65_536),
            StateTensor("recurrent", 0, (32, 128, 128), "float32", 2**21),
        ),
    )
    * 36,
)


OUTPUTS = torch.zeros(1)


class Adds:
    """In the place of kernels: does what the layers of :meth:`Sequences.compute` do."""

    def add(self, layer: int, states: LayerStates) -> torch.Tensor:
        ragged = states.ragged
        ragged.require()
        assert ragged.seqs.tolist() == sorted(ragged.seqs.tolist())
        for pool in (states.conv, states.recurrent):
            for seq in range(ragged.num_seqs):
                state = torch.zeros_like(pool[0]) if ragged.is_new[seq] else pool[ragged.read[seq]]
                for part in range(*ragged.part_starts[seq : seq + 2].tolist()):
                    first, end = ragged.token_starts[part : part + 2].tolist()
                    assert ragged.seqs[first:end].unique().tolist() == [seq]
                    state = pool[ragged.write[part]] = state + (end - first) * (layer + 1)
        return OUTPUTS


class Sequences:
    """Two sequences with blocks of every group, and the states of their layers."""

    def __init__(self, kernels: Adds | None = None) -> None:
        self.geometry = geometry_of(SHAPE, BLOCK_SIZE, torch.bfloat16)
        num_groups = len(self.geometry.groups)
        self.pool = KvPool(self.geometry, 6 * num_groups, torch.device("cpu"))
        self.pool.tensor.fill_(torch.nan)  # what others left there
        self.states = StatePool(
            SHAPE,
            self.pool.tensor,
            lambda arrays: [torch.from_numpy(np.ascontiguousarray(one)) for one in arrays],
            kernels,  # type: ignore[arg-type]
        )
        self.slots = Slots(2, 3, num_groups)
        ids = tuple(range(1, NUM_TOKENS + 1))
        params = SamplingParams(max_tokens=1, temperature=0.0)
        joins = tuple(SlotJoin(slot, str(slot), ids, NUM_TOKENS, params) for slot in range(2))
        blocks = iter(range(self.pool.num_blocks))
        tables = tuple(
            TableDelta(slot, 0, tuple(next(blocks) for _ in range(3)), group)
            for slot in range(2)
            for group in range(num_groups)
        )
        self.slots.apply(StepPlan(rows=(), joins=joins, tables=tables))

    def batch(self, *rows: PlanRow) -> Batch:
        return build_batch(StepPlan(rows=rows), self.slots, BLOCK_SIZE)

    def compute(self, *rows: PlanRow) -> None:
        """A step whose layers add to their state the number of tokens of each part, times the layer's number."""
        step = self.states.begin_step(self.batch(*rows))
        for layer in range(3):
            if step.whole is not None:
                assert step.compute(layer, lambda kernels, states, its=layer: kernels.add(its, states)) is OUTPUTS
                continue
            for part in step.parts:
                states = self.states.read(part, layer)
                for _, tensor in self.states.tensors(layer, states):
                    tensor.add_(part.num_tokens * (layer + 1))
                self.states.write(part, layer, states)

    def found(self, slot: int, start: int) -> list[list[float]]:
        """The numbers in each layer's tensors in front of position ``start``; all of a tensor are equal."""
        (part,) = self.states.begin_step(self.batch(PlanRow(slot, start, 1))).parts
        tensors = [self.states.tensors(layer, self.states.read(part, layer)) for layer in range(3)]
        assert all((one == one.flatten()[0]).all() for of_layer in tensors for _, one in of_layer)
        return [[float(one.flatten()[0]) for _, one in of_layer] for of_layer in tensors]


def test_a_prompt_leaves_a_state_at_the_end_of_each_block_and_at_its_own() -> None:
    sequences = Sequences()
    sequences.compute(PlanRow(0, 0, 10))
    assert sequences.found(0, 4) == [[4, 4], [8, 8], [12, 12]]
    assert sequences.found(0, 8) == [[8, 8], [16, 16], [24, 24]]
    assert sequences.found(0, 10) == [[10, 10], [20, 20], [30, 30]]


def test_rows_of_one_token_are_computed_together_and_chunks_alone() -> None:
    sequences = Sequences()
    sequences.compute(PlanRow(0, 0, 1), PlanRow(1, 0, 6))
    step = sequences.states.begin_step(sequences.batch(PlanRow(0, 1, 1), PlanRow(1, 6, 5)))
    assert [(part.first, part.num_seqs, part.num_tokens) for part in step.parts] == [(0, 1, 1), (1, 1, 2), (3, 1, 3)]
    sequences.compute(PlanRow(0, 1, 1), PlanRow(1, 6, 1))
    assert sequences.found(0, 2) == [[2, 2], [4, 4], [6, 6]]
    assert sequences.found(1, 7) == [[7, 7], [14, 14], [21, 21]]


def test_kernels_for_whole_steps_leave_the_same_bytes() -> None:
    """Also where nothing is kept, and in front of each state."""
    parts, whole = Sequences(), Sequences(Adds())
    for rows in (
        [PlanRow(0, 0, 6)],
        [PlanRow(0, 6, 1), PlanRow(1, 0, 9)],
        [PlanRow(0, 7, 1), PlanRow(1, 9, 1)],
        [PlanRow(0, 8, 1), PlanRow(1, 10, 1)],
        [PlanRow(0, 0, 2), PlanRow(1, 0, 11)],  # after a failure
        [PlanRow(0, 2, 9)],
    ):
        parts.compute(*rows)
        whole.compute(*rows)
        assert whole.pool.tensor.view(torch.int16).equal(parts.pool.tensor.view(torch.int16))


@pytest.mark.parametrize("kernels", [None, Adds()])
@pytest.mark.parametrize("start", [5, 7])
def test_a_token_that_is_computed_twice_or_left_out_is_refused(start: int, kernels: Adds | None) -> None:
    sequences = Sequences(kernels)
    sequences.compute(PlanRow(0, 0, 6))
    with pytest.raises(AssertionError, match=rf"states of \[6\] tokens before positions \[{start}\]"):
        sequences.compute(PlanRow(0, start, 1))


def test_equal_states_have_equal_blocks() -> None:
    sequences = Sequences()
    sequences.compute(PlanRow(0, 0, 6), PlanRow(1, 0, 6))
    for group, one in enumerate(sequences.geometry.groups):
        if one.kind is GroupKind.STATE:
            nbytes = BLOCK_SIZE * one.token_nbytes
            first, second = (
                bytes(sequences.pool.open_read(int(sequences.slots.block_tables[group, slot, 1]))[:nbytes])
                for slot in range(2)
            )
            assert first == second


def waste(geometry: KvGeometry) -> list[float]:
    """The unused share of each group's physical blocks."""
    return [1 - geometry.block_size * one.token_nbytes / geometry.physical_nbytes for one in geometry.groups]


def test_blocks_are_long_enough_for_the_states_of_a_large_model() -> None:
    assert state_block_size(QWEN3_NEXT, 16) == 512
    geometry = geometry_of(QWEN3_NEXT, 512, torch.bfloat16)
    kinds = [one.kind for one in geometry.groups]
    assert kinds == [GroupKind.FULL] + [GroupKind.STATE] * 8
    unused = waste(geometry)
    assert unused[0] == 0
    assert max(unused) < 0.32
    assert geometry.token_nbytes == 12 * 2 * 2 * 256 * 2  # states take nothing per token
    # With blocks of 16 a state would be as large as a whole group's K/V of 43 tokens.
    assert waste(geometry_of(QWEN3_NEXT, 16, torch.bfloat16))[0] > 0.6


def test_a_model_without_attention_has_one_group() -> None:
    shape = replace(SHAPE, num_q_heads=0, num_kv_heads=0, head_dim=0, sliding_windows=(), layer_sizes=(), num_layers=0)
    (group,) = geometry_of(shape, 64, torch.bfloat16).groups
    assert (group.kind, group.layers, state_block_size(shape, 16)) == (GroupKind.STATE, (0, 1, 2), 64)


def test_states_come_behind_all_other_layers() -> None:
    sizes = (KvSizes(1, 16, 16), KvSizes(1, 32, 32))
    geometry = geometry_of(replace(SHAPE, layer_sizes=sizes, sliding_windows=(8, None)), 8, torch.bfloat16)
    assert [(one.kind, one.layers) for one in geometry.groups][:2] == [(GroupKind.FULL, (1,)), (GroupKind.WINDOW, (0,))]
    assert sorted(layer for one in geometry.groups[2:] for layer in one.layers) == [2, 3, 4]
    assert geometry.has_states
    assert not np.any([one.kind is not GroupKind.STATE for one in geometry.groups[2:]])
