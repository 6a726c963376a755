"""The geometry of a model's K/V, from its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from kvrelay.common.kv_geometry import STATE_WINDOW, Chunk, GroupKind, KvGeometry, KvGroup, Window, window_size
from kvrelay.engine.config.model import EntrySizes, KvSizes, ModelShape, StateTensor

STATE_ALIGNMENT = 16  # bytes; each tensor of a state begins at a multiple
POSITION_NBYTES = 8  # in front of a state's tensors: the number of tokens that it is of, int64
_SHARE_STEP = 16  # a token's share of a state, or of entries, is a multiple of so many elements, as heads are
_STATE_BLOCK_SIZES = (64, 512)  # tokens; at least some for a layer to compute at once, at most a step of a CPU


def geometry_of(shape: ModelShape, block_size: int, dtype: torch.dtype) -> KvGeometry:
    """The geometry with a group for each window and size (:class:`LayerGroups`). ``dtype``: of the pool."""
    groups = LayerGroups.of_shape(shape, block_size)
    return KvGeometry(
        groups=tuple(
            KvGroup(
                kind=_attention_kind(shape, window)
                if shape.entries or number < groups.num_attention
                else GroupKind.STATE,
                window=window,
                layers=layers,
                num_kv_heads=sizes.num_kv_heads,
                key_size=sizes.key_size,
                value_size=sizes.value_size,
                dtype=str(dtype).removeprefix("torch."),
            )
            for number, (window, sizes, layers) in enumerate(
                zip(groups.windows, groups.sizes, groups.layers, strict=True)
            )
        ),
        block_size=block_size,
    )


def _attention_kind(shape: ModelShape, window: Window | None) -> GroupKind:
    if shape.latent_rank is not None:
        return GroupKind.LATENT
    return GroupKind.FULL if window is None else GroupKind.WINDOW


def state_offsets(tensors: Sequence[StateTensor]) -> list[int]:
    """Where in a layer's state its tensors begin, in bytes, and where the last one ends; all are aligned."""
    offsets = [_aligned(POSITION_NBYTES)]
    for tensor in tensors:
        offsets.append(offsets[-1] + _aligned(tensor.nbytes))
    return offsets


def state_block_size(shape: ModelShape, at_least: int) -> int:
    """Tokens per block for a model with states: so many that a block's states take no more memory than its keys and values.

    Each full block has the states at its end, and a model's states are as large as the K/V of some hundred tokens.
    """
    size, largest = max(at_least, _STATE_BLOCK_SIZES[0]), _STATE_BLOCK_SIZES[1]
    while size < largest:
        groups = LayerGroups.of_shape(shape, size)
        if len(groups.layers) <= 2 * max(1, groups.num_attention):
            break
        size *= 2
    return size


