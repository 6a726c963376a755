"""The pieces in which a block travels. Both sides compute the same pieces from the model's geometry.

A block has a physical block in each group of layers. Each physical block is one **piece**, or one for each rank. A group with a
window needs only the last blocks of a hand-off. So its pieces of earlier blocks are neither sent nor awaited.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.common.kv_geometry import KvGeometry, Window, first_block


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of every block that travels in a frame of its own."""

    sender_rank: int  # rank of the sender that has the piece
    start: int  # its first byte in the physical block
    nbytes: int
    group: int = 0  # the layer group of its physical block
    window: Window | None = None  # of the group

    def first_block(self, num_tokens: int, block_size: int) -> int:
        """The first block whose piece travels, of a sequence that has so many tokens computed."""
        return first_block(self.window, num_tokens, block_size)


def pieces_of(geometry: KvGeometry) -> tuple[Piece, ...]:
    """The pieces of a sender with one rank: the used part of each group's physical block."""
    return tuple(
        Piece(0, 0, geometry.block_size * group.token_nbytes, number, group.window)
        for number, group in enumerate(geometry.groups)
    )


def whole_block(block_nbytes: int) -> tuple[Piece, ...]:
    """The only piece of a block that has one group."""
    return (Piece(0, 0, block_nbytes),)
