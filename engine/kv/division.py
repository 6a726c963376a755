"""How ranks divide what a block keeps: most K/V by heads, some not at all, and states of recurrent layers tensor by tensor.

A rank has an equal share of each divided tensor. The convolution of a gated delta rule has channels of queries, keys and values
behind each other. So a rank's channels are three ranges, and :attr:`StateTensor.sections` says how long each is in the whole model.
Positions, and tensors without sections, are the same on all ranks. Pure: touches no memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kvrelay.common.kv_geometry import KvGeometry
from kvrelay.engine.config.model import ModelShape, StateTensor
from kvrelay.engine.kv.geometry import POSITION_NBYTES, state_nbytes, state_offsets


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a layer's state. In the whole model the ranks' pieces follow each other, unless all have the same one."""

    start: int  # of the first rank's, in the whole model's state
    own_start: int  # in a rank's state
    nbytes: int  # of each rank
    is_shared: bool  # all ranks have the same

    def of_rank(self, rank: int) -> int:
        """Where a rank's piece begins in the whole model's state."""
        return self.start if self.is_shared else self.start + rank * self.nbytes


@dataclass(frozen=True, slots=True)
class DividedState:
    """A layer's state of which each rank has a part."""

    pieces: tuple[Piece, ...]
    nbytes: int  # that a rank's part takes in its block, with what is unused


DividedStates = Mapping[int, DividedState]
"""By layer of the pool; the states of other layers are whole on all ranks."""


@dataclass(frozen=True, slots=True)
class Division:
    """How several ranks divide blocks. What is not named is divided by heads."""

    whole: frozenset[int] = frozenset()  # groups of which every rank has all
    states: DividedStates = field(default_factory=dict)


BY_HEADS = Division()


def division_of(geometry: KvGeometry, own: KvGeometry, states: DividedStates) -> Division:
    """``geometry``: of the whole model. ``own``, ``states``: of one of several ranks."""
    pairs = zip(geometry.groups, own.groups, strict=True)
    whole = frozenset(
        group
        for group, (of, its) in enumerate(pairs)
        if its.num_kv_heads == of.num_kv_heads and states.keys().isdisjoint(of.layers)
    )
    return Division(whole, states)


def divided_states(shape: ModelShape, block_size: int) -> DividedStates:
    """What ``shape``, of a rank, has of the whole model's states. Empty if it has whole ones, or is of no rank."""
    if shape.whole_layers is None:
        return {}
    nbytes = (state_nbytes(own, block_size, getattr(torch, shape.dtype).itemsize) for own in shape.states)
    pairs = enumerate(zip(shape.whole_layers.states, shape.states, nbytes, strict=True), len(shape.sliding_windows))
    return {
        layer: DividedState(tuple(_pieces(whole, own)), size)
        for layer, (whole, own, size) in pairs
        if any(one.sections for one in whole)
    }


def _pieces(whole: Sequence[StateTensor], own: Sequence[StateTensor]) -> list[Piece]:
    pieces = [Piece(0, 0, POSITION_NBYTES, is_shared=True)]
    for of, its, start, own_start in zip(whole, own, state_offsets(whole), state_offsets(own), strict=False):
        if not of.sections:
            pieces.append(Piece(start, own_start, of.nbytes, is_shared=True))
            continue
        row_nbytes, num_ranks, first = of.nbytes // of.shape[0], of.shape[0] // its.shape[0], 0
        for size in of.sections:
            offset, own_offset = first * row_nbytes, first // num_ranks * row_nbytes
            nbytes = size // num_ranks * row_nbytes
            pieces.append(Piece(start + offset, own_start + own_offset, nbytes, is_shared=False))
            first += size
    return pieces
