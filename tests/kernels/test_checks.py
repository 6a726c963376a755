"""Argument checks: the names in the messages, and the bounds of the pool's geometry."""

from __future__ import annotations

import pytest
import torch

from kvrelay.kernels.checks import PoolGeometry, next_power_of_2, require_shape, require_window


@pytest.mark.parametrize(("n", "expected"), [(1, 1), (2, 2), (3, 4), (16, 16), (17, 32), (80, 128)])
def test_next_power_of_2(n: int, expected: int) -> None:
    assert next_power_of_2(n) == expected


def test_shape_message_names_both_shapes() -> None:
    with pytest.raises(ValueError, match=r"q has shape \(2, 3\), expected \[num_tokens, 4\]"):
        require_shape("q", torch.empty(2, 3), ("num_tokens", 4))
    with pytest.raises(ValueError, match="expected"):
        require_shape("q", torch.empty(2), (2, 3))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 1, 2, 1, 16), "pool has shape"),
        ((2, 1, 3, 1, 16, 64), "pool has shape"),
        ((2, 1, 2, 1, 12, 64), "block_size is 12"),
        ((2, 1, 2, 1, 16, 72), "head_dim is 72"),
        ((2, 1, 2, 1, 16, 528), "head_dim is 528"),
    ],
)
def test_pool_geometry_refuses(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PoolGeometry.of(torch.empty(shape), 0)


def test_large_heads_are_refused_over_fp8() -> None:
    with pytest.raises(ValueError, match=r"head_dim is 272 over torch\.float8_e4m3fn, expected at most 256"):
        PoolGeometry.of(torch.empty((2, 1, 2, 1, 16, 272), dtype=torch.float8_e4m3fn), 0)


def test_pool_geometry_refuses_layer_layout_and_heads() -> None:
    pool = torch.empty(2, 3, 2, 3, 16, 64)
    assert PoolGeometry.of(pool, 2).group_size(9) == 3
    with pytest.raises(ValueError, match="layer is 3"):
        PoolGeometry.of(pool, 3)
    with pytest.raises(ValueError, match="contiguous"):
        PoolGeometry.of(pool.transpose(0, 1).contiguous().transpose(0, 1), 0)
    with pytest.raises(ValueError, match="num_q_heads is 8, expected a multiple of 3"):
        PoolGeometry.of(pool, 0).group_size(8)


def test_window_below_one_is_refused() -> None:
    require_window(None)
    require_window(1)
    with pytest.raises(ValueError, match="sliding_window is 0"):
        require_window(0)
