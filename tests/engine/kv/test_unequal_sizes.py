"""Keys and values of unequal size, and sizes that differ by layer: the pool has exactly these sizes, and all readers
use them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvrelay.common.kv_geometry import KvGeometry
from kvrelay.engine.backends.cpu.native import CpuKernels
from kvrelay.engine.backends.cpu.native.compiled import default_cache_dir
from kvrelay.engine.backends.cpu.native_ops import NativeCpuPagedOps
from kvrelay.engine.backends.cpu.ops import CpuPagedOps
from kvrelay.engine.config.cut import Cut
from kvrelay.engine.config.model import KvSizes, ModelShape
from kvrelay.engine.kv.fragments import taken
from kvrelay.engine.kv.gathered import GatheredStore, HostPart
from kvrelay.engine.kv.geometry import LayerGroups, geometry_of
from kvrelay.engine.kv.pool import KvPool
from kvrelay.engine.kv.views import view_groups
from kvrelay.engine.step.interface import StepRow
from tests.engine.backends.test_attention import dense
from tests.engine.conftest import sequence
from tests.engine.led import batch_of

BLOCK_SIZE, Q_HEADS = 8, 4
FULL, WINDOW = KvSizes(2, 96, 64), KvSizes(4, 64, 32)
SIZES = (WINDOW, FULL, WINDOW, WINDOW, FULL)
WINDOWS = (12, None, 12, 12, None)
SHAPE = ModelShape(
    architecture="unequal", vocab_size=9, num_layers=len(SIZES), num_q_heads=Q_HEADS, num_kv_heads=4, head_dim=96,
    max_position_embeddings=512, sliding_windows=WINDOWS, layer_sizes=SIZES, dtype="float32", rope_text="",
)  # fmt: skip


def geometry(dtype: torch.dtype = torch.float32) -> KvGeometry:
    return geometry_of(SHAPE, BLOCK_SIZE, dtype)


def test_a_token_takes_what_its_layers_keep_and_no_more() -> None:
    assert geometry().token_nbytes == 4 * (3 * 4 * (64 + 32) + 2 * 2 * (96 + 64))
    assert [(one.window, one.layers) for one in geometry().groups] == [
        (None, (1, 4)), (12, (0,)), (12, (2,)), (12, (3,)),
    ]  # fmt: skip


def test_groups_are_of_about_one_size_in_bytes() -> None:
    large, small = KvSizes(1, 48, 16), KvSizes(1, 8, 8)
    groups = LayerGroups.of([None, 4, 4, 4, 4, 4, 4, 4, 4], [large] + [small] * 8)
    assert [len(layers) for layers in groups.layers] == [1, 4, 4]


def test_every_number_of_a_block_belongs_to_one_head_of_one_layer() -> None:
    groups = LayerGroups.of_shape(SHAPE, BLOCK_SIZE)
    for group, layers in enumerate(groups.layers):
        pool = KvPool(geometry(), 2, torch.device("cpu"))
        kv = view_groups(pool.tensor, groups)[group]
        for view in (kv.keys, kv.values):
            view[1, : len(layers)] += 1
        used = pool.tensor[1].flatten()
        assert (used[: len(layers) * kv.layer_stride] == 1).all()
        assert not used[len(layers) * kv.layer_stride :].any()
        assert not pool.tensor[0].any()


@pytest.mark.parametrize("group", range(4))
def test_ranks_blocks_are_put_together_and_taken_apart_by_their_group(group: int) -> None:
    layout, random = geometry(), np.random.default_rng(group)
    parts = [
        np.zeros(
            (1, max(sum(one.nbytes for one in taken(layout, Cut(rank, 2), of)) for of in range(4))), dtype=np.uint8
        )
        for rank in range(2)
    ]
    store = GatheredStore(layout, 1, [HostPart(part) for part in parts])
    block = random.integers(0, 256, layout.physical_nbytes, dtype=np.uint8)
    store.open_write(0, group)[:] = block
    store.close_write(0)
    nbytes = layout.groups[group].token_nbytes * BLOCK_SIZE
    assert (store.gather(0, group)[:nbytes] == block[:nbytes]).all()
    of = layout.groups[group]
    keys = block[: BLOCK_SIZE * of.num_kv_heads * of.key_size * 4].reshape(of.num_kv_heads, -1)
    assert (parts[1][0, : keys.size // 2] == keys[of.num_kv_heads // 2 :].reshape(-1)).all()


@pytest.mark.parametrize("kind", ["torch", "torch bf16", "native"])
@pytest.mark.parametrize("rows", [[(30, 1)], [(30, 1), (64, 1), (0, 21), (9, 5)]], ids=["alone", "batch"])
def test_attention_over_blocks_that_were_full_of_nan(kind: str, rows: list[tuple[int, int]]) -> None:
    """NaN that a failed sequence or a broken transfer left in a block does not reach the block's next owner."""
    dtype = torch.float32 if kind in ("torch", "triton") else torch.bfloat16
    generator = torch.Generator().manual_seed(1)
    free = list(range(3 * 40))
    pool = KvPool(geometry(dtype), len(free), torch.device("cpu"))
    pool.tensor.fill_(torch.nan)
    steps = []
    for start, count in rows:
        of = sequence([0] * (start + count), [free.pop(0) for _ in range(-(-(start + count) // BLOCK_SIZE))])
        of.num_computed_tokens = start
        steps.append(StepRow(of, count))
    batch = batch_of(steps, BLOCK_SIZE)
    tables = batch.block_tables()
    # One layer at a time, so the tables of one group serve for all.
    for layer, sizes in enumerate(SIZES):
        shape = replace(SHAPE, sliding_windows=(WINDOWS[layer],), layer_sizes=(sizes,))
        kv = view_groups(pool.tensor, LayerGroups.of_shape(shape, BLOCK_SIZE))[0]
        pool.tensor.fill_(torch.nan)
        contexts = []
        for index, (start, count) in enumerate(rows):
            keys, values = (
                torch.randn(sizes.num_kv_heads, start + count, size, generator=generator).to(dtype)
                for size in (sizes.key_size, sizes.value_size)
            )
            contexts.append((keys, values))
            for position in range(start):
                block, offset = tables[index][position // BLOCK_SIZE], position % BLOCK_SIZE
                kv.keys[block, 0, :, offset] = keys[:, position]
                kv.values[block, 0, :, offset] = values[:, position]
        query = torch.randn(len(batch.positions), Q_HEADS, sizes.key_size, generator=generator).to(dtype)
        step = _ops(kind, shape, pool).begin_step(batch)
        new = [
            torch.cat(
                [context[kind_][:, start:].transpose(0, 1) for context, (start, _) in zip(contexts, rows, strict=True)]
            )
            for kind_ in (0, 1)
        ]
        step.kv_write(*new, 0)
        out = step.attention(query, 0)
        assert out.shape == (len(query), Q_HEADS, sizes.value_size)
        for index, (keys, values) in enumerate(contexts):
            tokens = slice(int(batch.query_start_loc[index]), int(batch.query_start_loc[index + 1]))
            expected = dense(query[tokens], keys, values, WINDOWS[layer])
            torch.testing.assert_close(
                out[tokens].double(), expected, atol=2e-5 if dtype == torch.float32 else 3e-2, rtol=0
            )


def _ops(kind: str, shape: Any, pool: KvPool) -> Any:
    if kind == "native":
        return NativeCpuPagedOps(shape, pool.tensor, CpuKernels.load(default_cache_dir()))
    return CpuPagedOps(shape, pool.tensor)
