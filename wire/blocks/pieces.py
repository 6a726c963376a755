"""The pieces in which a block travels. Both sides compute the same pieces from the model's geometry.

A block has a physical block in each group of layers; the used part of each is one **piece**. A group with a window needs only the
last blocks of a hand-off. So its pieces of earlier blocks are neither sent nor awaited.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.common.kv_geometry import KvGeometry, Window, first_block


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of every block that travels in a frame of its own."""

    nbytes: int  # from the start of the physical block
    group: int = 0  # the layer group of its physical block
    window: Window | None = None  # of the group

    def first_block(self, num_tokens: int, block_size: int) -> int:
        """The first block whose piece travels, of a sequence that has so many tokens computed."""
        return first_block(self.window, num_tokens, block_size)


def pieces_of(geometry: KvGeometry) -> tuple[Piece, ...]:
    """The used part of each group's physical block."""
    return tuple(
        Piece(geometry.block_size * group.token_nbytes, number, group.window)
        for number, group in enumerate(geometry.groups)
    )


def whole_block(block_nbytes: int) -> tuple[Piece, ...]:
    """The only piece of a block that has one group."""
    return (Piece(block_nbytes),)
