"""A model's geometry is that of its pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.engine.config.model import load_config
from kvrelay.engine.kv.geometry import geometry_of
from kvrelay.engine.kv.pool import KvPool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_pool_s_blocks_have_the_bytes_of_the_geometry(llama: tuple[Path, Any], dtype: torch.dtype) -> None:
    config = load_config(llama[0])
    geometry = geometry_of(config, 8, dtype)
    (group,) = geometry.groups
    assert group.layers == tuple(range(config.num_layers))
    pool = KvPool(geometry, 3, torch.device("cpu"))
    assert (pool.tensor.dtype, pool.block_nbytes) == (dtype, geometry.block_nbytes)
    assert pool.tensor.shape == (3, config.num_layers, 2, config.num_kv_heads, 8, config.head_dim)
