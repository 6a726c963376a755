"""How the K/V of a model lie in blocks: groups of layers, and the bytes of a token in each. Data only; no tensors.

A block is ``block_size`` consecutive tokens of a sequence. Layers that keep the same of them are a **group**, and a block has a
physical block in each group. In a physical block come the group's layers, in a layer keys before values, then heads, then tokens.

All groups share one pool, so physical blocks of all of them have the same size: that of the largest group. What is behind a smaller
group's layers is unused.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

_MAX_STEP_TOKENS = 2048  # that somebody who does not know a worker's steps counts with
STATE_WINDOW = 2  # tokens: the next one reads the state that the token before it left, and leaves its own
_ITEM_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1}


class GroupKind(enum.StrEnum):
    """What a group keeps."""

    FULL = "full"  # keys and values of every token
    WINDOW = "window"  # of the last tokens, or of a chunk's
    LATENT = (
        "latent"  # one vector of every token, of which all heads' keys and values are made: a "key" without a value
    )
    STATE = "state"  # what a recurrent layer keeps of all tokens up to a block's last one; tables treat it as a small window


class Chunk(msgspec.Struct, frozen=True, order=True):
    """A token sees those of its own chunk: chunks of ``size`` tokens follow each other from position 0 on."""

    size: int


Window = int | Chunk
"""Tokens that a token sees, itself included: so many, or those of its chunk."""


class KvGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Layers that keep the same of each token."""

    kind: GroupKind
    window: Window | None = None  # None: a token sees all before it; STATE_WINDOW for states
    layers: tuple[int, ...]  # of the model, from 0; a layer that reads another's K/V is in no group
    num_kv_heads: int
    key_size: int  # elements of a key, per head; for states a token's share: a state has ``block_size`` of these
    value_size: int
    dtype: str  # "bfloat16", "float16", "float32", "float8_e4m3fn"; "uint8" of a fake engine

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token, all layers."""
        return len(self.layers) * self.num_kv_heads * (self.key_size + self.value_size) * _ITEM_NBYTES[self.dtype]


class KvGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """All groups of a model. They are numbered in this order: in block tables, in the ledger, on the wire."""

    groups: tuple[KvGroup, ...]
    block_size: int  # tokens per block

    @property
    def windows(self) -> tuple[Window | None, ...]:
        """Of each group."""
        return tuple(group.window for group in self.groups)

    @property
    def has_states(self) -> bool:
        """Whether layers keep a state, which later tokens overwrite: no token can be computed twice then."""
        return any(group.kind is GroupKind.STATE for group in self.groups)

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token in all groups but states."""
        return sum(group.token_nbytes for group in self.groups if group.kind is not GroupKind.STATE)

    @property
    def physical_nbytes(self) -> int:
        """Bytes of one physical block, of any group."""
        return self.block_size * max(group.token_nbytes for group in self.groups)

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block: its physical blocks in all groups."""
        return len(self.groups) * self.physical_nbytes

    def max_tokens(self, num_blocks: int, max_step_tokens: int) -> int | None:
        """Tokens of the longest sequence that a pool of so many blocks holds while it is computed; None: it may be of any length.

        ``max_step_tokens``: of a sequence that a step computes at most.
        """
        reaches = sorted(reach(one, max_step_tokens, self.block_size) for one in self.windows if one is not None)
        left, num_groups = num_blocks * len(self.groups), len(self.groups)
        for most in reaches:
            if left // num_groups <= most:
                return left // num_groups * self.block_size
            left, num_groups = left - most, num_groups - 1
        return left // num_groups * self.block_size if num_groups else None


def window_at(window: Window, position: Any) -> Any:
    """Tokens that the token at ``position`` sees, itself included. Of several positions (an array of integers) an array."""
    return position % window.size + 1 if isinstance(window, Chunk) else window


def window_size(window: Window) -> int:
    """The most that :func:`window_at` gives."""
    return window.size if isinstance(window, Chunk) else window


def first_block(window: Window | None, num_computed_tokens: int, block_size: int) -> int:
    """The first block that any token sees from position ``num_computed_tokens`` on."""
    if window is None:
        return 0
    return int(max(0, num_computed_tokens + 1 - window_at(window, num_computed_tokens)) // block_size)


def reach(window: Window, max_step_tokens: int, block_size: int) -> int:
    """Blocks that a sequence needs at most at a time in a group with a window, if a step computes so many tokens of it."""
    return -(-(window_size(window) - 1 + max_step_tokens) // block_size) + 1


def num_physical_blocks(
    windows: tuple[Window | None, ...], num_tokens: int, block_size: int, max_step_tokens: int
) -> int:
    """Physical blocks, of all groups together, that a sequence of ``num_tokens`` takes at most while it is computed."""
    num_blocks = -(-num_tokens // block_size)
    return sum(
        num_blocks if window is None else min(num_blocks, reach(window, max_step_tokens, block_size))
        for window in windows
    )


def num_whole_blocks(windows: tuple[Window | None, ...], num_tokens: int, block_size: int) -> int:
    """The same as a number of blocks with a physical one in every group: what they take together, for who counts in those.

    For steps of 2,048 tokens, which are more than most workers compute of a sequence.
    """
    return -(-num_physical_blocks(windows, num_tokens, block_size, _MAX_STEP_TOKENS) // len(windows))