def entries_per_block(rate: int, block_size: int) -> int:
    """The most entries whose last token is in one block."""
    return -(-block_size // rate)


def _entry_sizes(entries: Sequence[EntrySizes], block_size: int) -> KvSizes:
    """A token's share of the entries of all layers, if a block has room for all that end in it."""
    share = -(-sum(entries_per_block(one.rate, block_size) * one.size for one in entries) // block_size)
    return KvSizes(1, -(-share // _SHARE_STEP) * _SHARE_STEP, 0)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // STATE_ALIGNMENT) * STATE_ALIGNMENT


def state_nbytes(tensors: Sequence[StateTensor], block_size: int, itemsize: int) -> int:
    """Bytes that a layer's state takes in a block: its tensors, and what is unused. ``itemsize``: of the pool."""
    return _state_sizes(tensors, block_size, itemsize).count * block_size * itemsize


def _state_sizes(tensors: Sequence[StateTensor], block_size: int, itemsize: int) -> KvSizes:
    """A token's share of a state, if a block of tokens has the state's size. ``itemsize``: of the pool."""
    share = -(-state_offsets(tensors)[-1] // (block_size * itemsize))
    return KvSizes(1, -(-share // _SHARE_STEP) * _SHARE_STEP, 0)


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The layers of each group. Groups without a window come first, and those of states last."""

    windows: tuple[Window | None, ...]  # of each group
    sizes: tuple[KvSizes, ...]  # of each group
    layers: tuple[tuple[int, ...], ...]  # per group: its layers that are here
    places: dict[int, tuple[int, int]]  # per layer: its group, and its index in the group
    num_attention: (
        int  # groups that attention of the backends reads; the others are of states, or of a model with entries
    )

    @classmethod
    def of_shape(cls, shape: ModelShape, block_size: int) -> LayerGroups:
        """The groups of a model. Only those of states and entries depend on the block size."""
        itemsize = getattr(torch, shape.dtype).itemsize
        states = [_state_sizes(tensors, block_size, itemsize) for tensors in shape.states]
        if shape.entries:
            # Entries are of one layer, so that no group is smaller than all of them: only they grow with a sequence.
            windows = (*shape.sliding_windows, None)
            sizes = (*shape.kv_sizes, _entry_sizes(shape.entries, block_size))
            return replace(cls.of(windows, sizes, shape.stage_layers), num_attention=0)
        if shape.whole_layers is None:
            return cls.of(shape.sliding_windows, shape.kv_sizes, shape.stage_layers, states)
        whole = [_state_sizes(tensors, block_size, itemsize) for tensors in shape.whole_layers.states]
        groups = cls.of(shape.sliding_windows, shape.whole_layers.kv_sizes, shape.stage_layers, whole)
        own = (*shape.kv_sizes, *states)
        return replace(groups, sizes=tuple(own[its[0]] for its in groups.layers))

    @classmethod
    def of(
        cls,
        windows: Sequence[Window | None],
        sizes: Sequence[KvSizes],
        stage_layers: range | None = None,
        states: Sequence[KvSizes] = (),
    ) -> LayerGroups:
        """``windows``, ``sizes``: per layer. ``stage_layers``: the layers that are here; None: all. All ranks have the same groups,
        and a group may have no layer here. ``states``: sizes of the recurrent layers, which are numbered after the others.

        All groups' physical blocks have one size, that of the largest group. So no group has more layers than the rarest kind of
        layer. For example, five layers with a window for each one without become five groups beside one, and hardly any memory is
        unused. States do not count as a kind here: a sequence has few blocks of them, so what is unused there hardly matters.
        """
        by_kind: dict[_Kind, list[int]] = {}
        attention = [_Kind(False, window, its) for window, its in zip(windows, sizes, strict=True)]
        for layer, kind in enumerate([*attention, *(_Kind(True, STATE_WINDOW, its) for its in states)]):
            by_kind.setdefault(kind, []).append(layer)
        most = min(
            (len(its) * kind.sizes.count for kind, its in by_kind.items() if not kind.is_state),
            default=max(len(its) * kind.sizes.count for kind, its in by_kind.items()),
        )
        groups: list[tuple[_Kind, tuple[int, ...]]] = []
        for kind, its in sorted(by_kind.items(), key=lambda item: _order(item[0])):
            count = -(-len(its) // max(1, most // kind.sizes.count))
            # As even as possible: the unused part of a smaller group's block does not travel. Layers are dealt in turns, so
            # that a stage has some of
            # each group, and less of each physical block.
            groups += [(kind, tuple(its[number::count])) for number in range(count)]
        kinds, of_all = zip(*groups, strict=True)
        layers = tuple(tuple(layer for layer in its if stage_layers is None or layer in stage_layers) for its in of_all)
        places = {layer: (group, place) for group, its in enumerate(layers) for place, layer in enumerate(its)}
        return cls(
            tuple(kind.window for kind in kinds),
            tuple(kind.sizes for kind in kinds),
            layers,
            places,
            sum(not kind.is_state for kind in kinds),
        )


class _Kind(NamedTuple):
    """What layers of a group have in common."""

    is_state: bool
    window: Window | None
    sizes: KvSizes


def _order(kind: _Kind) -> tuple[bool, int, bool, KvSizes]:
    window = kind.window
    return kind.is_state, 0 if window is None else window_size(window), isinstance(window, Chunk), kind.sizes
