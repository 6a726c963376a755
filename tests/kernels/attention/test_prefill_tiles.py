"""How tiles of a pool are loaded. Capability, shape and dtype decide it, so these pools are without memory."""

from __future__ import annotations

import pytest
import torch

from kvrelay.kernels.attention.prefill_tiles import (
    TileLoads,
    box_obstacle,
    choose_tile,
    has_much_shared_memory,
    layer_boxes,
    looks_ahead,
    tile_loads,
)

HOPPER, BLACKWELL = (9, 0), (10, 0)
FP8 = torch.float8_e4m3fn


def pool_of(block_size: int, head_dim: int, dtype: torch.dtype = torch.bfloat16, num_blocks: int = 7) -> torch.Tensor:
    return torch.empty((num_blocks, 32, 2, 8, block_size, head_dim), dtype=dtype, device="meta")


@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL, (12, 0)])
@pytest.mark.parametrize(
    ("block_size", "head_dim", "dtype"),
    [
        (64, 128, torch.bfloat16),
        (64, 128, torch.float16),
        (64, 16, torch.bfloat16),
        (32, 256, torch.bfloat16),
        (64, 256, torch.bfloat16),
        (64, 128, FP8),
        (64, 64, FP8),
    ],
)
def test_a_tile_in_one_block_is_a_box(
    capability: tuple[int, int], block_size: int, head_dim: int, dtype: torch.dtype
) -> None:
    pool = pool_of(block_size, head_dim, dtype)
    assert tile_loads(capability, pool, has_window=False) is TileLoads.BOXES
    assert tile_loads(capability, pool, has_window=True) is TileLoads.POINTERS


def test_no_other_device_has_boxes() -> None:
    for capability in (None, (8, 0), (8, 9)):
        assert tile_loads(capability, pool_of(64, 128), has_window=False) is TileLoads.POINTERS


def test_what_spills_has_none() -> None:
    assert tile_loads(HOPPER, pool_of(64, 64), has_window=False) is TileLoads.BOXES
    assert tile_loads(BLACKWELL, pool_of(64, 64), has_window=False) is TileLoads.POINTERS


@pytest.mark.parametrize(
    ("pool", "obstacle"),
    [
        (pool_of(16, 128), "blocks of 16 tokens under tiles of 64"),
        (pool_of(32, 128), "blocks of 32 tokens under tiles of 64"),
        (pool_of(16, 256), "blocks of 16 tokens under tiles of 32"),
        (pool_of(64, 96), "a head_dim of 96, which is no power of two"),
        (pool_of(64, 128, torch.float32), "numbers of torch.float32"),
        (pool_of(64, 512), "a head_dim of 512; a box has 256 numbers a row at most"),
        (pool_of(64, 256, FP8), "a head_dim of 256 over torch.float8_e4m3fn"),
        (pool_of(64, 128, num_blocks=2**16), f"{2**31} rows, which 31 bits do not count"),
    ],
)
def test_obstacles_are_named(pool: torch.Tensor, obstacle: str) -> None:
    assert box_obstacle(pool, has_window=False) == obstacle
    assert tile_loads(HOPPER, pool, has_window=False) is TileLoads.POINTERS


def test_the_largest_pool_that_31_bits_count_has_boxes() -> None:
    assert box_obstacle(pool_of(64, 128, num_blocks=2**16 - 1), has_window=False) is None


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_boxes_reach_the_layers_last_row_and_not_past_the_pool(layer: int) -> None:
    pool = torch.arange(5 * 3 * 2 * 2 * 64 * 16).view(5, 3, 2, 2, 64, 16).bfloat16()
    boxes = layer_boxes(pool[:, layer])
    assert boxes.block_shape == [choose_tile(16, 2).keys, 16]
    num_rows = boxes.shape[0]
    assert pool[:, layer].storage_offset() + num_rows * 16 <= pool.numel()
    rows = boxes.base.as_strided(boxes.shape, boxes.strides)
    assert torch.equal(rows[-64:], pool[4, layer, 1, 1])
    block_rows, value_rows = pool.stride(0) // 16, pool.stride(2) // 16
    assert torch.equal(rows[2 * block_rows + 64 + value_rows :][:64], pool[2, layer, 1, 1])


def test_block_ids_are_loaded_ahead_where_there_is_no_older_gpu() -> None:
    assert looks_ahead(torch.device("cpu"))


def test_only_gpus_with_room_keep_a_third_buffer() -> None:
    assert [has_much_shared_memory(one) for one in (None, (8, 0), (8, 9), HOPPER, BLACKWELL, (12, 0))] == [
        False, False, False, True, True, False,
    ]  # fmt: skip
    for element_size, is_chunked, stages in ((2, False, 3), (1, False, 2), (2, True, 2), (4, False, 1)):
        tile = choose_tile(128, element_size, is_chunked=is_chunked, is_roomy=True)
        assert tile.num_stages == stages
