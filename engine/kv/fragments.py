"""Where the layers and K/V heads of a rank lie in a physical block of the whole model: what is whose, between any two numbers of
stages and ranks.

A rank's block holds its layers and heads as the whole model's does: layer by layer, keys before values, then heads, then tokens. So
a range of heads is two fragments for each layer, and a rank's block is its fragments, one behind the other; none, if its stage has
no layer of the group. Between workers a block travels whole, whatever their ranks: the sender's ranks give each byte once, and
every rank of the receiver takes its own, K/V heads that are there several times included. Pure; no memory is touched here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvrelay.common.kv_geometry import KvGeometry, KvGroup
from kvrelay.engine.config.cut import Cut


@dataclass(frozen=True, slots=True)
class Fragment:
    """Bytes of a block that lie together, in the whole model's and in a rank's."""

    start: int  # in the whole model's block
    own_start: int  # in the rank's
    nbytes: int


def taken(geometry: KvGeometry, cut: Cut, group: int) -> list[Fragment]:
    """All of a rank's physical block of a group, in order."""
    of = geometry.groups[group]
    num_layers = 1 + max(layer for one in geometry.groups for layer in one.layers)
    return _fragments(of, geometry.block_size, cut.layers(num_layers), cut.heads(of.num_kv_heads))


def given(geometry: KvGeometry, cut: Cut, group: int) -> list[Fragment]:
    """What a rank gives when a physical block of a group is put together: its heads that no rank before it in its stage has."""
    num_kv_heads = geometry.groups[group].num_kv_heads
    is_copy = cut.rank > 0 and replace(cut, rank=cut.rank - 1).heads(num_kv_heads) == cut.heads(num_kv_heads)
    return [] if is_copy else taken(geometry, cut, group)


def own_nbytes(geometry: KvGeometry, cut: Cut) -> int:
    """Bytes of a rank's physical block, of any group: of that of which it has most."""
    return max(sum(one.nbytes for one in taken(geometry, cut, group)) for group in range(len(geometry.groups)))


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
