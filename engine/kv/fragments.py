"""Where the layers and K/V heads of a rank are in a physical block of the whole model, for any number of stages and ranks.

In most groups a rank has some of the heads. In some models every rank has all heads of a group (``is_whole``).

A rank's block has the same order as the whole model's: layers, keys before values, heads, tokens. So a range of heads is two
fragments per layer, and a rank's block is the concatenation of its fragments. It is empty if its stage has no layer of the group.
Between workers a block travels as a whole, whatever their ranks. The sender's ranks give each byte once. Every rank of the receiver
takes its own part, including K/V heads that several ranks have. Pure: touches no memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvrelay.common.kv_geometry import KvGeometry, KvGroup
from kvrelay.engine.config.cut import Cut


@dataclass(frozen=True, slots=True)
class Fragment:
    """A contiguous range of bytes, in the whole model's block and in a rank's."""

    start: int  # in the whole model's block
    own_start: int  # offset in the rank's block
    nbytes: int


def whole_groups(geometry: KvGeometry, own: KvGeometry) -> frozenset[int]:
    """The groups of which every rank has all heads. ``own``: the geometry of one of several ranks."""
    pairs = zip(geometry.groups, own.groups, strict=True)
    return frozenset(group for group, (of, its) in enumerate(pairs) if its.num_kv_heads == of.num_kv_heads)


def taken(geometry: KvGeometry, cut: Cut, group: int, *, is_whole: bool = False) -> list[Fragment]:
    """All fragments of a rank's physical block of a group, in order."""
    of = geometry.groups[group]
    num_layers = 1 + max(layer for one in geometry.groups for layer in one.layers)
    return _fragments(of, geometry.block_size, cut.layers(num_layers), _heads(of, cut, is_whole))


def given(geometry: KvGeometry, cut: Cut, group: int, *, is_whole: bool = False) -> list[Fragment]:
    """The fragments that a rank contributes when a physical block of a group is assembled: heads that no earlier rank of its stage
    has.
    """
    of = geometry.groups[group]
    is_copy = cut.rank > 0 and _heads(of, replace(cut, rank=cut.rank - 1), is_whole) == _heads(of, cut, is_whole)
    return [] if is_copy else taken(geometry, cut, group, is_whole=is_whole)


def own_nbytes(geometry: KvGeometry, cut: Cut, whole: frozenset[int] = frozenset()) -> int:
    """Bytes of a rank's physical block, in the group of which it has the most. ``whole``: see :func:`whole_groups`."""
    parts = (taken(geometry, cut, group, is_whole=group in whole) for group in range(len(geometry.groups)))
    return max(sum(one.nbytes for one in part) for part in parts)


def _heads(group: KvGroup, cut: Cut, is_whole: bool) -> range:
    return range(group.num_kv_heads) if is_whole else cut.heads(group.num_kv_heads)


def _fragments(group: KvGroup, block_size: int, layers: range, heads: range) -> list[Fragment]:
    item_nbytes = group.token_nbytes // (len(group.layers) * group.num_kv_heads * (group.key_size + group.value_size))
    fragments: list[Fragment] = []
    start = own_start = 0
    for layer in group.layers:
        for size in filter(None, (group.key_size, group.value_size)):
            head_nbytes = block_size * size * item_nbytes
            if layer in layers:
                nbytes = len(heads) * head_nbytes
                fragments.append(Fragment(start + heads.start * head_nbytes, own_start, nbytes))
                own_start += nbytes
            start += group.num_kv_heads * head_nbytes
    return fragments
