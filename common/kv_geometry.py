"""How the K/V of a model lie in blocks: groups of layers, and the bytes of a token in each. Data only; no tensors.

A block is ``block_size`` consecutive tokens of a sequence. Layers that keep the same of them are a **group**, and a block has a
physical block in each group. In a physical block come the group's layers, in a layer keys before values, then heads, then tokens.
"""

from __future__ import annotations

import enum

import msgspec

_ITEM_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1}


class GroupKind(enum.StrEnum):
    """What a group keeps."""

    FULL = "full"  # keys and values of every token


class KvGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Layers that keep the same of each token."""

    kind: GroupKind
    layers: tuple[int, ...]  # of the model, from 0; a layer that reads another's K/V is in no group
    num_kv_heads: int
    key_size: int  # elements of a key, per head
    value_size: int
    dtype: str  # "bfloat16", "float16", "float32", "float8_e4m3fn"; "uint8" of a fake engine

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token, all layers."""
        return len(self.layers) * self.num_kv_heads * (self.key_size + self.value_size) * _ITEM_NBYTES[self.dtype]


class KvGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """All groups of a model. They are numbered in this order: in block tables, in the ledger."""

    groups: tuple[KvGroup, ...]
    block_size: int  # tokens per block

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token in all groups."""
        return sum(group.token_nbytes for group in self.groups)

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block: its physical blocks in all groups."""
        return self.block_size * self.token_nbytes
