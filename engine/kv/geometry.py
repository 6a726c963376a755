"""The geometry of a model's K/V, from its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from kvrelay.common.kv_geometry import GroupKind, KvGeometry, KvGroup
from kvrelay.engine.config.model import ModelShape


def geometry_of(shape: ModelShape, block_size: int, dtype: torch.dtype) -> KvGeometry:
    """Layers with the same window are groups (:class:`LayerGroups`). ``dtype``: of the pool."""
    groups = LayerGroups.of(shape.sliding_windows)
    is_latent = shape.latent_rank is not None
    return KvGeometry(
        groups=tuple(
            KvGroup(
                kind=GroupKind.LATENT if is_latent else GroupKind.FULL if window is None else GroupKind.WINDOW,
                window=window,
                layers=layers,
                num_kv_heads=shape.num_kv_heads,
                key_size=shape.head_dim,
                value_size=0 if is_latent else shape.head_dim,
                dtype=str(dtype).removeprefix("torch."),
            )
            for window, layers in zip(groups.windows, groups.layers, strict=True)
        ),
        block_size=block_size,
    )


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Which layers are a group, as whoever attends needs it. Groups without a window come first."""

    windows: tuple[int | None, ...]  # of each group
    layers: tuple[tuple[int, ...], ...]  # of each group
    places: dict[int, tuple[int, int]]  # of each layer its group, and which of the group's layers it is

    @classmethod
    def of(cls, windows: Sequence[int | None]) -> LayerGroups:
        """``windows``: of each layer.

        No group is larger than all layers of the rarest window: physical blocks of all groups have one size, that of the largest.
        So five layers with a window for each one without are five groups beside one, and hardly anything is left unused.
        """
        by_window: dict[int | None, list[int]] = {}
        for layer, window in enumerate(windows):
            by_window.setdefault(window, []).append(layer)
        most = min(map(len, by_window.values()))
        groups: list[tuple[int | None, tuple[int, ...]]] = []
        for window in sorted(by_window, key=lambda one: one or 0):
            its = by_window[window]
            count = -(-len(its) // most)
            # As even as can be: what a smaller group leaves unused does not travel.
            bounds = [len(its) * number // count for number in range(count + 1)]
            groups += [(window, tuple(its[start:end])) for start, end in pairwise(bounds)]
        places = {layer: (group, place) for group, (_, its) in enumerate(groups) for place, layer in enumerate(its)}
        return cls(tuple(window for window, _ in groups), tuple(its for _, its in groups), places)
