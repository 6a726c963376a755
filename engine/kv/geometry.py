"""The geometry of a model's K/V, from its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvrelay.common.kv_geometry import Chunk, GroupKind, KvGeometry, KvGroup, Window, window_size
from kvrelay.engine.config.model import KvSizes, ModelShape


def geometry_of(shape: ModelShape, block_size: int, dtype: torch.dtype) -> KvGeometry:
    """The geometry with a group for each window and size (:class:`LayerGroups`). ``dtype``: of the pool."""
    groups = LayerGroups.of_shape(shape)
    is_latent = shape.latent_rank is not None
    return KvGeometry(
        groups=tuple(
            KvGroup(
                kind=GroupKind.LATENT if is_latent else GroupKind.FULL if window is None else GroupKind.WINDOW,
                window=window,
                layers=layers,
                num_kv_heads=sizes.num_kv_heads,
                key_size=sizes.key_size,
                value_size=sizes.value_size,
                dtype=str(dtype).removeprefix("torch."),
            )
            for window, sizes, layers in zip(groups.windows, groups.sizes, groups.layers, strict=True)
        ),
        block_size=block_size,
    )


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The layers of each group, as attention needs them. Groups without a window come first."""

    windows: tuple[Window | None, ...]  # of each group
    sizes: tuple[KvSizes, ...]  # of each group
    layers: tuple[tuple[int, ...], ...]  # per group: its layers that are here
    places: dict[int, tuple[int, int]]  # per layer: its group, and its index in the group

    @classmethod
    def of_shape(cls, shape: ModelShape) -> LayerGroups:
        """The groups of a model."""
        return cls.of(shape.sliding_windows, shape.kv_sizes, shape.stage_layers)

    @classmethod
    def of(
        cls, windows: Sequence[Window | None], sizes: Sequence[KvSizes], stage_layers: range | None = None
    ) -> LayerGroups:
        """``windows``, ``sizes``: per layer. ``stage_layers``: the layers that are here; None: all. All ranks have the same groups,
        and a group may have no layer here.

        All groups' physical blocks have one size, that of the largest group. So no group has more layers than the rarest kind of
        layer. For example, five layers with a window for each one without become five groups beside one, and hardly any memory is
        unused.
        """
        by_kind: dict[tuple[Window | None, KvSizes], list[int]] = {}
        for layer, kind in enumerate(zip(windows, sizes, strict=True)):
            by_kind.setdefault(kind, []).append(layer)
        most = min(len(its) * of_layer.count for (_, of_layer), its in by_kind.items())
        groups: list[tuple[Window | None, KvSizes, tuple[int, ...]]] = []
        for (window, of_layer), its in sorted(by_kind.items(), key=_order):
            count = -(-len(its) // max(1, most // of_layer.count))
            # As even as possible: the unused part of a smaller group's block does not travel. Layers are dealt in turns, so
            # that a stage has some of
            # each group, and less of each physical block.
            groups += [(window, of_layer, tuple(its[number::count])) for number in range(count)]
        of_windows, of_sizes, of_all = zip(*groups, strict=True)
        layers = tuple(tuple(layer for layer in its if stage_layers is None or layer in stage_layers) for its in of_all)
        places = {layer: (group, place) for group, its in enumerate(layers) for place, layer in enumerate(its)}
        return cls(of_windows, of_sizes, layers, places)


def _order(item: tuple[tuple[Window | None, KvSizes], list[int]]) -> tuple[int, bool, KvSizes]:
    (window, sizes), _ = item
    return 0 if window is None else window_size(window), isinstance(window, Chunk), sizes
