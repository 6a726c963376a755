"""States of recurrent layers between workers of unequal ranks: each rank reads the rows of its heads, and a block is the same
whoever computed it.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvrelay.engine.config.cut import cuts_of
from kvrelay.engine.config.model import KvSizes, ModelShape, StateTensor, WholeLayers
from kvrelay.engine.kv.division import Division, divided_states, division_of
from kvrelay.engine.kv.fragments import own_nbytes
from kvrelay.engine.kv.gathered import GatheredStore, HostPart
from kvrelay.engine.kv.geometry import geometry_of
from kvrelay.engine.kv.pool import KvPool
from kvrelay.engine.kv.states import Part, StatePool

BLOCK_SIZE, NUM_LAYERS = 4, 3
KV = KvSizes(4, 16, 16)
CHANNELS = StateTensor("conv", 0, (16, 3), "bfloat16", 96, sections=(4, 4, 8))  # queries, keys, values
HEADS = StateTensor("recurrent", 0, (8, 4, 5), "float32", 640, sections=(8,))
SAME = StateTensor("recurrent", 1, (3,), "float32", 12)
WHOLE = ModelShape(
    architecture="x", vocab_size=9, num_layers=1, num_q_heads=4, num_kv_heads=4, head_dim=16, max_position_embeddings=99,
    sliding_windows=(None,), layer_sizes=(KV,), states=((CHANNELS, SAME, HEADS),) * NUM_LAYERS, dtype="float32", rope_text="",
)  # fmt: skip
CHANNELS_OF = {
    1: [list(range(16))],
    2: [[0, 1, 4, 5, 8, 9, 10, 11], [2, 3, 6, 7, 12, 13, 14, 15]],
    4: [[0, 4, 8, 9], [1, 5, 10, 11], [2, 6, 12, 13], [3, 7, 14, 15]],
}


def of_rank(num_ranks: int) -> ModelShape:
    """The shape of each of some ranks."""
    if num_ranks == 1:
        return WHOLE
    sizes = replace(KV, num_kv_heads=4 // num_ranks)
    states = tuple(tuple(one.of_rank(num_ranks) for one in tensors) for tensors in WHOLE.states)
    return replace(
        WHOLE, num_kv_heads=4 // num_ranks, layer_sizes=(sizes,), states=states, whole_layers=WholeLayers((KV,), WHOLE.states)
    )  # fmt: skip


class Worker:
    """The pools of a worker's ranks, with a block of states in each group. Other bytes are those that somebody left there."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.shape = of_rank(num_ranks)
        self.own = geometry_of(self.shape, BLOCK_SIZE, torch.float32)
        self.whole = geometry_of(WHOLE, BLOCK_SIZE, torch.float32)
        self.num_groups = len(self.whole.groups)
        self.pools = [KvPool(self.own, self.num_groups, torch.device("cpu")) for _ in range(num_ranks)]
        for pool in self.pools:
            pool.tensor.fill_(torch.nan)
        self.states = [StatePool(self.shape, pool.tensor, list) for pool in self.pools]
        self.division = division_of(self.whole, self.own, divided_states(self.shape, BLOCK_SIZE))
        parts = [HostPart(pool.blocks.numpy()) for pool in self.pools]
        self.store = GatheredStore(self.whole, self.num_groups, parts, division=self.division)

    def part(self, start: int) -> Part:
        """A sequence from position ``start`` on, the end of the block."""
        blocks = torch.arange(1, self.num_groups)[:, None]
        new = torch.tensor([[start == 0]])
        return Part(0, BLOCK_SIZE, np.array([start]), blocks, blocks, new, torch.tensor([start + BLOCK_SIZE]))

    def compute(self) -> None:
        """Give each row of each tensor, of channels or heads, its number in the whole model."""
        for rank, states in enumerate(self.states):
            for layer in range(NUM_LAYERS):
                found = states.read(self.part(0), layer)
                for one, tensor in states.tensors(layer, found):
                    rows = torch.tensor(self.rows(one, rank), dtype=tensor.dtype) + 100 * layer
                    tensor.copy_(rows.view(1, -1, *[1] * (tensor.dim() - 2)).expand_as(tensor))
                states.write(self.part(0), layer, found)

    def rows(self, tensor: StateTensor, rank: int) -> list[int]:
        """The numbers of the rank's rows in the whole tensor."""
        if tensor.kind == "conv":
            return CHANNELS_OF[self.num_ranks][rank]
        each = 8 // self.num_ranks
        return list(range(3)) if tensor.index else list(range(rank * each, (rank + 1) * each))

    def expect_states(self) -> None:
        """Every rank reads the rows of its heads, and the position."""
        for rank, states in enumerate(self.states):
            for layer in range(NUM_LAYERS):
                for one, tensor in states.tensors(layer, states.read(self.part(BLOCK_SIZE), layer)):
                    rows = tensor.view(len(self.rows(one, rank)), -1) - 100 * layer
                    assert (rows == rows[:, :1]).all()
                    assert rows[:, 0].int().tolist() == self.rows(one, rank), (rank, layer, one)


@pytest.mark.parametrize(("sender", "receiver"), list(itertools.product(CHANNELS_OF, repeat=2)))
def test_states_go_from_ranks_to_ranks(sender: int, receiver: int) -> None:
    source, alone, target = Worker(sender), Worker(1), Worker(receiver)
    source.compute()
    alone.compute()
    source.expect_states()
    for group in range(1, source.num_groups):
        block = source.store.gather(group, group)
        nbytes = BLOCK_SIZE * source.whole.groups[group].token_nbytes
        assert (block[:nbytes] == alone.pools[0].blocks.numpy()[group, :nbytes]).all(), "not the block of one rank"
        target.store.open_write(group, group)[:] = block.data
        target.store.close_write(group)
        assert (target.store.gather(group, group)[:nbytes] == block[:nbytes]).all()
    target.expect_states()


def test_a_rank_s_part_is_as_large_as_its_pool_s_blocks() -> None:
    for worker in map(Worker, (2, 4)):
        assert worker.division.whole == frozenset()
        for cut in cuts_of(worker.num_ranks, 1):
            assert own_nbytes(worker.whole, cut, worker.division) == worker.pools[0].block_nbytes


def test_whole_states_are_no_parts() -> None:
    """Of a type that is not cut, or of ranks that do not divide its heads."""
    states = tuple(tuple(replace(one, sections=()) for one in tensors) for tensors in WHOLE.states)
    shape = replace(of_rank(2), states=states, whole_layers=WholeLayers((KV,), states))
    parts = divided_states(shape, BLOCK_SIZE)
    assert parts == divided_states(WHOLE, BLOCK_SIZE) == {}
    whole, own = (geometry_of(one, BLOCK_SIZE, torch.float32) for one in (WHOLE, shape))
    assert division_of(whole, own, parts) == Division(frozenset(range(1, len(whole.groups))))
