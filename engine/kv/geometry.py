"""The geometry of a model's K/V, from its configuration."""

from __future__ import annotations

import torch

from kvrelay.common.kv_geometry import GroupKind, KvGeometry, KvGroup
from kvrelay.engine.config.model import ModelShape


def geometry_of(shape: ModelShape, block_size: int, dtype: torch.dtype) -> KvGeometry:
    """One group: every layer keeps all tokens, also one whose queries see only a window of them. ``dtype``: of the pool."""
    group = KvGroup(
        kind=GroupKind.FULL,
        layers=tuple(range(shape.num_layers)),
        num_kv_heads=shape.num_kv_heads,
        key_size=shape.head_dim,
        value_size=shape.head_dim,
        dtype=str(dtype).removeprefix("torch."),
    )
    return KvGeometry(groups=(group,), block_size=block_size)
