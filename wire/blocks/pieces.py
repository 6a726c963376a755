"""The parts in which a block travels, and which of them: the same on both sides, by what both know of the model.

A block has a physical block in each group of layers, and each is a **piece**, or several, of ranks. A group with a window needs the
last blocks of what is handed over, so of the others no piece of it is sent or awaited.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.common.kv_geometry import KvGeometry, Window, first_block


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of every block, which comes as a frame of its own."""

    sender_rank: int  # which of the sender's ranks has it
    start: int  # its first byte in the physical block
    nbytes: int
    group: int = 0  # of layers, whose physical block it is a part of
    window: Window | None = None  # of the group

    def first_block(self, num_tokens: int, block_size: int) -> int:
        """The first block whose piece travels, of a sequence that has so many tokens computed."""
        return first_block(self.window, num_tokens, block_size)


def pieces_of(geometry: KvGeometry) -> tuple[Piece, ...]:
    """Of a sender of one rank: each group's physical block as a whole, without what the group leaves unused."""
    return tuple(
        Piece(0, 0, geometry.block_size * group.token_nbytes, number, group.window)
        for number, group in enumerate(geometry.groups)
    )


def whole_block(block_nbytes: int) -> tuple[Piece, ...]:
    """Of a block of one group that comes as one."""
    return (Piece(0, 0, block_nbytes),)
