"""Where the layers and K/V heads of a rank are in a physical block of the whole model, for any number of stages and ranks.

In most groups a rank has some of the heads. :class:`kvrelay.engine.kv.division.Division` names the others.

A rank's block has the same order as the whole model's: layers, keys before values, heads, tokens; tensors of a state. So a range of
heads is two fragments per layer. A rank's block is the concatenation of its fragments, with what is unused behind each state. It is
empty if its stage has no layer of the group.

Between workers a block travels as a whole, whatever their ranks. The sender's ranks give each byte once. Bytes that none has are
zero, as in a pool of one rank. Every rank of the receiver takes its own part, including K/V heads that several ranks have. Pure:
touches no memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvrelay.common.kv_geometry import KvGeometry
from kvrelay.engine.config.cut import Cut
from kvrelay.engine.kv.division import BY_HEADS, Division


@dataclass(frozen=True, slots=True)
class Fragment:
    """A contiguous range of bytes, in the whole model's block and in a rank's."""

    start: int  # in the whole model's block
    own_start: int  # offset in the rank's block
    nbytes: int


def taken(geometry: KvGeometry, cut: Cut, group: int, division: Division = BY_HEADS) -> list[Fragment]:
    """All fragments of a rank's physical block of a group, in order."""
    return _fragments(geometry, cut, group, division)[0]


def given(geometry: KvGeometry, cut: Cut, group: int, division: Division = BY_HEADS) -> list[Fragment]:
    """What a rank contributes to an assembled physical block of a group: the fragments that no earlier rank of its stage has."""
    fragments = taken(geometry, cut, group, division)
    if cut.rank == 0:
        return fragments
    before = {one.start for one in taken(geometry, replace(cut, rank=cut.rank - 1), group, division)}
    return [one for one in fragments if one.start not in before]


def own_nbytes(geometry: KvGeometry, cut: Cut, division: Division = BY_HEADS) -> int:
    """Bytes of a rank's physical block, in the group of which it has the most."""
    return max(_fragments(geometry, cut, group, division)[1] for group in range(len(geometry.groups)))


def _fragments(geometry: KvGeometry, cut: Cut, group: int, division: Division) -> tuple[list[Fragment], int]:
    """The fragments of a rank's block, and its bytes."""
    of = geometry.groups[group]
    num_heads = of.num_kv_heads
    layers = cut.layers(1 + max(layer for one in geometry.groups for layer in one.layers))
    heads = range(num_heads) if group in division.whole else cut.heads(num_heads)
    item_nbytes = of.token_nbytes // (len(of.layers) * num_heads * (of.key_size + of.value_size))
    fragments: list[Fragment] = []
    start = own_start = 0
    for layer in of.layers:
        state = division.states.get(layer) if layer in layers else None
        if state is not None:
            fragments += [
                Fragment(start + one.of_rank(cut.rank), own_start + one.own_start, one.nbytes) for one in state.pieces
            ]
            own_start += state.nbytes
        for size in filter(None, (of.key_size, of.value_size)):
            head_nbytes = geometry.block_size * size * item_nbytes
            if layer in layers and state is None:
                nbytes = len(heads) * head_nbytes
                fragments.append(Fragment(start + heads.start * head_nbytes, own_start, nbytes))
                own_start += nbytes
            start += num_heads * head_nbytes
    return fragments, own_start
